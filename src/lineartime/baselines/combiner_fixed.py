"""Combiner, fixed: one softmax over the tokens of a query's own chunk and one summary of every other chunk.

Shapes: B streams, T tokens, R rows, H heads, L tokens of a row, h head width, C chunk size, G chunks.
Source: "Combiner: Full Attention Transformer with Sparse Computation Cost" (arXiv 2107.05768).

    chunk g:  q_bar[g], k_bar[g] = maxpool(queries), maxpool(keys)
              v_bar[g] = sum over j in g of softmax(q_bar[g].k[j] / sqrt(h)) v[j]
    out[t] = one softmax of q[t] over the keys k[j] of t's chunk (causal: j <= t) and the k_bar of the others (causal: before)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lineartime.baselines.blocks import (
    ChunkedHeads,
    cut_blocks,
    fill,
    join_blocks,
    joint_softmax,
    masked_products,
    open_chunk_pieces,
    real_tokens,
    scaled_products,
)
from lineartime.ops.packing import Packing
from lineartime.ops.state import State


def combiner_fixed_attention_oracle(q: Tensor, k: Tensor, v: Tensor, *, chunk_size: int, causal: bool = False) -> Tensor:
    """The definition for one document, one query at a time: q, k, v [H, T, h] -> [H, T, h]."""
    length, scale = q.shape[1], q.shape[2] ** -0.5
    chunks = [list(range(start, min(start + chunk_size, length))) for start in range(0, length, chunk_size)]
    k_bar, v_bar = [], []
    for chunk in chunks:
        query, key = q[:, chunk].amax(1), k[:, chunk].amax(1)
        weights = torch.einsum("hf,hjf->hj", query, k[:, chunk] * scale).softmax(-1)
        k_bar.append(key)
        v_bar.append(torch.einsum("hj,hjf->hf", weights, v[:, chunk]))
    rows = []
    for t in range(length):
        own = t // chunk_size
        near = [j for j in chunks[own] if j <= t or not causal]
        far = [g for g in range(len(chunks)) if g < own or (g > own and not causal)]
        keys = torch.cat([k[:, near], *(k_bar[g][:, None] for g in far)], 1)
        values = torch.cat([v[:, near], *(v_bar[g][:, None] for g in far)], 1)
        weights = torch.einsum("hf,hjf->hj", q[:, t], keys * scale).softmax(-1)
        rows.append(torch.einsum("hj,hjf->hf", weights, values))
    return torch.stack(rows, 1)


def _summarise(q: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """k_bar and v_bar [R, H, G, h] of chunks [R, H, G, C, h]; `slots`, [R or 1, 1, G, 1, C], tells which slots hold a token."""
    empty = ~slots.mT
    lowest = torch.finfo(q.dtype).min
    pooled_q, pooled_k = (x.masked_fill(empty, lowest).amax(-2).masked_fill(empty[..., 0, :], 0.0) for x in (q, k))
    return pooled_k, _summary(pooled_q, k, v, slots)


def _summary(q_bar: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
    """v_bar [..., H, h] from a pooled query [..., H, h] and a chunk's keys and values [..., H, C, h]."""
    weights = masked_products(q_bar[..., None, :], k, slots).softmax(-1).to(v.dtype)
    return (weights @ v)[..., 0, :]


@dataclass(eq=False)
class CombinerFixedState(State):
    """The state of causal streams; it grows by one summary for every chunk.

    Attributes:
        position: int64 [B], the number of tokens that each stream has read.
        k_bar, v_bar: [B, H, G, h], the summaries of all complete chunks.
        k, v: [B, H, C, h] of the open chunk; the slots after its tokens hold any numbers.
        highest_q: [B, H, h], the maximum of the open chunk's queries, or any numbers if it is empty.
    """

    position: Tensor
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
        length, causal = q.shape[2], self.causal
        chunk_size = max(1, min(self.chunk_size, length))  # a larger chunk would only be padded
        slots = cut_blocks(real_tokens(v, real)[:, None, :, None], chunk_size).mT  # [R or 1, 1, G, 1, C]
        q, k, v = (cut_blocks(x, chunk_size) for x in (q, k, v))  # [R, H, G, C, h]
        k_bar, v_bar = _summarise(q, k, v, slots)  # [R, H, G, h]

        near = slots
        if causal:  # the triangle is enough: empty slots come after real ones
            near = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=v.device).tril()
        own = torch.arange(v.shape[2], device=v.device)
        others = own < own[:, None] if causal else own != own[:, None]  # [G, G]
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
