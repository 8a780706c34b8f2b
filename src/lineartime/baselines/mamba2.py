"""Mamba-2: a state space model whose heads share queries and keys.

Source: "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space Duality"
(arXiv 2405.21060).

    S[t] = exp(-A step[t]) S[t - 1] + step[t] B[t] x[t]^T        y[t] = S[t]^T C[t] + D x[t]        step = softplus(u w + b)
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.baselines.recurrence import Tokens
from lineartime.baselines.recurrent import RecurrentMixer, SoftplusDecay
from lineartime.layers.dense import factory
from lineartime.layers.mixer import MixerOptions
from lineartime.layers.residual import RMSNorm
from lineartime.ops.checks import check_positive
from lineartime.ops.packing import Packing


def ssd_oracle(b: Tensor, c: Tensor, x: Tensor, step: Tensor, a: Tensor) -> Tensor:
    """The definition for one head of one document, without D: B, C [T, s], x [T, e], step [T], A [] -> [T, e]."""
    s, rows = x.new_zeros(b.shape[1], x.shape[1]), []
    for t in range(len(x)):
        s = (-a * step[t]).exp() * s + step[t] * torch.outer(b[t], x[t])
        rows.append(s.mT @ c[t])
    return torch.stack(rows)


class Mamba2(RecurrentMixer):
    """Mamba-2: a state space unit that needs no feed-forward layer.

    Args:
        n_heads: H, which must divide 2 d; published are heads of 64 values.
        d_state: s, the width of the queries and keys that all heads share.
        short_convolution: whether queries, keys and values pass a short convolution.
        **options: the options of `Mixer`; causal is True, and False raises an error.
    """

    name = "mamba2"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 24,
        d_state: int = 128,
        short_convolution: bool = True,
        **options: Unpack[MixerOptions],
    ) -> None:
        check_positive(d_model=d_model, n_heads=n_heads, d_state=d_state)
        values = 2 * d_model
        widths, maps = (n_heads * d_state, values), (d_state, d_state, values)
        super().__init__(d_model, n_heads, widths, maps, short_convolution=short_convolution, **options)
        self.d_state = d_state
        self.decay = SoftplusDecay(d_model, n_heads, **factory(options))
        self.skip = nn.Parameter(torch.empty(n_heads, **factory(options)))
        self.head_norm = RMSNorm(values, **factory(options))
        self.init_own()

    def init_own(self) -> None:
        nn.init.ones_(self.skip)

    def tokens(self, normed: Tensor, maps: Sequence[Tensor], packing: Packing) -> Tokens:
        q, k, v = maps
        step, g = self.decay(normed)
        return Tokens(q[:, None], k[:, None], step * self.heads(v), g)

    def combine(self, normed: Tensor, maps: Sequence[Tensor], x: Tokens, out: Tensor) -> Tensor:
        assert self.to_gate is not None
        out = (out + self.skip[:, None] * self.heads(maps[2])).flatten(1)
        added: Tensor = self.to_output(self.head_norm(out * F.silu(self.to_gate(normed))))
        return added
