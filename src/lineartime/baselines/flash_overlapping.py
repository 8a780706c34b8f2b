"""FLASH with overlapping local attention: a chunk also attends to its neighbours or, if causal, to the previous chunk.

Shapes: N tokens, D documents, G chunks, C chunk size, Q queries of a chunk, s query/key width, e value width,
M = 2 (causal) or 3 chunks in reach.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), which mentions this variant as better but slower.

    L(t) = tokens of t's own chunk and of the chunks beside it; causal: those with j <= t
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lineartime.baselines.flash_variants import FLASHVariant
from lineartime.ops.activations import Activation, relu2
from lineartime.ops.mixed_chunk import MixedChunkState, attend, attention_weights
from lineartime.ops.modes import acc_dtype, matmul_dtype, output_dtype, without_autocast
from lineartime.ops.packing import Grid, Packing
from lineartime.ops.state import State


def flash_overlapping_oracle(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, chunk_size: int, causal: bool = False, activation: Activation = "relu2"
) -> Tensor:
    """The definition of the quadratic part for one document, one query at a time: [T, s], [T, s], [T, e] -> [T, e].

    bias: [4 C - 1], for the distances from 1 - 2 C to 2 C - 1.
    """
    rows = []
    for t in range(len(v)):
        near = [j for j in range(len(v)) if abs(j // chunk_size - t // chunk_size) <= 1 and (j <= t or not causal)]
        scores = k[near] @ q[t] / q.shape[-1] ** 0.5 + bias[[j - t + 2 * chunk_size - 1 for j in near]]
        rows.append((scores.softmax(0) if activation == "softmax" else relu2(scores) / len(near)) @ v[near])
    return torch.stack(rows)


@dataclass(eq=False)
class FLASHOverlappingState(State):
    """The state of causal streams, of constant size; slots that hold no token hold any numbers.

    Attributes:
        position: int64 [D], the number of tokens that each stream has read.
        summary: [D, s, e], the sum of k_lin v^T over all complete chunks.
        k_quad, v: [D, 2 C, s] and [D, 2 C, e] of the previous chunk and the open one.
        k_lin: [D, C, s] of the open chunk.
    """

    position: Tensor
    summary: Tensor
    k_quad: Tensor
    v: Tensor
    k_lin: Tensor


class FLASHOverlapping(FLASHVariant):
    """FLASH whose chunks also read their neighbours.

    A causal chunk attends to itself and to the previous chunk. The options are those of `FLASH`. The relative bias is a table
    for chunks of up to 256 tokens.
    """

    name = "flash-overlapping"
    bias_chunks = 2
    constant_state = False

    def attend(
        self, maps: Sequence[Tensor], v: Tensor, packing: Packing, state: FLASHOverlappingState | None
    ) -> tuple[Tensor, FLASHOverlappingState | None]:
        q_quad, k_quad, q_lin, k_lin = maps
        local, kept = self.attend_near(q_quad, k_quad, v, packing, state)
        own = None
        if state is not None:
            own = MixedChunkState(state.position, state.summary, state.k_lin[:, None], state.v[:, self.chunk_size :])
        across, own = attend(None, None, q_lin, k_lin, v, packing, self.options(packing), own)
        if own is None:
            return local + across, None
        keys, values = kept
        return local + across, FLASHOverlappingState(own.position, own.summary, keys, values, own.keys[:, 0])

    def attend_near(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, state: FLASHOverlappingState | None
    ) -> tuple[Tensor, list[Tensor]]:
        """The quadratic part, [N, s], [N, s], [N, e] -> [N, e], and the keys and values that streams keep for it."""
        compute, options, outputs, kept = matmul_dtype(q, k, v), self.options(packing), [], []
        old = (None, None) if state is None else (state.k_quad, state.v)
        with without_autocast(v):
            for grid, queries, *own in packing.by_grid(self.chunk_size, self.causal, *(x.to(compute) for x in (q, k, v))):
                keys, values = (self.with_neighbours(x, grid, before) for x, before in zip(own, old, strict=True))
                queries, size, slot = grid.queries(queries), grid.size, torch.arange(keys.shape[1], device=v.device)
                place = grid.begin[:, None] + slot - size  # of each key in its document
                visible = ((place >= 0) & (place < grid.end[grid.of][:, None]))[:, None]
                if self.causal:
                    visible = visible & (slot <= grid.query_slot[..., None] + size)
                bias = None if options.bias is None else options.bias(2 * size)[: keys.shape[1] + size - 1]
                if bias is not None and grid.width < size:
                    bias = bias[slot + size - 1 - grid.query_slot[..., None]]
                count, scores = visible.sum(-1).clamp(min=1), queries @ keys.mT
                weights = attention_weights(scores, ~visible, count, bias, self.activation, options.scales)
                outputs.append(grid.tokens(weights.to(values.dtype) @ values).to(output_dtype(v, compute)))
                for x, before in zip((keys, values), old, strict=True):
                    if before is not None:  # streams without new tokens keep what they have
                        last = x.index_select(0, grid.final).to(before.dtype)
                        kept.append(torch.where((packing.new == 0)[:, None, None], before, last))
        return torch.cat(outputs), kept

    def with_neighbours(self, x: Tensor, grid: Grid, old: Tensor | None) -> Tensor:
        """The chunks of keys or values [n, f], each with its neighbours, zeros where there is none: [G, M C, f].

        `old`, [D, 2 C, f], is what streams keep.
        """
        chunks, chunk = grid.keys(x, None if old is None else old[:, grid.size :]), torch.arange(len(grid.of), device=x.device)
        before = x.new_zeros(())
        if old is not None:  # the chunk before, or the last one, if it is full
            full = (grid.start % grid.size == 0)[:, None, None]
            before = grid.of_documents(torch.where(full, old[:, grid.size :], old[:, : grid.size])).to(x.dtype)
        parts = [torch.where((chunk == grid.first[grid.of])[:, None, None], before, chunks.roll(1, 0)), chunks]
        if not self.causal:
            parts.append(torch.where((chunk == grid.final[grid.of])[:, None, None], 0, chunks.roll(-1, 0)))
        return torch.cat(parts, 1)

    def init_own_state(self, batch_size: int) -> FLASHOverlappingState:
        size, like = self.chunk_size, self.any_parameter
        shapes = (self.d_qk, self.d_value), (2 * size, self.d_qk), (2 * size, self.d_value), (size, self.d_qk)
        sums = (torch.zeros(batch_size, *shape, dtype=acc_dtype(like), device=like.device) for shape in shapes)
        return FLASHOverlappingState(self.first_position(batch_size), *sums)
