"""RetNet: linear attention whose heads forget, each at its own rate.

Source: "Retentive Network" (arXiv 2307.08621), multi-scale retention with rotary positions.

    S[t] = gamma S[t - 1] + k[t] v[t]^T        o[t] = S[t]^T q[t] / sqrt(s)        gamma = 1 - 2^(-5 - head)
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from lineartime.baselines.recurrence import Tokens
from lineartime.baselines.recurrent import RecurrentMixer
from lineartime.layers.mixer import MixerOptions
from lineartime.ops.checks import check_n_heads
from lineartime.ops.modes import acc_dtype
from lineartime.ops.packing import Packing


def retention_oracle(q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
    """The definition for one head of one document, one query at a time: q, k [T, s], v [T, e] -> [T, e]."""
    gamma, rows = 1 - 2.0 ** (-5 - head), []
    for t in range(len(v)):
        rows.append(sum(gamma ** (t - j) * (q[t] @ k[j]) / q.shape[1] ** 0.5 * v[j] for j in range(t + 1)))
    return torch.stack(rows)


class RetNet(RecurrentMixer):
    """RetNet: rotary positions, and one decay a head.

    Args:
        n_heads: H, which must divide d into even widths.
        short_convolution: whether queries, keys and values pass a short convolution.
        **options: the options of `Mixer`; causal is True, and False raises an error.
    """

    name = "retnet"
    activated = False

    def __init__(
        self, d_model: int, *, n_heads: int = 3, short_convolution: bool = False, **options: Unpack[MixerOptions]
    ) -> None:
        super().__init__(d_model, n_heads, (d_model, d_model), short_convolution=short_convolution, **options)
        check_n_heads(n_heads, {"d_model": d_model}, in_pairs=True)
        self.rotated_width = d_model // n_heads

    def tokens(self, normed: Tensor, maps: Sequence[Tensor], packing: Packing) -> Tokens:
        q, k, v = (self.heads(each) for each in maps)
        powers = 5 + torch.arange(self.n_heads, device=v.device, dtype=acc_dtype(v))
        g = torch.log1p(-(2**-powers))[:, None].expand(*v.shape[:-1], 1)
        return Tokens(packing.rotate(q) * q.shape[-1] ** -0.5, packing.rotate(k), v, g)
