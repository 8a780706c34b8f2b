"""GAU, the gated attention unit; a model of GAUs is FLASH-Quad.

Shapes: B batch, T tokens, N new tokens of a stream, D documents, L tokens of the longest, s query/key width,
e value width, R rows (one for each document).
"""

from typing import Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from lineartime.layers.checks import check_positive
from lineartime.layers.gated import GatedOptions, GatedUnit
from lineartime.layers.positions import RotaryBias, TableBias, build_relative_bias
from lineartime.layers.residual import new_positions
from lineartime.ops.layout import document_rows
from lineartime.ops.quadratic import QuadraticState, quadratic_attention, quadratic_attention_extend

PUBLISHED_LENGTH = 512
"""The constant n of a causal layer with normalization="paper" and no max_length: the paper's shortest context."""


class GAU(GatedUnit):
    """Gated attention unit: one layer in the place of attention and feed-forward, quadratic in T.

    Pre-norm and residual are inside: `y = GAU(256)(x)` maps [B, T, d] to [B, T, d]. With normalization="paper" it computes the
    published relu(q.k / n + bias)^2: n is the number of real tokens, or, in a causal layer, the constant `max_length` (512 if
    none is stated).

    Args:
        relative_bias: whether a learned bias by distance is added to the scores.
        max_length: the longest sequence the layer will see, or None. Up to 512 the relative bias is a table, and longer input
            an error; above, or with None, it is the rotary form, which has no limit.
        **options: those of `GatedUnit`.

    Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 2.2.
    """

    name = "gau"

    def __init__(
        self, d_model: int, *, relative_bias: bool = True, max_length: int | None = None, **options: Unpack[GatedOptions]
    ) -> None:
        super().__init__(d_model, **options)
        if max_length is not None:
            check_positive(max_length=max_length)
        self.max_length = max_length
        self.bias = build_relative_bias(max_length, self.d_qk) if relative_bias else None

    @property
    def longest_sequence(self) -> int | None:
        """The end of the table of relative biases, if there is one."""
        return self.bias.max_length if isinstance(self.bias, TableBias) else None

    def attend(self, maps: Tensor, v: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        """Every document by itself: [B, 2, T, s] and [B, T, e] -> [B, T, e]."""
        q, k = maps.unbind(1)
        if mask is None and cu_seqlens is None:
            return self.attend_rows(q, k, v, None)
        layout = document_rows(v.shape[0], v.shape[1], mask, cu_seqlens, v.device)
        q, k, v = (layout.arrange(x).flatten(0, 1) for x in (q, k, v))  # [B * D, L, f]
        attended = self.attend_rows(q, k, v, layout.real.flatten(0, 1))
        return layout.restore(attended.view(*layout.real.shape, v.shape[-1]))

    def attend_rows(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Every row by itself: [R, L, s], [R, L, s], [R, L, e] -> [R, L, e]; `real`, bool [R, L], where rows are shorter."""
        positions = new_positions(0, q.shape[1], q.device)
        return quadratic_attention(
            q,
            k,
            v,
            causal=self.causal,
            bias=self.bias.factors(positions, positions)
            if isinstance(self.bias, RotaryBias)
            else self._bias(positions, positions),
            mask=real,
            activation=self.activation,
            normalization=self._constant_normalization() if self.causal else self.normalization,
            backend=self.backend,
        )

    def _constant_normalization(self) -> int | Literal["count"]:
        """The divisor of a causal layer, which must not change with the current length."""
        return "count" if self.normalization == "count" else self.max_length or PUBLISHED_LENGTH

    def _bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor | None:
        if isinstance(self.bias, TableBias) and key_positions.shape[0] > self.bias.max_length:
            raise ValueError(
                f"The sequence has {key_positions.shape[0]} tokens, but this GAU's relative bias is a table for max_length = "
                f"{self.bias.max_length}: build it with a larger max_length, or with None for no limit."
            )
        return None if self.bias is None else self.bias(query_positions, key_positions)

    def init_state(self, batch_size: int) -> QuadraticState:
        """The state before the first token of `batch_size` streams; ValueError unless the layer is causal."""
        self.check_causal()
        weight = self.to_output.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        empty = torch.zeros(batch_size, 0, self.d_qk, dtype=dtype, device=weight.device)
        return QuadraticState(empty, empty.new_zeros(batch_size, 0, self.d_value))

    def attend_next(self, maps: Tensor, v: Tensor, state: QuadraticState) -> tuple[Tensor, QuadraticState]:
        """Attend with the cache of all earlier keys and values, and the cache grown by N tokens."""
        q, k = maps.unbind(1)
        total = state.position + v.shape[1]
        return quadratic_attention_extend(
            q,
            k,
            v,
            state,
            bias=self._bias(new_positions(state.position, v.shape[1], v.device), new_positions(0, total, v.device)),
            activation=self.activation,
            normalization=self._constant_normalization(),
        )
