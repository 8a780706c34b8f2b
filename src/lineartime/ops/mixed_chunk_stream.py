"""Mixed chunk attention of streams, in constant memory: many tokens at once, or one for each of streams at different positions.

Shapes: B batch or streams, N new tokens of a stream, C chunk size, s query/key width, e value width.

The definition is the causal one of mixed_chunk.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lineartime.ops.activations import Activation, Normalization, attention_weights
from lineartime.ops.chunks import cut_chunks, exclusive_cumsum, fill
from lineartime.ops.mixed_chunk import chunk_attention
from lineartime.ops.precision import matmul_dtype, output_dtype, without_autocast

# 1. Streams at one position -------------------------------------------------------------------------------------------


class MixedChunkState(NamedTuple):
    """What a causal stream has to remember, of a size that does not depend on the number of tokens read.

    Attributes:
        summary: [B, s, e], the sum of k_lin v^T over all complete chunks, in float32 or better.
        k_quad, k_lin, v: [B, C, s], [B, C, s], [B, C, e] of the open chunk, zero beyond its tokens.
        position: the number of tokens read so far; position % C of them are in the open chunk.
    """

    summary: Tensor
    k_quad: Tensor
    k_lin: Tensor
    v: Tensor
    position: int


def mixed_chunk_state(batch_size: int, chunk_size: int, d_qk: int, d_value: int, like: Tensor) -> MixedChunkState:
    """The state before the first token, on the device of `like` and in its dtype (float32 at the least)."""
    dtype = torch.promote_types(like.dtype, torch.float32)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(batch_size, *shape, dtype=dtype, device=like.device)

    return MixedChunkState(
        zeros(d_qk, d_value), zeros(chunk_size, d_qk), zeros(chunk_size, d_qk), zeros(chunk_size, d_value), position=0
    )


def mixed_chunk_attention_extend(
    q_quad: Tensor,
    k_quad: Tensor,
    q_lin: Tensor,
    k_lin: Tensor,
    v: Tensor,
    state: MixedChunkState,
    *,
    bias: Tensor | None = None,
    activation: Activation = "relu2",
    normalization: Normalization = "count",
) -> tuple[Tensor, MixedChunkState]:
    """Continue a causal sequence by N tokens; the outputs equal those of one causal `mixed_chunk_attention` over everything.

    Args:
        q_quad, k_quad, q_lin, k_lin, v: [B, N, s] and [B, N, e] of the new tokens.
        state: what came before, with the chunk size in its shapes; it is not changed.
        bias: [C, C].

    Returns:
        The new tokens' outputs [B, N, e], and the state after them.
    """
    chunk_size = state.v.shape[1]
    compute = matmul_dtype(q_quad, k_quad, q_lin, k_lin, v)
    result_dtype = output_dtype(v, compute)
    outputs = [v.new_zeros(v.shape[0], 0, v.shape[-1], dtype=result_dtype)]
    with without_autocast(v):
        q_quad, k_quad, q_lin, k_lin, v = (x.to(compute) for x in (q_quad, k_quad, q_lin, k_lin, v))
        start = 0
        while start < v.shape[1]:
            first = state.position % chunk_size
            whole = (v.shape[1] - start) // chunk_size if first == 0 else 0
            stop = min(start + (whole * chunk_size or chunk_size - first), v.shape[1])
            read = _read_whole_chunks if whole else _read_open_chunk
            new = (slice(None), slice(start, stop))
            out, state = read(q_quad[new], k_quad[new], q_lin[new], k_lin[new], v[new], state, bias, activation, normalization)
            outputs.append(out.to(result_dtype))
            start = stop
    return torch.cat(outputs, 1), state


def _read_whole_chunks(
    q_quad: Tensor,
    k_quad: Tensor,
    q_lin: Tensor,
    k_lin: Tensor,
    v: Tensor,
    state: MixedChunkState,
    bias: Tensor | None,
    activation: Activation,
    normalization: Normalization,
) -> tuple[Tensor, MixedChunkState]:
    """Chunks that begin and end with the new tokens, all at once; no chunk is open."""
    chunks = cut_chunks(v, state.v.shape[1])
    q_quad, k_quad, q_lin, k_lin, v = (chunks.cut(x) for x in (q_quad, k_quad, q_lin, k_lin, v))
    out = chunk_attention(q_quad, k_quad, v, chunks, causal=True, bias=bias, activation=activation, normalization=normalization)
    sums = (k_lin.mT @ v).to(state.summary.dtype)
    before = state.summary[:, None] + exclusive_cumsum(sums)
    counts = state.position + chunks.chunk_size * torch.arange(sums.shape[1], device=v.device)
    out = out + q_lin @ (before / counts.clamp(min=1)[:, None, None]).to(v.dtype)
    after = state._replace(summary=before[:, -1] + sums[:, -1], position=state.position + chunks.length)
    return chunks.join(out), after


def _read_open_chunk(
    q_quad: Tensor,
    k_quad: Tensor,
    q_lin: Tensor,
    k_lin: Tensor,
    v: Tensor,
    state: MixedChunkState,
    bias: Tensor | None,
    activation: Activation,
    normalization: Normalization,
) -> tuple[Tensor, MixedChunkState]:
    """Tokens that the open chunk has room for."""
    chunk_size = state.v.shape[1]
    first = state.position % chunk_size
    last = first + v.shape[1]
    state = MixedChunkState(
        state.summary,
        fill(state.k_quad, first, k_quad),
        fill(state.k_lin, first, k_lin),
        fill(state.v, first, v),
        state.position + v.shape[1],
    )
    weights = attention_weights(
        q_quad @ state.k_quad[:, :last].to(v.dtype).mT,
        d_qk=q_quad.shape[-1],
        visible=torch.ones(v.shape[1], last, dtype=torch.bool, device=v.device).tril(first),
        bias=None if bias is None else bias[first:last, :last],
        activation=activation,
        published_length=None if normalization == "count" else float(chunk_size),
    )
    # Complete chunks are full, so both normalisations divide by the number of their tokens.
    mean = (state.summary / max(1, state.position - last)).to(v.dtype)
    out = weights.to(v.dtype) @ state.v[:, :last].to(v.dtype) + q_lin @ mean
    return out, _fold(state) if last == chunk_size else state


def _fold(state: MixedChunkState) -> MixedChunkState:
    """Add the open chunk, now full, to the summary and open an empty one."""
    summary = state.summary + state.k_lin.mT @ state.v
    return MixedChunkState(
        summary, torch.zeros_like(state.k_quad), torch.zeros_like(state.k_lin), torch.zeros_like(state.v), state.position
    )


# 2. Streams at different positions ------------------------------------------------------------------------------------
# Their state has one shape for ever and is written to in place, so that a step can be compiled, or recorded as a CUDA graph.


class MixedChunkStreams(NamedTuple):
    """What a batch of streams has to remember.

    Attributes:
        summary: [B, s, e], the sum of k_lin v^T over all complete chunks, in float32 or better.
        pending: [B, s, e], the same sum over the open chunk.
        k, v: [B, C, s] and [B, C, e] of the open chunk; what stands behind its last token is out of date.
        position: int [B], the number of tokens that each stream has read.
    """

    summary: Tensor
    pending: Tensor
    k: Tensor
    v: Tensor
    position: Tensor


def mixed_chunk_streams(states: Sequence[MixedChunkState]) -> MixedChunkStreams:
    """Bring streams together, each state being that of one or more streams at one position; the states stay as they are."""
    summary, k, k_lin, v = (torch.cat(parts) for parts in list(zip(*states, strict=True))[:4])
    positions = [state.position for state in states for _ in range(len(state.v))]
    with without_autocast(v):
        return MixedChunkStreams(summary, k_lin.mT @ v, k, v, torch.tensor(positions, device=v.device))


def mixed_chunk_attention_step(
    q_quad: Tensor,
    k_quad: Tensor,
    q_lin: Tensor,
    k_lin: Tensor,
    v: Tensor,
    streams: MixedChunkStreams,
    *,
    bias: Tensor | None = None,
    activation: Activation = "relu2",
    normalization: Normalization = "count",
) -> Tensor:
    """Continue every stream by one token; the outputs equal those of `mixed_chunk_attention_extend` for each stream alone.

    Args:
        q_quad, k_quad, q_lin, k_lin, v: [B, 1, s] and [B, 1, e] of the new tokens.
        streams: what came before; it is brought up to date in place.
        bias: [B, C], added to the scores of each stream's new token: its row of the [C, C] of the other forms.

    Returns:
        [B, 1, e].
    """
    summary, pending, keys, values, position = streams
    chunk_size = values.shape[1]
    compute = matmul_dtype(q_quad, k_quad, q_lin, k_lin, v)
    result_dtype = output_dtype(v, compute)
    with without_autocast(v):
        q_quad, k_quad, q_lin, k_lin, v = (x.to(compute) for x in (q_quad, k_quad, q_lin, k_lin, v))
        slot = position % chunk_size
        rows = torch.arange(len(v), device=v.device)
        keys[rows, slot] = k_quad[:, 0].to(keys.dtype)
        values[rows, slot] = v[:, 0].to(values.dtype)
        weights = attention_weights(
            q_quad @ keys.to(compute).mT,
            d_qk=q_quad.shape[-1],
            visible=(torch.arange(chunk_size, device=v.device) <= slot[:, None])[:, None],
            bias=None if bias is None else bias[:, None],
            activation=activation,
            published_length=None if normalization == "count" else float(chunk_size),
        )
        # What an earlier chunk has left behind is finite, and its weight is zero.
        out = weights.to(compute) @ values.to(compute)
        read = q_lin.to(summary.dtype) @ summary / (position - slot).clamp(min=1)[:, None, None]
        pending += (k_lin.mT @ v).to(pending.dtype)
        full = (slot == chunk_size - 1)[:, None, None]
        summary += pending * full
        pending *= ~full
        position += 1
        return (out + read.to(compute)).to(result_dtype)
