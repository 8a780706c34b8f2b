"""FLASH with a part left out, exchanged, or read by softmax.

    flash-local:         out[t] = o_quad[t]: no token attends beyond its own chunk
    flash-global:        out[t] = o_lin[t]: a causal token does not attend to its own chunk, so chunks are small
    flash-cls:           o_quad[0] = sum over j in L(0) of softmax over j (q_quad[0].k_quad[j] / sqrt(s) + bias[-j]) v[j]
    flash-first-to-all:  o_quad[t] = sum over all j of softmax over j (q_quad[t].k_quad[j] / sqrt(s)) v[j]
                         for the first token t of a chunk
    flash-overlapping:   L(t) = tokens of t's own chunk and of the chunks beside it; causal: those with j <= t
    flash-weighted:      o_lin[t] = q_lin[t] . sum over h in R(g) of A[g, h] S[h]        for t in chunk g, where

        q_bar[g], k_bar[g] = mean over chunk g of q_lin, k_lin          S[g] = sum over j in g of k_lin[j] v[j]^T / |g|
        bidirectional: A[g] = softmax over all chunks h of q_bar[g].k_bar[h] / sqrt(s) + log |h|
        causal:        the same over h < g, with q_bar[g - 1] instead of q_bar[g], which contains later tokens of the chunk

Where softmax replaces the quadratic part, the linear part stays. A token that attends to the whole document has no relative
bias, because the bias is only defined for positions inside a chunk. Equal scores of summaries give the mean over tokens, as in
FLASH.

Shapes: N tokens, D documents or streams, T tokens of a document, R rows, L tokens of a row, G chunks, C chunk size, Q queries,
s query/key width, e value width, M = 2 (causal) or 3 chunks in reach of flash-overlapping.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447): the ablations "local only" and "global only", the latter with
chunks of 64; section 4.3 on fine-tuning; overlapping chunks, which it mentions as better but slower; and appendix A, weighted
summaries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from lineartime.baselines.blocks import StreamState, masked_products, real_tokens
from lineartime.layers.flash import FLASH
from lineartime.layers.mixer import MixerOptions
from lineartime.ops.activations import NORMALIZATIONS, Normalization
from lineartime.ops.mixed_chunk import MixedChunkState, attend, attention_weights, mixed_chunk_state
from lineartime.ops.modes import acc_dtype, matmul_dtype, output_dtype, without_autocast
from lineartime.ops.packing import Grid, Packing


class FLASHVariant(FLASH):
    """FLASH with another quadratic or linear part, in plain PyTorch."""

    splits_context = False
    reads_prefix = False
    backend = None


class FLASHLocal(FLASHVariant):
    """FLASH whose tokens attend only within their chunk."""

    name = "flash-local"
    n_maps = 2

    def attend(self, maps: Sequence[Tensor], v: Tensor, packing: Packing, state: Any) -> tuple[Tensor, Any]:
        q, k = maps
        return attend(q, k, None, None, v, packing, self.options(packing), state)

    def init_own_state(self, batch_size: int) -> MixedChunkState:
        like = self.any_parameter
        return mixed_chunk_state(batch_size, self.chunk_size, self.d_qk, self.d_value, like, maps=1, linear=False)


class FLASHGlobalOptions(MixerOptions, total=False):
    """The options of `FLASH` that are not those of its quadratic part."""

    d_qk: int
    expansion: int
    normalization: Normalization
    rope: bool


class FLASHGlobal(FLASHVariant):
    """FLASH with linear attention across chunks of 64 alone.

    Args:
        chunk_size: C; the length of the input need not be a multiple of it.
        **options: the options of `FLASH`, except those of the quadratic part: activation, relative_bias and initial_scores.
    """

    name = "flash-global"
    n_maps = 2

    def __init__(self, d_model: int, *, chunk_size: int = 64, **options: Unpack[FLASHGlobalOptions]) -> None:
        # Passed explicitly, so that a caller who passes them gets a TypeError.
        super().__init__(
            d_model, chunk_size=chunk_size, activation="relu2", relative_bias=False, initial_scores="small", **options
        )

    def attend(self, maps: Sequence[Tensor], v: Tensor, packing: Packing, state: Any) -> tuple[Tensor, Any]:
        q, k = maps
        return attend(None, None, q, k, v, packing, self.options(packing), state)

    def init_own_state(self, batch_size: int) -> MixedChunkState:
        return mixed_chunk_state(batch_size, self.chunk_size, self.d_qk, self.d_value, self.any_parameter, maps=1)


class FLASHBySoftmax(FLASHVariant):
    """FLASH whose first tokens of some chunks attend with softmax instead of relu^2; a subclass says to what."""

    def by_softmax(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor, packing: Packing) -> Tensor:
        """The quadratic part of the first tokens of a row's first chunks: [R, L, s], [R, L, s], [R, L, e] -> [R, Q, e].

        `real`, bool [R or 1, L], is False for padding.
        """
        raise NotImplementedError

    def attend(self, maps: Sequence[Tensor], v: Tensor, packing: Packing, state: Any) -> tuple[Tensor, Any]:
        q_quad, k_quad, q_lin, k_lin = maps
        options, compute = self.options(packing), matmul_dtype(*maps, v)
        local, _ = attend(q_quad, k_quad, None, None, v, packing, options)
        across, _ = attend(None, None, q_lin, k_lin, v, packing, options)

        def replaced(q: Tensor, k: Tensor, v: Tensor, local: Tensor, real: Tensor | None) -> Tensor:
            first = self.by_softmax(q, k, v, real_tokens(v, real), packing)
            places = torch.arange(0, v.shape[1], self.chunk_size, device=v.device)[: first.shape[1]]
            return local.index_copy(1, places, first.to(local.dtype))

        with without_autocast(v):
            return packing.by_row(replaced, *(x.to(compute) for x in (q_quad, k_quad, v)), local) + across, None


class FLASHCLS(FLASHBySoftmax):
    """FLASH for fine-tuning: [CLS] attends with softmax.

    [CLS] is the first token of a document. It attends to its chunk. The options are those of `FLASH`.
    """

    name = "flash-cls"
    why_not_causal: ClassVar[str] = "its first token has to see the tokens that follow"

    def by_softmax(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor, packing: Packing) -> Tensor:
        k, v, real = k[:, : self.chunk_size], v[:, : self.chunk_size], real[:, : self.chunk_size]
        scores = masked_products(q[:, :1], k, real[:, None])
        if self.bias is not None:
            scores = scores + self.bias(k.shape[1], packing)[k.shape[1] - 1 :]
        return scores.softmax(-1).to(v.dtype) @ v


class FLASHFirstToAll(FLASHBySoftmax):
    """FLASH for fine-tuning: the first token of each chunk attends to all tokens.

    These tokens attend to the whole document with softmax. The options are those of `FLASH`.
    """

    name = "flash-first-to-all"
    why_not_causal: ClassVar[str] = "the first token of a chunk has to see the whole sequence"

    def by_softmax(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor, packing: Packing) -> Tensor:
        """In time T^2 / C."""
        return masked_products(q[:, :: self.chunk_size], k, real[:, None]).softmax(-1).to(v.dtype) @ v


@dataclass(eq=False)
class FLASHOverlappingState(StreamState):
    """The state of causal streams, of constant size; slots that hold no token hold any numbers.

    Attributes:
        summary: [D, s, e], the sum of k_lin v^T over all complete chunks.
        k_quad, v: [D, 2 C, s] and [D, 2 C, e] of the previous chunk and the open one.
        k_lin: [D, C, s] of the open chunk.
    """

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
                visible = ((place >= 0) & (place < grid.end[grid.document][:, None]))[:, None]
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
        chunks = grid.keys(x, None if old is None else old[:, grid.size :])
        chunk = torch.arange(len(grid.document), device=x.device)
        before = x.new_zeros(())
        if old is not None:  # the chunk before, or the last one, if it is full
            full = (grid.start % grid.size == 0)[:, None, None]
            before = grid.of_documents(torch.where(full, old[:, grid.size :], old[:, : grid.size])).to(x.dtype)
        parts = [torch.where((chunk == grid.first[grid.document])[:, None, None], before, chunks.roll(1, 0)), chunks]
        if not self.causal:
            parts.append(torch.where((chunk == grid.final[grid.document])[:, None, None], 0, chunks.roll(-1, 0)))
        return torch.cat(parts, 1)

    def init_own_state(self, batch_size: int) -> FLASHOverlappingState:
        size, like = self.chunk_size, self.any_parameter
        shapes = (self.d_qk, self.d_value), (2 * size, self.d_qk), (2 * size, self.d_value), (size, self.d_qk)
        sums = (torch.zeros(batch_size, *shape, dtype=acc_dtype(like), device=like.device) for shape in shapes)
        return FLASHOverlappingState(self.first_position(batch_size), *sums)


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
    document, chunk = grid.document, torch.arange(len(grid.document), device=grid.document.device)
    longest = max(grid.chunks, default=0) if isinstance(grid.chunks, list) else len(document)
    return longest, document * longest + chunk - grid.first[document]


@dataclass(eq=False)
class FLASHWeightedState(StreamState):
    """The state of causal streams; it grows by one summary for every chunk.

    Attributes:
        summary: [B, s, e], the weighted mean of summaries for the open chunk.
        summaries, k_bar: [B, G, s, e] and [B, G, s] of all complete chunks.
        q_sum: [B, s], the sum of q_lin over the open chunk.
        open_chunk: the keys of both parts and the values of the open chunk.
    """

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
