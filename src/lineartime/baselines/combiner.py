"""Combiner: one softmax over the tokens of a query's own chunk and over summaries of the other chunks.

    combiner, rowmajor-axial, reads a document as a grid: row r is chunk r, column l is the place inside a chunk
        o[r,l]     = sum over l' of softmax(q[r,l].k[r,l'] / sqrt(h)) v[r,l'], always bidirectional: a summary of row r for l
        k_sum[r,l] = W2 layernorm(x[r,l] + W1 o[r,l] + b1) + b2, rotated by the position of (r,l)         W1 mixes the heads
        out[r,l]   = one softmax of q[r,l] over the keys k[r,l'] of its row (causal: l' <= l), with values v[r,l'],
                     and over k_sum[r',l] of its column in the other rows (causal: r' < r), with values o[r',l]
    x is the normed input of the layer.

    combiner-fixed, of chunks g
        q_bar[g], k_bar[g] = maxpool(queries), maxpool(keys)
        v_bar[g] = sum over j in g of softmax(q_bar[g].k[j] / sqrt(h)) v[j]
        out[t]   = one softmax of q[t] over the k[j] of t's chunk (causal: j <= t) and the k_bar of the others (causal: before)

Shapes: B streams, T tokens, R documents, H heads, L tokens of a document, h head width, C chunk size, G chunks,
d = H h model width.
Source: "Combiner: Full Attention Transformer with Sparse Computation Cost" (arXiv 2107.05768).
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.baselines.blocks import (
    ChunkedHeadOptions,
    ChunkedHeads,
    StreamState,
    cut_blocks,
    fill,
    join_blocks,
    joint_softmax,
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


def _visible(real: Tensor, chunk_size: int, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Which slots hold a token, bool [R or 1, 1, G, 1, C], which of them a token of the chunk sees, and which chunks [G, G]."""
    slots = cut_blocks(real[:, None, :, None], chunk_size).mT
    chunk = torch.arange(slots.shape[2], device=real.device)
    if not causal:
        return slots, slots, chunk != chunk[:, None]
    # The triangle is enough: empty slots come after real ones.
    return slots, slots.new_ones(chunk_size, chunk_size).tril(), chunk < chunk[:, None]


@dataclass(eq=False)
class CombinerState(StreamState):
    """The state of causal streams; it grows by two vectors for every token, as a cache of keys and values.

    Attributes:
        k_sum, o: [B, H, G, C, h], of all complete rows.
        q, k, v: [B, H, C, h] of the open row; the slots after its tokens hold any numbers.
        x: [B, C, d] of the open row.
    """

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
        length = q.shape[2]
        chunk_size = max(1, min(self.chunk_size, length))  # a larger chunk would only be padded
        v, x = v.chunk(2, -1)
        in_row, near, others = _visible(real_tokens(v, real), chunk_size, self.causal)
        q, k, v, x = (cut_blocks(each, chunk_size) for each in (q, k, v, x))  # [R, H, G, C, h]
        scores = scaled_products(q, k)  # [R, H, G, C, C]
        lowest = torch.finfo(scores.dtype).min

        o = scores.masked_fill(~in_row, lowest).softmax(-1).to(v.dtype) @ v
        positions = torch.arange(v.shape[2] * chunk_size, device=x.device).view(-1, chunk_size)
        of_tokens, x = (each.permute(0, 2, 3, 1, 4).flatten(3) for each in (o, x))  # [R, G, C, d]
        k_sum = self.key_summary(of_tokens, x, positions)  # [R, G, C, H, h]

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
        """The keys of summaries: o [..., d] of all heads, x [..., d] and the positions [...] of cells -> k_sum [..., H, h]."""
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


