"""FLASH with weighted chunk summaries: attention between chunks weights them in the linear part.

Shapes: B batch, T tokens, N new tokens of a stream, G chunks, C chunk size, s query/key width, e value width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), appendix A.

    q_bar[g], k_bar[g] = mean over chunk g of q_lin, k_lin          S[g] = sum over j in g of k_lin[j] v[j]^T / |g|
    o_lin[t] = q_lin[t] . sum over h in R(g) of A[g, h] S[h]        for t in chunk g

    bidirectional: A[g] = softmax over all chunks h of q_bar[g].k_bar[h] / sqrt(s) + log |h|
    causal:        the same over h < g, with q_bar[g - 1] instead of q_bar[g], which contains later tokens of the chunk

Equal scores give the mean over tokens, as in FLASH. A stream keeps the summaries of all chunks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.baselines.blocks import masked_products
from lineartime.baselines.flash_variants import FLASHVariant
from lineartime.ops.activations import NORMALIZATIONS
from lineartime.ops.mixed_chunk import MixedChunkState, attend, mixed_chunk_state
from lineartime.ops.modes import acc_dtype, matmul_dtype, output_dtype, without_autocast
from lineartime.ops.packing import Grid, Packing
from lineartime.ops.state import State


def flash_weighted_oracle(q: Tensor, k: Tensor, v: Tensor, *, chunk_size: int, causal: bool = False) -> Tensor:
    """The definition of the linear part for one document, one query at a time: [T, s], [T, s], [T, e] -> [T, e]."""
    chunks = [slice(start, min(start + chunk_size, len(v))) for start in range(0, len(v), chunk_size)]
    q_bar, k_bar = ([x[chunk].mean(0) for chunk in chunks] for x in (q, k))
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    summaries = [k[chunk].mT @ v[chunk] / size for chunk, size in zip(chunks, sizes, strict=True)]
    rows = []
    for t in range(len(v)):
        own = t // chunk_size
        reach = list(range(own if causal else len(chunks)))
        if not reach:
            rows.append(0 * v[t])
            continue
        query = q_bar[own - 1 if causal else own]
        scores = torch.stack([query @ k_bar[h] / math.sqrt(q.shape[-1]) + math.log(sizes[h]) for h in reach])
        weights = scores.softmax(0)
        rows.append(q[t] @ sum(weights[h] * summaries[h] for h in reach))
    return torch.stack(rows)


def by_document(x: Tensor, grid: Grid) -> Tensor:
    """Make each document a row of its chunks, with zeros after those of shorter ones: [G, ...] -> [D, longest, ...]."""
    if isinstance(grid.chunks, int):
        return x.view(len(grid.end), grid.chunks, *x.shape[1:])
    longest, place = _places(grid)
    rows = x.new_zeros(len(grid.end) * longest, *x.shape[1:]).index_copy(0, place, x)
    return rows.view(len(grid.end), longest, *x.shape[1:])


def of_chunks(x: Tensor, grid: Grid) -> Tensor:
    """The inverse of `by_document`: [D, longest, ...] -> [G, ...]."""
    return x.flatten(0, 1) if isinstance(grid.chunks, int) else x.flatten(0, 1).index_select(0, _places(grid)[1])


def _places(grid: Grid) -> tuple[int, Tensor]:
    """The chunks of the longest document, or a bound, and the place of each chunk among D times as many."""
    longest = max(grid.chunks, default=0) if isinstance(grid.chunks, list) else len(grid.of)
    return longest, grid.of * longest + torch.arange(len(grid.of), device=grid.of.device) - grid.first[grid.of]


@dataclass(eq=False)
class FLASHWeightedState(State):
    """The state of causal streams; it grows by one summary for every chunk.

    Attributes:
        position: int64 [B], the number of tokens that each stream has read.
        summary: [B, s, e], the weighted mean of summaries for the open chunk.
        summaries, k_bar: [B, G, s, e] and [B, G, s] of all complete chunks.
        q_sum: [B, s], the sum of q_lin over the open chunk.
        open_chunk: the keys of both parts and the values of the open chunk.
    """

    position: Tensor
    summary: Tensor
    summaries: Tensor
    k_bar: Tensor
    q_sum: Tensor
    open_chunk: MixedChunkState


class FLASHWeighted(FLASHVariant):
    """FLASH with attention between chunk summaries.

    Its state grows by s x e numbers with every chunk. The options are those of `FLASH`.
    """

    name = "flash-weighted"
    normalizations = NORMALIZATIONS
    any_positions = False
    constant_state = False

    def attend(
        self, maps: Sequence[Tensor], v: Tensor, packing: Packing, state: FLASHWeightedState | None
    ) -> tuple[Tensor, FLASHWeightedState | None]:
        q_quad, k_quad, q_lin, k_lin = maps
        across, kept = self.attend_across(q_lin, k_lin, v, packing, state)
        if state is None:
            local, _ = attend(q_quad, k_quad, None, None, v, packing, self.options(packing))
            return local + across, None
        local, own = attend(q_quad, k_quad, None, k_lin, v, packing, self.options(packing), state.open_chunk)
        assert own is not None
        summary, summaries, k_bar, q_sum = kept
        return local + across, FLASHWeightedState(own.position, summary, summaries, k_bar, q_sum, own)

    def attend_across(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, state: FLASHWeightedState | None
    ) -> tuple[Tensor, list[Tensor]]:
        """The linear part, [N, s], [N, s], [N, e] -> [N, e], and what streams keep for it, in the order of their state."""
        size, compute, exact, outputs, kept = self.chunk_size, matmul_dtype(q, k, v), acc_dtype(v), [], []
        start = packing.common_start or 0
        open_keys, open_values = (None, None) if state is None else (state.open_chunk.keys[:, 1], state.open_chunk.values)
        with without_autocast(v):
            for grid, queries, keys, values in packing.by_grid(size, self.causal, *(x.to(compute) for x in (q, k, v))):
                queries, keys, values = grid.queries(queries), grid.keys(keys, open_keys), grid.keys(values, open_values)
                tokens, counts = grid.sizes, grid.sizes.clamp(min=1).to(exact)[:, None]
                counted = counts if self.normalization == "count" else torch.full_like(counts, size)  # "paper": all are full
                summaries = by_document((keys.mT @ values).to(exact) / counted[..., None], grid)  # [D, g, s, e]
                k_bar = by_document(keys.to(exact).sum(1) / counts, grid)
                q_sum = by_document(queries.to(exact).sum(1), grid)
                if not self.causal:
                    q_bar = q_sum / by_document(counts, grid).clamp(min=1)
                    scores = masked_products(q_bar, k_bar, (by_document(tokens, grid) > 0)[:, None])
                    weights = (scores + by_document(counted, grid).clamp(min=1).log().mT).softmax(-1)
                    means = (weights @ summaries.flatten(2)).view_as(summaries)
                else:
                    first, old, n_chunks = summaries.new_zeros(len(grid.end), *summaries.shape[2:]), 0, q_sum.shape[1]
                    if state is not None:
                        old, first = start // size, state.summary
                        q_sum = torch.cat([q_sum[:, :1] + state.q_sum[:, None], q_sum[:, 1:]], 1)
                        summaries = torch.cat([state.summaries[:, :old], summaries], 1)
                        k_bar = torch.cat([state.k_bar[:, :old], k_bar], 1)
                    # Of each chunk, for the next one, which attends only if this one is full.
                    q_bar = (q_sum if state is not None else q_sum[:, :-1]) / size
                    earlier = torch.ones(q_bar.shape[1], k_bar.shape[1], dtype=torch.bool, device=v.device).tril(old)
                    weights = masked_products(q_bar, k_bar, earlier).softmax(-1)
                    following = (weights @ summaries.flatten(2)).unflatten(-1, first.shape[1:])
                    means = torch.cat([first[:, None], following], 1)
                    if state is not None:
                        full = (start % size + packing.longest) // size
                        rest = F.pad(q_sum, (0, 0, 0, 1))[:, full]
                        kept = [means[:, full], summaries[:, : old + full], k_bar[:, : old + full], rest]
                    means = means[:, :n_chunks]
                outputs.append(grid.tokens(queries @ of_chunks(means, grid).to(compute)).to(output_dtype(v, compute)))
        return torch.cat(outputs), kept

    def init_own_state(self, batch_size: int) -> FLASHWeightedState:
        like = self.any_parameter
        summary = torch.zeros(batch_size, self.d_qk, self.d_value, dtype=acc_dtype(like), device=like.device)
        own = mixed_chunk_state(batch_size, self.chunk_size, self.d_qk, self.d_value, like, linear=False)
        k_bar = summary.new_zeros(batch_size, 0, self.d_qk)
        return FLASHWeightedState(own.position.clone(), summary, summary[:, None][:, :0], k_bar, summary[..., 0], own)
