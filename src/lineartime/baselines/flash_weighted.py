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
from typing import NamedTuple

import torch
from torch import Tensor

from lineartime.baselines.flash_parts import FLASHInParts
from lineartime.layers.streams import ShiftedState
from lineartime.ops.activations import NORMALIZATIONS, attention_weights
from lineartime.ops.chunks import Chunks, fill, join_documents, open_chunk_pieces, shift_chunks, split_documents
from lineartime.ops.layout import Layout
from lineartime.ops.mixed_chunk.stream import MixedChunkState
from lineartime.ops.precision import acc_dtype, matmul_dtype, output_dtype, without_autocast

# 1. The definition ----------------------------------------------------------------------------------------------------


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


# 2. The chunked form --------------------------------------------------------------------------------------------------


def weighted_summaries(
    q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, *, causal: bool, published_size: float | None = None
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


# 3. The streaming form, and the layer ---------------------------------------------------------------------------------


class FLASHWeightedState(NamedTuple):
    """The state of causal streams; it grows by one summary for every chunk.

    Attributes:
        context: [B, s, e], the weighted mean of summaries for the open chunk.
        summaries, k_bar: [B, G, s, e] and [B, G, s] of all complete chunks.
        q_sum: [B, s], the sum of q_lin over the open chunk.
        k_lin: [B, C, s] of the open chunk.
        quadratic: the state of the quadratic part, which holds the open chunk's values.
        position: the number of tokens read so far.
    """

    context: Tensor
    summaries: Tensor
    k_bar: Tensor
    q_sum: Tensor
    k_lin: Tensor
    quadratic: MixedChunkState
    position: int


class FLASHWeighted(FLASHInParts[FLASHWeightedState]):
    """FLASH with attention between chunk summaries.

    Its state grows by s x e numbers with every chunk. The options are those of `FLASH`.
    """

    name = "flash-weighted"
    normalizations = NORMALIZATIONS

    def linear_part(self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks) -> Tensor:
        """Attend across chunks, by weighted summaries."""
        return weighted_summaries(q, k, v, chunks, causal=self.causal, published_size=self.options.published_length)

    def attend_next(
        self, maps: Tensor, v: Tensor, state: FLASHWeightedState, layout: Layout
    ) -> tuple[Tensor, FLASHWeightedState]:
        """Attend to the open chunk and the weighted summaries before it; return the outputs and the new state."""
        compute = matmul_dtype(maps, v)
        outputs = [v[:, :0].to(output_dtype(v, compute))]
        for new, first, last in open_chunk_pieces(state.position, v.shape[1], self.chunk_size):
            q_quad, k_quad, q_lin, k_lin = maps[:, :, new].unbind(1)
            v_open = fill(state.quadratic.v, first, v[:, new])
            local, quadratic = self.quadratic_next(q_quad, k_quad, v[:, new], state.quadratic, layout)
            with without_autocast(v):
                outputs.append(local + (q_lin.to(compute) @ state.context.to(compute)).to(local.dtype))
                state = state._replace(
                    q_sum=state.q_sum + q_lin.to(state.q_sum.dtype).sum(1),
                    k_lin=fill(state.k_lin, first, k_lin),
                    quadratic=quadratic,
                    position=state.position + last - first,
                )
                if last == self.chunk_size:
                    state = self._fold(state, v_open)
        return torch.cat(outputs, 1), state

    def _fold(self, state: FLASHWeightedState, v_open: Tensor) -> FLASHWeightedState:
        """Summarise the open chunk, which is full, and compute the context of the next one."""
        summary, size = state.k_lin.mT @ v_open / self.chunk_size, self.chunk_size
        summaries = torch.cat([state.summaries, summary[:, None]], 1)
        k_bar = torch.cat([state.k_bar, state.k_lin.mean(1, keepdim=True)], 1)
        weights = _chunk_weights(state.q_sum[:, None] / size, k_bar, torch.full_like(k_bar[:1, :, 0], size), None)
        return state._replace(
            context=(weights @ summaries.flatten(2)).view_as(summary),
            summaries=summaries,
            k_bar=k_bar,
            q_sum=torch.zeros_like(state.q_sum),
            k_lin=torch.zeros_like(state.k_lin),
        )

    def global_state(self, state: FLASHWeightedState | ShiftedState) -> Tensor:
        """The weighted mean of summaries for the open chunk."""
        context: Tensor = (state.own if isinstance(state, ShiftedState) else state).context
        return context

    def init_own_state(self, batch_size: int) -> FLASHWeightedState:
        """The state before the first token of `batch_size` streams."""
        mixed = self.init_mixed_state(batch_size)
        context, k_lin = mixed.summary, mixed.k_lin
        return FLASHWeightedState(
            context, context[:, None][:, :0], k_lin[:, :0], k_lin[:, 0], k_lin, self.quadratic_state(batch_size), 0
        )
