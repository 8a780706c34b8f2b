"""DeltaNet: a linear attention that replaces what a key had stored.

Source: "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (arXiv 2406.06484).

    S[t] = S[t - 1] + beta[t] k[t] (v[t] - S[t - 1]^T k[t])^T        o[t] = S[t]^T q[t] / sqrt(s)        |q| = |k| = 1
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from lineartime.baselines.recurrence import Tokens
from lineartime.baselines.recurrent import RecurrentMixer, SoftplusDecay
from lineartime.layers.dense import Dense, factory
from lineartime.layers.mixer import MixerOptions
from lineartime.ops.packing import Packing


def delta_rule_oracle(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor) -> Tensor:
    """The definition for one head of one document, with decays: q, k [T, s], v [T, e], beta, alpha [T] -> [T, e]."""
    s, rows = v.new_zeros(k.shape[1], v.shape[1]), []
    for t in range(len(v)):
        s = alpha[t] * s
        s = s + beta[t] * torch.outer(k[t], v[t] - s.mT @ k[t])
        rows.append(s.mT @ q[t] / q.shape[1] ** 0.5)
    return torch.stack(rows)


class DeltaNet(RecurrentMixer):
    """DeltaNet: the delta rule with keys of unit length.

    Args:
        n_heads: H, which must divide d.
        short_convolution: whether queries, keys and values pass a short convolution.
        **options: the options of `Mixer`; causal is True, and False raises an error.
    """

    name = "deltanet"
    forgets: ClassVar[bool] = False
    """Whether there is a decay, and a gate on the output."""

    def __init__(
        self, d_model: int, *, n_heads: int = 6, short_convolution: bool = True, **options: Unpack[MixerOptions]
    ) -> None:
        widths = (d_model, d_model)
        super().__init__(d_model, n_heads, widths, gated=self.forgets, short_convolution=short_convolution, **options)
        self.to_beta = Dense(d_model, n_heads, **factory(options))
        self.decay = SoftplusDecay(d_model, n_heads, **factory(options)) if self.forgets else None

    def tokens(self, normed: Tensor, maps: Sequence[Tensor], packing: Packing) -> Tokens:
        q, k, v = (self.heads(each) for each in maps)
        q, k = (F.normalize(each, dim=-1, eps=1e-6) for each in (q, k))
        beta = self.to_beta(normed).sigmoid()[..., None]
        g = torch.zeros_like(beta) if self.decay is None else self.decay(normed)[1]
        stored = beta * k
        return Tokens(q * q.shape[-1] ** -0.5, stored, v, g, -g.exp() * stored, k)
