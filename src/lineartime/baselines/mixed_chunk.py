"""Mixed chunk attention in the heads of a Transformer: softmax inside a chunk, and a linear part across chunks.

Shapes: N tokens, D documents, B streams, T tokens of a document, R rows, L tokens of a row, H heads, h head width, f features,
C chunk size, G chunks, Q queries of a chunk, M chunks that a causal token attends to in the local part.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447): section 3.2, with the global part of a linear attention, and
the comparison of approximation costs (MC-TFM++).

    mc-tfm, MC-TFM++:

    out[t] = sum over j in L(t) of softmax(q[t].k[j] / sqrt(h)) v[j]  +  q[t] / sqrt(h) . mean over j in R(t) of k[j] v[j]^T

    mixed-chunk, a scheme with several choices of both parts:

    out[t] = sum over j in L(t) of softmax(q[t].k[j] / sqrt(h)) v[j]
             + sum over j in R(t) of s(t, j) v[j] / sum over j in R(t) of s(t, j)        s(t, j) = features(q[t]).features(k[j])

    L(t) = tokens of t's own chunk, or also of its neighbours; causal: those with j <= t
    R(t) = tokens of all chunks but t's own; causal: of those before it; nothing is added if there is none
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from typing_extensions import Unpack

from lineartime.baselines.blocks import (
    ChunkedHeadOptions,
    ChunkedHeads,
    StreamState,
    cut_blocks,
    exclusive_cumsum,
    fill,
    join_blocks,
    masked_products,
    open_chunk_pieces,
    real_tokens,
    with_neighbours,
)
from lineartime.baselines.kernel_attention import elu_features, normalized, relu_features, weigh_by_cosine, with_ones
from lineartime.errors import check_choice
from lineartime.ops.checks import check_fits, check_positive
from lineartime.ops.mixed_chunk import MixedChunkState, Scales, attend_visible, reciprocal
from lineartime.ops.modes import acc_dtype, output_dtype, without_autocast
from lineartime.ops.packing import Packing

Local = Literal["own", "overlapping"]
FeatureMap = Literal["relu", "elu", "cos"]


@dataclass(eq=False)
class MixedChunkSchemeState(StreamState):
    """The state of causal streams, of constant size.

    Attributes:
        summary: [B, H, f, h + 1], the sum of features(k) (v, 1)^T over all complete chunks, in float32 or better.
        k, v: [B, H, M C, h] of the open chunk, after the previous one if the local part overlaps; the slots after its tokens
            hold any numbers.
    """

    summary: Tensor
    k: Tensor
    v: Tensor


class MixedChunk(ChunkedHeads):
    """Mixed chunk attention of any local and global part.

    A causal layer streams with constant memory.

    Args:
        local: what the softmax covers: "own", a token's own chunk; or "overlapping", also the neighbouring chunks (if causal,
            the previous one).
        features: the features of the global part: "relu" as in Performer, "elu" for elu + 1, or "cos" as in cosFormer.
        max_length: the maximum number of tokens in a sequence with the features "cos"; other features have no limit.
        **options: the options of `ChunkedHeads`.
    """

    name = "mixed-chunk"

    def __init__(
        self,
        d_model: int,
        *,
        local: Local = "own",
        features: FeatureMap = "elu",
        max_length: int = 1024,
        **options: Unpack[ChunkedHeadOptions],
    ) -> None:
        super().__init__(d_model, **options)
        check_choice("local", local, get_args(Local))
        check_choice("features", features, get_args(FeatureMap))
        check_positive(max_length=max_length)
        self.local: Local = local
        self.features: FeatureMap = features
        self.max_length = max_length

    @property
    def longest_sequence(self) -> int | None:
        return self.max_length if self.features == "cos" else None

    def map_features(self, x: Tensor, first: int) -> Tensor:
        """Features [..., T, f] of queries or keys [..., T, h] at positions `first`, `first` + 1, ..."""
        if self.features == "relu":
            return relu_features(x)
        if self.features == "elu":
            return elu_features(x)
        check_fits("MixedChunk", first + x.shape[-2], self.max_length)
        return weigh_by_cosine(x.relu(), first, self.max_length)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        real, length, causal, features = real_tokens(v, real)[:, None, :, None], v.shape[-2], self.causal, self.map_features
        size = max(1, min(self.chunk_size, length))  # a larger chunk would only be padded

        def readable(x: Tensor) -> Tensor:
            """[..., L, f] -> [..., G, C, f], concatenated with the neighbours if they overlap."""
            chunks = cut_blocks(x, size)
            return with_neighbours(chunks, causal) if self.local == "overlapping" else chunks

        visible = readable(real).mT
        if causal:
            place = torch.arange(length, device=v.device)[:, None]
            visible = visible & (readable(place).mT <= cut_blocks(place, size))
        scores = masked_products(cut_blocks(q, size), readable(k), visible)
        local = scores.softmax(-1).to(v.dtype) @ readable(v)

        parts = features(q, 0), features(k, 0).masked_fill(~real, 0.0), with_ones(v)
        queries, keys, values = (cut_blocks(x, size) for x in parts)
        sums = (keys.mT @ values).to(acc_dtype(v))  # [R, H, G, f, h + 1]
        others = exclusive_cumsum(sums, -3)
        if not causal:  # not the total minus the own chunk: the difference could be mostly rounding error
            others = others + exclusive_cumsum(sums.flip(-3), -3).flip(-3)
        return join_blocks(local + normalized(queries @ others.to(queries.dtype)), length)

    def attend_next(
        self, q: Tensor, k: Tensor, v: Tensor, state: MixedChunkSchemeState, packing: Packing
    ) -> tuple[Tensor, MixedChunkSchemeState]:
        q, k, v = (x.to(state.k.dtype) for x in (q, k, v))
        position, chunk_size, features = packing.common_start or 0, self.chunk_size, self.map_features
        start = state.k.shape[-2] - chunk_size  # of the open chunk
        places = torch.arange(start + chunk_size, device=v.device)
        summary, keys, values = state.summary, state.k, state.v
        outputs = [v[..., :0, :]]
        for new, first, last in open_chunk_pieces(position, v.shape[-2], chunk_size):
            complete = position + new.start - first
            queries, stop = q[..., new, :], start + last
            if not first:  # the last chunk, which is full, becomes the previous one
                keys, values = (x.roll(-chunk_size, -2) for x in (keys, values))
            keys, values = fill(keys, start + first, k[..., new, :]), fill(values, start + first, v[..., new, :])
            visible = places[:stop] <= places[start + first : stop, None]
            if not complete:  # the first chunk has no previous one
                visible = visible & (places[:stop] >= start)
            local = masked_products(queries, keys[..., :stop, :], visible).softmax(-1).to(v.dtype) @ values[..., :stop, :]
            across = normalized(features(queries, complete + first) @ summary.to(v.dtype))
            outputs.append(local + across)
            if last == chunk_size:
                of_chunk = features(keys[..., start:, :], complete).mT @ with_ones(values[..., start:, :])
                summary = summary + of_chunk.to(summary.dtype)
        return torch.cat(outputs, -2), MixedChunkSchemeState(state.position + v.shape[-2], summary, keys, values)

    def init_own_state(self, batch_size: int) -> MixedChunkSchemeState:
        chunk = self.empty_chunk(batch_size)
        n_features = self.map_features(chunk[..., :1, :], 0).shape[-1]
        summary = chunk.new_zeros(*chunk.shape[:2], n_features, self.head_dim + 1)
        kept = torch.cat([chunk, chunk], -2) if self.local == "overlapping" else chunk
        return MixedChunkSchemeState(self.first_position(batch_size), summary, kept, kept)


class MCTFM(ChunkedHeads):
    """Multi-head mixed chunk attention: softmax inside chunks, linear across them.

    A causal layer streams with constant memory. The options are those of `ChunkedHeads`.
    """

    name = "mc-tfm"
    any_positions = True

    def attend_heads(self, maps: tuple[Tensor, Tensor, Tensor], packing: Packing, state: Any) -> tuple[Tensor, Any]:
        compute, scale, outputs = self.compute_dtype(*maps), self.head_dim**-0.5, []
        scales = Scales(scale, reciprocal, reciprocal)
        opened = (None, None) if state is None else (state.keys[:, :, 0].transpose(1, 2), state.values.transpose(1, 2))
        with without_autocast(maps[-1]):
            for grid, q, k, v in packing.by_grid(self.chunk_size, self.causal, *(x.to(compute) for x in maps)):
                # [G, H, Q, h], [G, H, C, h] and [G, H, C, h]
                q, k, v = (x.transpose(1, 2) for x in (grid.queries(q), grid.keys(k, opened[0]), grid.keys(v, opened[1])))
                local = attend_visible(q, k, v, grid.last[:, None], None, "softmax", scales)
                sums = (k.mT @ v).to(acc_dtype(v))  # [G, H, h, h]
                if self.causal:
                    others, count = grid.sum_before(sums), grid.begin
                    others = others if state is None else others + grid.of_documents(state.summary)
                else:
                    others, count = grid.of_documents(grid.sum_of(sums)) - sums, grid.end[grid.document] - grid.sizes
                mean = (others * scales.sum(count.to(sums.dtype))[:, None, None, None]).to(compute)
                outputs.append(grid.tokens((local + scale * q @ mean).transpose(1, 2)))
                if state is not None:
                    summary = state.summary + grid.sum_of(torch.where(grid.full[:, None, None, None], sums, 0))
                    keys, values = (x.index_select(0, grid.final).to(state.keys.dtype) for x in (k, v))
                    state = MixedChunkState(state.position + packing.new, summary, keys[:, :, None], values)
        return torch.cat(outputs).flatten(1).to(output_dtype(maps[-1], compute)), state

    def init_own_state(self, batch_size: int) -> MixedChunkState:
        chunk = self.empty_chunk(batch_size)
        summary = chunk.new_zeros(batch_size, self.n_heads, self.head_dim, self.head_dim)
        return MixedChunkState(self.first_position(batch_size), summary, chunk[:, :, None], chunk)
