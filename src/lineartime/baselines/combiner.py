"""Combiner, rowmajor-axial: softmax over the tokens of a query's own chunk and over its column's summaries of the other chunks.

Shapes: B streams, T tokens, R documents, H heads, L tokens of a document, h head width, C chunk size,
G chunks, d = H h model width.
Source: "Combiner: Full Attention Transformer with Sparse Computation Cost" (arXiv 2107.05768).

A document is a grid: row r is chunk r, column l is the place inside a chunk. x is the normed input of the layer.

    o[r,l]     = sum over l' of softmax(q[r,l].k[r,l'] / sqrt(h)) v[r,l'], always bidirectional: a summary of row r for column l
    k_sum[r,l] = W2 layernorm(x[r,l] + W1 o[r,l] + b1) + b2, rotated by the position of (r,l)         W1 mixes the heads
    out[r,l]   = one softmax of q[r,l] over the keys k[r,l'] of its row (causal: l' <= l), with values v[r,l'],
                 and over k_sum[r',l] of its column in the other rows (causal: r' < r), with values o[r',l]
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.baselines.blocks import (
    ChunkedHeadOptions,
    ChunkedHeads,
    cut_blocks,
    fill,
    join_blocks,
    masked_products,
    open_chunk_pieces,
    real_tokens,
    scaled_products,
)
from lineartime.layers.attention import merge_heads
from lineartime.layers.dense import Dense, factory, is_untouched
from lineartime.layers.residual import LayerNorm
from lineartime.ops.packing import Packing
from lineartime.ops.positions import rope
from lineartime.ops.state import State

KeySummary = Callable[[Tensor, Tensor, Tensor], Tensor]
"""o [..., d] of all heads, x [..., d] and the positions [...] of cells -> their k_sum [..., H, h]."""


def combiner_attention_oracle(
    q: Tensor, k: Tensor, v: Tensor, x: Tensor, key_summary: KeySummary, *, chunk_size: int, causal: bool = False
) -> Tensor:
    """The definition for one document, one query at a time: q, k, v [H, T, h] and x [T, d] -> [H, T, h]."""
    length, scale = q.shape[1], q.shape[2] ** -0.5
    row_of = [[j for j in range(length) if j // chunk_size == t // chunk_size] for t in range(length)]

    def read(t: int, keys: Tensor, values: Tensor) -> Tensor:
        weights = torch.einsum("hf,hjf->hj", q[:, t], keys * scale).softmax(-1)
        return torch.einsum("hj,hjf->hf", weights, values)

    o = [read(t, k[:, row_of[t]], v[:, row_of[t]]) for t in range(length)]
    k_sum = [key_summary(o[t].flatten(), x[t], torch.tensor(t)) for t in range(length)]
    out = []
    for t in range(length):
        near = [j for j in row_of[t] if j <= t or not causal]
        column = range(t % chunk_size, length, chunk_size)
        far = [j for j in column if j < t or (j > t and not causal)]
        keys = torch.cat([k[:, near], *(k_sum[j][:, None] for j in far)], 1)
        values = torch.cat([v[:, near], *(o[j][:, None] for j in far)], 1)
        out.append(read(t, keys, values))
    return torch.stack(out, 1)


@dataclass(eq=False)
class CombinerState(State):
    """The state of causal streams; it grows by two vectors for every token, as a cache of keys and values.

    Attributes:
        position: int64 [B], the number of tokens that each stream has read.
        k_sum, o: [B, H, G, C, h], of all complete rows.
        q, k, v: [B, H, C, h] of the open row; the slots after its tokens hold any numbers.
        x: [B, C, d] of the open row.
    """

    position: Tensor
    k_sum: Tensor
    o: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    x: Tensor


class Combiner(ChunkedHeads):
    """Combiner, rowmajor-axial.

    A token attends to the tokens of its own chunk, and to the summaries of the other chunks for its column: [B, T, d] ->
    [B, T, d]. The options are those of `ChunkedHeads`.
    """

    name = "combiner"

    def __init__(self, d_model: int, **options: Unpack[ChunkedHeadOptions]) -> None:
        super().__init__(d_model, **options)
        self.summary_of_heads = Dense(d_model, d_model, **factory(options))
        self.summary_norm = LayerNorm(d_model, **factory(options))
        self.summary_to_key = Dense(d_model, d_model, **factory(options))

    def project(self, x: Tensor, packing: Packing) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [N, H, h], and values followed by the normed tokens, split into heads, [N, H, 2 h]."""
        q, k, v = super().project(x, packing)
        return q, k, torch.cat([v, x.view_as(v)], -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Attend in time L (C + L / C): q, k [R, H, L, h] and v [R, H, L, 2 h] -> [R, H, L, h]."""
        length, causal = q.shape[2], self.causal
        chunk_size = max(1, min(self.chunk_size, length))  # a larger chunk would only be padded
        v, x = v.chunk(2, -1)
        in_row = cut_blocks(real_tokens(v, real)[:, None, :, None], chunk_size).mT  # [R or 1, 1, G, 1, C]
        q, k, v, x = (cut_blocks(each, chunk_size) for each in (q, k, v, x))  # [R, H, G, C, h]
        scores = scaled_products(q, k)  # [R, H, G, C, C]
        lowest = torch.finfo(scores.dtype).min

        o = scores.masked_fill(~in_row, lowest).softmax(-1).to(v.dtype) @ v
        positions = torch.arange(v.shape[2] * chunk_size, device=x.device).view(-1, chunk_size)
        of_tokens, x = (each.permute(0, 2, 3, 1, 4).flatten(3) for each in (o, x))  # [R, G, C, d]
        k_sum = self.key_summary(of_tokens, x, positions)  # [R, G, C, H, h]

        near = in_row
        if causal:  # the triangle is enough: empty slots come after real ones
            near = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=v.device).tril()
        row = torch.arange(v.shape[2], device=v.device)
        others = row < row[:, None] if causal else row != row[:, None]  # [G, G]
        in_column = others & in_row.transpose(2, 4)  # [R or 1, 1, C, G, G]
        columns, summaries = q.transpose(2, 3), o.transpose(2, 3)  # [R, H, C, G, h]
        far = masked_products(columns, k_sum.permute(0, 3, 2, 1, 4), in_column).transpose(2, 3)  # [R, H, G, C, G]
        weights = torch.cat([scores.masked_fill(~near, lowest), far], -1).softmax(-1).to(v.dtype)
        of_row, of_column = weights.split([chunk_size, v.shape[2]], -1)
        return join_blocks(of_row @ v + (of_column.transpose(2, 3) @ summaries).transpose(2, 3), length)

    def attend_next(
        self, q: Tensor, k: Tensor, v: Tensor, state: CombinerState, packing: Packing
    ) -> tuple[Tensor, CombinerState]:
        chunk_size, start = self.chunk_size, packing.common_start or 0
        v, x = v.chunk(2, -1)
        q, k, v, x = (each.to(state.k.dtype) for each in (q, k, v, merge_heads(x)))
        outputs = [v[..., :0, :]]
        triangle = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=v.device).tril()
        of_keys, of_values = (rows[:, :, : start // chunk_size] for rows in (state.k_sum, state.o))
        own: tuple[Tensor, ...] = state.q, state.k, state.v, state.x
        for new, first, last in open_chunk_pieces(start, v.shape[-2], chunk_size):
            queries = q[..., new, :]
            own_q, own_k, own_v, own_x = own = tuple(
                fill(rows, first, each[..., new, :]) for rows, each in zip(own, (q, k, v, x), strict=True)
            )
            near = masked_products(queries, own_k[..., :last, :], triangle[first:last, :last])
            k_sum, o = (rows[:, :, :, first:last].transpose(2, 3) for rows in (of_keys, of_values))  # [B, H, n, G, h]
            far = scaled_products(queries[..., None, :], k_sum)[..., 0, :]
            weights = torch.cat([near, far], -1).softmax(-1).to(v.dtype)
            near, far = weights.split([last, far.shape[-1]], -1)
            outputs.append(near @ own_v[..., :last, :] + (far[..., None, :] @ o)[..., 0, :])
            if last == chunk_size:  # the row is full: summarise it
                o = scaled_products(own_q, own_k).softmax(-1).to(v.dtype) @ own_v
                positions = torch.arange(start + new.stop - chunk_size, start + new.stop, device=o.device)
                k_sum = self.key_summary(merge_heads(o), own_x, positions).transpose(1, 2)
                of_keys, of_values = torch.cat([of_keys, k_sum[:, :, None]], 2), torch.cat([of_values, o[:, :, None]], 2)
        return torch.cat(outputs, -2), CombinerState(state.position + v.shape[-2], of_keys, of_values, *own)

    def key_summary(self, o: Tensor, x: Tensor, positions: Tensor) -> Tensor:
        """The keys of summaries: see `KeySummary`."""
        mixed = x + _linear(self.summary_of_heads, o)
        normed = self.summary_norm(mixed).to(o.dtype)
        k_sum = _linear(self.summary_to_key, normed).unflatten(-1, (self.n_heads, -1))
        return rope(k_sum, positions[..., None]) if self.rope else k_sum

    def init_own_state(self, batch_size: int) -> CombinerState:
        chunk = self.empty_chunk(batch_size)
        none = chunk[:, :, None][:, :, :0]
        return CombinerState(self.first_position(batch_size), none, none, chunk, chunk, chunk, merge_heads(chunk))


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Apply a linear layer in the dtype of x, because autocast is off here."""
    if not is_untouched(layer):
        return cast("Tensor", layer(x.to(next(layer.parameters()).dtype))).to(x.dtype)
    return F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))
