"""Softmax multi-head attention, the layer that GAU and FLASH are measured against.

Shapes: B batch, T tokens, N new tokens of a stream, H heads, h = d / H head width, d model width.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime.layers.checks import check_even, check_positive
from lineartime.layers.norms import Norm
from lineartime.layers.residual import Mixer, init_dense, new_positions, zero_padding
from lineartime.ops.layout import document_rows, token_positions
from lineartime.ops.positions import rope


class AttentionState(NamedTuple):
    """Keys and values [B, H, T, h] of all T tokens so far: a cache that grows."""

    k: Tensor
    v: Tensor

    @property
    def position(self) -> int:
        """The number of tokens read so far."""
        return self.k.shape[2]


class Attention(Mixer):
    """Softmax multi-head self-attention with pre-norm and residual inside: [B, T, d] -> [B, T, d].

    Args:
        d_model: d, the width of inputs and outputs.
        n_heads: H, which must divide d.
        causal: whether a token reads only itself and earlier tokens; needed to stream.
        norm: "layernorm", "scalenorm" or "rmsnorm".
        rope: whether queries and keys are rotated by their position.
        dropout: probability of dropping an output before the residual.

    Raises:
        ValueError: for an argument outside what it allows.

    Source: "Attention Is All You Need" (arXiv 1706.03762), with rotary positions (arXiv 2104.09864).
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 12,
        causal: bool = False,
        norm: Norm = "layernorm",
        rope: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(d_model, causal, norm, dropout)
        check_positive(n_heads=n_heads)
        if d_model % n_heads:
            raise ValueError(f"n_heads is {n_heads}, but must divide d_model = {d_model}.")
        if rope:
            check_even("rotary positions turn pairs of features", head_dim=d_model // n_heads)
        self.n_heads = n_heads
        self.rope = rope
        self.to_qkv = init_dense(nn.Linear(d_model, 3 * d_model))
        self.to_output = init_dense(nn.Linear(d_model, d_model))

    def forward(self, x: Tensor, mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Read whole sequences at once: the same contract, shapes and errors as `GAU.forward`."""
        self.check_batch(x, mask, cu_seqlens)
        batch, length, _ = x.shape
        x = zero_padding(x, mask)
        q, k, v = self._project(x, token_positions(length, mask, cu_seqlens, x.device))
        if mask is None and cu_seqlens is None:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            return self._combine(x, self._merge_heads(attended))

        layout = document_rows(batch, length, mask, cu_seqlens, x.device)
        q, k, v = (self._split_heads(layout.arrange(self._merge_heads(heads)).flatten(0, 1)) for heads in (q, k, v))
        visible: Tensor | None = None  # causal needs no mask: padding stands behind the real tokens
        if not self.causal:
            real = layout.real.flatten(0, 1)
            # A softmax over nothing would be NaN: a row without a real token reads its zeros.
            visible = (real | ~real.any(1, keepdim=True))[:, None, None, :]
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=self.causal)
        attended = layout.restore(self._merge_heads(attended).view(*layout.real.shape, self.d_model))
        return zero_padding(self._combine(x, attended), mask)

    def init_state(self, batch_size: int) -> AttentionState:
        """The state before the first token of `batch_size` streams; ValueError unless the layer is causal."""
        self.check_causal()
        empty = self.to_output.weight.new_zeros(batch_size, self.n_heads, 0, self.d_model // self.n_heads)
        return AttentionState(empty, empty)

    def extend(self, x: Tensor, state: AttentionState) -> tuple[Tensor, AttentionState]:
        """Continue streams by N tokens, [B, N, d] -> [B, N, d] and the state after them, larger; `state` stays as it is."""
        self.check_stream(x, state.k.shape[0])
        new = x.shape[1]
        q, k, v = self._project(x, new_positions(state.position, new, x.device))
        state = AttentionState(torch.cat([state.k, k.to(state.k.dtype)], 2), torch.cat([state.v, v.to(state.v.dtype)], 2))
        visible = torch.ones(new, state.position, dtype=torch.bool, device=x.device).tril(state.position - new)
        attended = F.scaled_dot_product_attention(q.to(state.k.dtype), state.k, state.v, attn_mask=visible)
        return self._combine(x, self._merge_heads(attended)), state

    def _split_heads(self, x: Tensor) -> Tensor:
        """[B, T, d] -> [B, H, T, h]."""
        heads: Tensor = x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        return heads

    def _merge_heads(self, x: Tensor) -> Tensor:
        """[B, H, T, h] -> [B, T, d]."""
        merged: Tensor = x.transpose(1, 2).flatten(2)
        return merged

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self._split_heads(part) for part in self.to_qkv(self.norm(x)).chunk(3, dim=-1))
        if self.rope:
            positions = positions if positions.dim() == 1 else positions[:, None]
            q, k = rope(q, positions), rope(k, positions)
        return q, k, v

    def _combine(self, x: Tensor, attended: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.to_output(attended))
        return out
