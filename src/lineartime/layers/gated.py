"""The gated unit around both attentions of the paper: what GAU and FLASH share.

Shapes: B batch, T tokens, d model width, e = expansion * d value width, s query/key width.

    U = silu(x Wu + bu)  [B,T,e]      V = silu(x Wv + bv)  [B,T,e]      Z = silu(x Wz + bz)  [B,T,s]
    queries and keys = rope(Z * gamma + beta), one cheap (gamma, beta) for each
    out = input + (U * attention(..., V)) Wo + bo
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime.layers.checks import check_even, check_positive
from lineartime.layers.norms import Norm
from lineartime.layers.residual import Mixer, init_dense
from lineartime.ops.activations import ACTIVATIONS, NORMALIZATIONS, Activation, Normalization, check_choice
from lineartime.ops.positions import rope


class GatedUnit(Mixer):
    """Projections, gate and output of a gated attention layer (arXiv 2202.10447, section 2.2)."""

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: Literal[2, 4],
        d_qk: int,
        expansion: int,
        causal: bool,
        activation: Activation,
        normalization: Normalization,
        norm: Norm,
        rope: bool,
        dropout: float,
    ) -> None:
        super().__init__(d_model, causal, norm, dropout)
        check_choice("activation", activation, ACTIVATIONS)
        check_choice("normalization", normalization, NORMALIZATIONS)
        check_positive(d_qk=d_qk, expansion=expansion)
        check_even("rotary positions turn pairs of features", d_qk=d_qk)
        self.d_qk = d_qk
        self.d_value = expansion * d_model
        self.activation: Activation = activation
        self.normalization: Normalization = normalization
        self.rope = rope
        self.to_gate_value_base = init_dense(nn.Linear(d_model, 2 * self.d_value + d_qk))
        self.gamma = nn.Parameter(torch.empty(n_heads, d_qk))
        self.beta = nn.Parameter(torch.zeros(n_heads, d_qk))
        nn.init.normal_(self.gamma, std=0.02)
        self.to_output = init_dense(nn.Linear(self.d_value, d_model))

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """[B, T, d] -> the gate U and the values V, [B, T, e], and the queries and keys, each [B, T, s]."""
        projected = F.silu(self.to_gate_value_base(self.norm(x)))
        gate, value, base = projected.split([self.d_value, self.d_value, self.d_qk], dim=-1)
        heads = base[..., None, :, :] * self.gamma[:, None] + self.beta[:, None]  # [B, heads, T, s]
        if self.rope:
            heads = rope(heads, positions if positions.dim() == 1 else positions[:, None])
        return gate, value, heads.unbind(-3)

    def combine(self, x: Tensor, gate: Tensor, attended: Tensor) -> Tensor:
        """The gate, the output map and the residual: x [B, T, d], U and attention's output [B, T, e] -> [B, T, d]."""
        out: Tensor = x + self.dropout(self.to_output(gate * attended))
        return out
