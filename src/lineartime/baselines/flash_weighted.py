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
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lineartime.baselines.flash_parts import FLASHInParts
from lineartime.ops.activations import NORMALIZATIONS, attention_weights
from lineartime.ops.batch import Batch, join_documents, open_chunk_pieces, shift_chunks, split_documents
from lineartime.ops.mixed_chunk import stream
from lineartime.ops.mixed_chunk.stream import MixedChunkState, mixed_chunk_state
from lineartime.ops.modes import acc_dtype, matmul_dtype, output_dtype, without_autocast
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


def weighted_summaries(
    q: Tensor, k: Tensor, v: Tensor, chunks: Batch, *, causal: bool, published_size: float | None = None
) -> Tensor:
    """Attend from every chunk to a weighted mean of summaries: [B, G, C, s], [B, G, C, s], [B, G, C, e] -> [B, G, C, e].

    `published_size` is the C that divides each summary, as published; None divides by the number of tokens of the chunk.
    """
    accumulate = acc_dtype(v)
    tokens = chunks.sizes(q.new_empty(0, dtype=accumulate))  # [B or 1, G]
    sizes = tokens.clamp(min=1)
    q_bar, k_bar = (x.to(accumulate).sum(2) / sizes[..., None] for x in (q, k))
    if published_size is not None:
        sizes = torch.full_like(sizes, published_size)  # every chunk counts as full
    summaries = (k.mT @ v).to(accumulate) / sizes[..., None, None]
    if causal:
        q_bar = shift_chunks(q_bar, chunks, 1)
    q_bar, k_bar, sizes, tokens, flat = (
        split_documents(x, chunks) for x in (q_bar, k_bar, sizes, tokens, summaries.flatten(2))
    )
    visible = (tokens > 0)[..., None, :].expand(-1, -1, tokens.shape[-1], -1)
    weights = _chunk_weights(q_bar, k_bar, sizes.clamp(min=1), visible.tril(-1) if causal else visible)
    return q @ join_documents(weights @ flat, chunks).view_as(summaries).to(q.dtype)


def _chunk_weights(q_bar: Tensor, k_bar: Tensor, sizes: Tensor, visible: Tensor | None) -> Tensor:
    """A: [..., Q, s], [..., G, s] and sizes [..., G] -> [..., Q, G]."""
    return attention_weights(
        q_bar @ k_bar.mT,
        d_qk=q_bar.shape[-1],
        visible=visible,
        bias=sizes.log()[..., None, :],
        activation="softmax",
        published_length=None,
    )


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


class FLASHWeighted(FLASHInParts):
    """FLASH with attention between chunk summaries.

    Its state grows by s x e numbers with every chunk. The options are those of `FLASH`.
    """

    name = "flash-weighted"
    normalizations = NORMALIZATIONS
    any_positions = False
    constant_state = False

    def linear_part(self, q: Tensor, k: Tensor, v: Tensor, chunks: Batch) -> Tensor:
        return weighted_summaries(q, k, v, chunks, causal=self.causal, published_size=self.options.published_length)

    def attend_next(
        self, maps: Sequence[Tensor], v: Tensor, state: FLASHWeightedState, batch: Batch
    ) -> tuple[Tensor, FLASHWeightedState]:
        size, compute, start = self.chunk_size, matmul_dtype(*maps, v), batch.first_position
        summary, q_sum, own, bias = state.summary, state.q_sum, state.open_chunk, self.slot_bias(batch)
        summaries, k_bar = state.summaries[:, : start // size], state.k_bar[:, : start // size]
        outputs = [v[:, :0].to(output_dtype(v, compute))]
        for new, _, last in open_chunk_pieces(start, v.shape[1], size):
            q_quad, k_quad, q_lin, k_lin = (x[:, new] for x in maps)
            here = replace(batch, start=start + new.start)
            local, own = stream.extend(q_quad, None, [k_quad, k_lin], v[:, new], bias, self.options, own, here)
            with without_autocast(v):
                outputs.append(local + (q_lin.to(compute) @ summary.to(compute)).to(local.dtype))
                q_sum = q_sum + q_lin.to(q_sum.dtype).sum(1)
                if last == size:  # the chunk is full: summarise it, and compute the context of the next one
                    keys, values = own.keys[:, 1].to(summary.dtype), own.values.to(summary.dtype)
                    summaries = torch.cat([summaries, (keys.mT @ values / size)[:, None]], 1)
                    k_bar = torch.cat([k_bar, keys.mean(1, keepdim=True)], 1)
                    weights = _chunk_weights(q_sum[:, None] / size, k_bar, torch.full_like(k_bar[:1, :, 0], size), None)
                    summary, q_sum = (weights @ summaries.flatten(2)).view_as(summary), torch.zeros_like(q_sum)
        position = batch.after(state.position)
        return torch.cat(outputs, 1), FLASHWeightedState(position, summary, summaries, k_bar, q_sum, own)

    def init_own_state(self, batch_size: int) -> FLASHWeightedState:
        like = self.any_parameter
        summary = torch.zeros(batch_size, self.d_qk, self.d_value, dtype=acc_dtype(like), device=like.device)
        own = mixed_chunk_state(batch_size, self.chunk_size, self.d_qk, self.d_value, like, linear=False)
        k_bar = summary.new_zeros(batch_size, 0, self.d_qk)
        return FLASHWeightedState(own.position.clone(), summary, summary[:, None][:, :0], k_bar, summary[..., 0], own)
