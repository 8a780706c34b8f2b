"""Gated DeltaNet: the delta rule with a decay that each token decides.

Source: "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv 2412.06464).

    S[t] = alpha[t] S[t - 1] + beta[t] k[t] (v[t] - alpha[t] S[t - 1]^T k[t])^T        alpha = exp(-A softplus(x w + b))
"""

from torch import Tensor
from typing_extensions import Unpack

from lineartime.baselines.deltanet import DeltaNet
from lineartime.baselines.recurrent import SoftplusDecay
from lineartime.layers.dense import factory
from lineartime.layers.mixer import MixerOptions


class GatedDeltaNet(DeltaNet):
    """Gated DeltaNet: a decay for each head and token, and a gate on the output.

    Values are as wide as keys. The options are those of `DeltaNet`.
    """

    name = "gated-deltanet"
    forgets = True

    def __init__(
        self, d_model: int, *, n_heads: int = 6, short_convolution: bool = True, **options: Unpack[MixerOptions]
    ) -> None:
        super().__init__(d_model, n_heads=n_heads, short_convolution=short_convolution, **options)
        self.decay = SoftplusDecay(d_model, n_heads, **factory(options))

    def log_decay(self, normed: Tensor) -> Tensor:
        """The logarithms of decays, [B, T, H, 1]."""
        log_decay: Tensor = self.decay(normed)[1]
        return log_decay