def _summary(q_bar: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
    """v_bar [..., H, h] from a pooled query [..., H, h] and a chunk's keys and values [..., H, C, h]."""
    weights = masked_products(q_bar[..., None, :], k, slots).softmax(-1).to(v.dtype)
    return (weights @ v)[..., 0, :]


@dataclass(eq=False)
class CombinerFixedState(StreamState):
    """The state of causal streams; it grows by one summary for every chunk.

    Attributes:
        k_bar, v_bar: [B, H, G, h], the summaries of all complete chunks.
        k, v: [B, H, C, h] of the open chunk; the slots after its tokens hold any numbers.
        highest_q: [B, H, h], the maximum of the open chunk's queries, or any numbers if it is empty.
    """

    k_bar: Tensor
    v_bar: Tensor
    k: Tensor
    v: Tensor
    highest_q: Tensor


class CombinerFixed(ChunkedHeads):
    """Combiner, fixed: one pooled summary a chunk.

    A token attends to the tokens of its own chunk and one summary of each other chunk: [B, T, d] -> [B, T, d]. The options
    are those of `ChunkedHeads`.
    """

    name = "combiner-fixed"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Attend in time L (C + L / C): q, k, v [R, H, L, h] -> [R, H, L, h]."""
        length = q.shape[2]
        chunk_size = max(1, min(self.chunk_size, length))  # a larger chunk would only be padded
        slots, near, others = _visible(real_tokens(v, real), chunk_size, self.causal)
        q, k, v = (cut_blocks(x, chunk_size) for x in (q, k, v))  # [R, H, G, C, h]
        empty, lowest = ~slots.mT, torch.finfo(q.dtype).min
        q_bar, k_bar = (x.masked_fill(empty, lowest).amax(-2).masked_fill(empty[..., 0, :], 0.0) for x in (q, k))
        v_bar = _summary(q_bar, k, v, slots)  # [R, H, G, h]
        far = (others & slots[..., 0].mT)[:, :, :, None]  # [R or 1, 1, G, 1, G]: a chunk holds tokens if its first slot does
        k_bar, v_bar = k_bar[:, :, None], v_bar[:, :, None]  # [R, H, 1, G, h]
        out = joint_softmax([(masked_products(q, k, near), v), (masked_products(q, k_bar, far), v_bar)])
        return join_blocks(out, length)

    def attend_next(
        self, q: Tensor, k: Tensor, v: Tensor, state: CombinerFixedState, packing: Packing
    ) -> tuple[Tensor, CombinerFixedState]:
        chunk_size, start = self.chunk_size, packing.common_start or 0
        q, k, v = (x.to(state.k.dtype) for x in (q, k, v))
        outputs = [v[..., :0, :]]
        triangle = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=v.device).tril()
        k_bar, v_bar = (x[..., : start // chunk_size, :] for x in (state.k_bar, state.v_bar))
        own_k, own_v, highest_q = state.k, state.v, state.highest_q
        for new, first, last in open_chunk_pieces(start, v.shape[-2], chunk_size):
            queries = q[..., new, :]
            own_k, own_v = fill(own_k, first, k[..., new, :]), fill(own_v, first, v[..., new, :])
            highest_q = torch.maximum(highest_q, queries.amax(-2)) if first else queries.amax(-2)
            near = masked_products(queries, own_k[..., :last, :], triangle[first:last, :last])
            outputs.append(joint_softmax([(near, own_v[..., :last, :]), (scaled_products(queries, k_bar), v_bar)]))
            if last == chunk_size:
                summary = _summary(highest_q, own_k, own_v, triangle[-1])
                k_bar = torch.cat([k_bar, own_k.amax(-2, keepdim=True)], -2)
                v_bar = torch.cat([v_bar, summary[..., None, :]], -2)
        return torch.cat(outputs, -2), CombinerFixedState(state.position + v.shape[-2], k_bar, v_bar, own_k, own_v, highest_q)

    def init_own_state(self, batch_size: int) -> CombinerFixedState:
        chunk = self.empty_chunk(batch_size)
        none = chunk[..., :0, :]
        return CombinerFixedState(self.first_position(batch_size), none, none, chunk, chunk, chunk[..., 0, :])
