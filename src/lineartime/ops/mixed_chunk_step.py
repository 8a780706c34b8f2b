"""Mixed chunk attention one token at a time, for a batch of streams that stand at different positions.

Shapes: B streams, C chunk size, s query/key width, e value width.

The state has one shape for ever and is written to in place, so that a step can be compiled, or recorded as a CUDA graph.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lineartime.ops.activations import Activation, Normalization, attention_weights
from lineartime.ops.mixed_chunk import MixedChunkState
from lineartime.ops.precision import matmul_dtype, output_dtype, without_autocast


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
