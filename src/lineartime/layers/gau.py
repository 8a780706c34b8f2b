"""GAU, the gated attention unit; a model of GAUs is FLASH-Quad.

Shapes: B batch, T tokens, N new tokens of a stream, D documents, L tokens of the longest, d model width.
"""

from typing import Literal

import torch
from torch import Tensor

from lineartime.layers.checks import check_positive
from lineartime.layers.gated import GatedUnit
from lineartime.layers.norms import Norm
from lineartime.layers.positions import TableBias, build_relative_bias
from lineartime.layers.residual import new_positions, zero_padding
from lineartime.ops.activations import Activation, Normalization
from lineartime.ops.layout import document_rows, token_positions
from lineartime.ops.quadratic import QuadraticState, quadratic_attention, quadratic_attention_extend

PUBLISHED_LENGTH = 512
"""The constant n of a causal layer with normalization="paper" and no max_length: the paper's shortest context."""


class GAU(GatedUnit):
    """Gated attention unit: one layer in the place of attention and feed-forward, quadratic in T.

    Pre-norm and residual are inside: `y = GAU(256)(x)` maps [B, T, d] to [B, T, d].

    Args:
        d_model: d, the width of inputs and outputs.
        d_qk: s, the width of queries and keys; even.
        expansion: values and gate are e = expansion * d wide.
        causal: whether a token reads only itself and earlier tokens; needed to stream.
        activation: "relu2", "softmax", "softmax_plus" or "laplace".
        normalization: "count" divides by the number of visible keys; "paper" is the published relu(q.k / n + bias)^2, with
            n the number of real tokens, or, in a causal layer, the constant `max_length` (512 if none is stated).
        norm: "layernorm", "scalenorm" or "rmsnorm".
        rope: whether queries and keys are rotated by their position.
        relative_bias: whether a learned bias by distance is added to the scores.
        max_length: the longest sequence the layer will see, or None. Up to 512 the relative bias is a table, and longer input
            an error; above, or with None, it is the rotary form, which has no limit.
        dropout: probability of dropping an output before the residual.

    Raises:
        ValueError: for an argument outside what it allows.

    Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 2.2.
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_qk: int = 128,
        expansion: int = 2,
        causal: bool = False,
        activation: Activation = "relu2",
        normalization: Normalization = "count",
        norm: Norm = "layernorm",
        rope: bool = True,
        relative_bias: bool = True,
        max_length: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(
            d_model,
            n_heads=2,
            d_qk=d_qk,
            expansion=expansion,
            causal=causal,
            activation=activation,
            normalization=normalization,
            norm=norm,
            rope=rope,
            dropout=dropout,
        )
        if max_length is not None:
            check_positive(max_length=max_length)
        self.max_length = max_length
        self.bias = build_relative_bias(max_length, d_qk) if relative_bias else None

    def forward(self, x: Tensor, mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Read whole sequences at once.

        Args:
            x: [B, T, d].
            mask: bool [B, T], True for real tokens; padding may stand anywhere and comes out as zeros.
            cu_seqlens: int [D + 1], the boundaries of D documents packed into a single row.

        Returns:
            [B, T, d].

        Raises:
            ValueError: if shapes do not fit, or a sequence is longer than the table of relative biases.
        """
        self.check_batch(x, mask, cu_seqlens)
        batch, length, _ = x.shape
        x = zero_padding(x, mask)
        gate, v, (q, k) = self.project(x, token_positions(length, mask, cu_seqlens, x.device))
        if mask is None and cu_seqlens is None:
            attended = self._attend(q, k, v, None)
        else:
            layout = document_rows(batch, length, mask, cu_seqlens, x.device)
            q, k, v = (layout.arrange(heads).flatten(0, 1) for heads in (q, k, v))  # [B * D, L, f]
            attended = self._attend(q, k, v, layout.real.flatten(0, 1))
            attended = layout.restore(attended.view(*layout.real.shape, self.d_value))
        return zero_padding(self.combine(x, gate, attended), mask)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        positions = new_positions(0, q.shape[1], q.device)
        return quadratic_attention(
            q,
            k,
            v,
            causal=self.causal,
            bias=self._bias(positions, positions),
            mask=mask,
            activation=self.activation,
            normalization=self._constant_normalization() if self.causal else self.normalization,
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

    def extend(self, x: Tensor, state: QuadraticState) -> tuple[Tensor, QuadraticState]:
        """Continue streams by N tokens, [B, N, d] -> [B, N, d] and the state after them, larger; `state` stays as it is."""
        self.check_stream(x, state.k.shape[0])
        positions = new_positions(state.position, x.shape[1], x.device)
        gate, v, (q, k) = self.project(x, positions)
        attended, state = quadratic_attention_extend(
            q,
            k,
            v,
            state,
            bias=self._bias(positions, new_positions(0, state.position + x.shape[1], x.device)),
            activation=self.activation,
            normalization=self._constant_normalization(),
        )
        return self.combine(x, gate, attended), state
