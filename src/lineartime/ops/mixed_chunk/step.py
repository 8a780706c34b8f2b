"""Mixed chunk attention of streams at different positions, one token of each at a time.

Their state keeps its shapes and is updated in place, so that a step can be compiled, or recorded as a CUDA graph.

Shapes: B streams, C chunk size, F tokens of a group (see `group_size`), s query/key width, e value width.
The definition is the causal one of reference.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.ops.activations import attention_weights, visible_share
from lineartime.ops.cache import each_stream
from lineartime.ops.chunks import OpenChunk
from lineartime.ops.mixed_chunk import step_native
from lineartime.ops.mixed_chunk.inputs import MixedChunkOptions, MixedChunkStreams, Projected, group_size, queries_and_keys
from lineartime.ops.mixed_chunk.stream import MixedChunkState
from lineartime.ops.precision import matmul_dtype, output_dtype, without_autocast


def mixed_chunk_streams(states: Sequence[MixedChunkState], dtype: torch.dtype | None = None) -> MixedChunkStreams:
    """Join streams.

    Args:
        states: the states to join, each of one or more streams at one position; they are not modified.
        dtype: the dtype of the keys and values, ideally the one in which they were computed; None for the dtype of the states.
            A step reads all of them, which takes less time in a narrow dtype.
    """
    summary, k_quad, k_lin, v = (torch.cat(parts) for parts in list(zip(*states, strict=True))[:4])
    positions = [state.position for state in states for _ in range(len(state.v))]
    keys, values = (x.to(dtype or v.dtype) for x in (torch.stack([k_quad, k_lin], 1), v))
    position = torch.tensor(positions, dtype=torch.long, device=v.device)
    with without_autocast(v):
        slot = position[:, None] % v.shape[1]
        summed = torch.arange(v.shape[1], device=v.device) < slot - slot % group_size(v.shape[1])
        # Rounded like the values that a step subtracts from the sums again.
        added = keys[:, 1].masked_fill(~summed[..., None], 0.0)
        sums = torch.baddbmm(summary, added.mT.to(summary.dtype), values.to(summary.dtype))
    return MixedChunkStreams(sums, keys, values, position)


def mixed_chunk_states(streams: MixedChunkStreams, positions: Sequence[int]) -> list[MixedChunkState]:
    """The state of each stream alone, the inverse of `mixed_chunk_streams`; `positions` is that of the streams, on the host."""
    sums, keys, values, position = streams
    dtype = sums.dtype
    with without_autocast(values):
        slots, slot = torch.arange(values.shape[1], device=values.device), position[:, None] % values.shape[1]
        read, summed = slots < slot, slots < slot - slot % group_size(values.shape[1])
        k, v = keys.to(dtype).masked_fill(~read[:, None, :, None], 0.0), values.to(dtype).masked_fill(~read[..., None], 0.0)
        summary = torch.baddbmm(sums, k[:, 1].masked_fill(~summed[..., None], 0.0).mT, v, alpha=-1)
    parts = zip(*map(each_stream, (summary, k[:, 0], k[:, 1], v)), positions, strict=True)
    return [MixedChunkState(*part) for part in parts]


def check_streams(streams: MixedChunkStreams, chunk_size: int, d_qk: int, d_value: int) -> None:
    """Raise ArgumentError for streams of a layer of other sizes: a C++ function would read out of bounds."""
    wanted = ((d_qk, d_value), (2, chunk_size, d_qk), (chunk_size, d_value), ())
    for name, tensor, shape in zip(MixedChunkStreams._fields, streams, wanted, strict=True):
        if tensor.shape[1:] != shape:
            expected = ", ".join(map(str, ("B", *shape)))
            raise ArgumentError(
                "streams",
                f"has {name} of shape {list(tensor.shape)}, but must have [{expected}]: "
                "give it join_streams([state]) of the same layer.",
            )


def open_chunk(position: Tensor, options: MixedChunkOptions, dtype: torch.dtype) -> OpenChunk:
    """The open chunk of streams that have read `position` tokens, int64 [B]; `dtype` is that of their state."""
    slots, slot = torch.arange(options.chunk_size, device=position.device), position % options.chunk_size
    visible = (slots <= slot[:, None])[:, None]
    share = visible_share(visible, options.published_length, visible.to(dtype))
    assert share is not None  # not everything is visible
    read = position - slot
    summary_share = ((read > 0).to(dtype) / options.linear_divisor(read))[:, None, None]
    size = group_size(options.chunk_size)
    first, is_full = slot - slot % size, slot % size == size - 1
    summed = slots < (first + size * is_full)[:, None]
    open_share = summed[:, None] * summary_share
    return OpenChunk(
        slots, slot, visible, share.to(dtype), summary_share, open_share, first[:, None] + slots[:size], is_full[:, None, None]
    )


def step_projected(
    projected: Projected,
    bias: Tensor | None,
    rotations: Tensor | None,
    options: MixedChunkOptions,
    streams: MixedChunkStreams,
    chunk: OpenChunk,
) -> Tensor:
    """Gated attention for one more token of every stream: all of FLASH between its two projections.

    Args:
        projected: the new tokens, [B, 1, 2 e + s], with gamma and beta.
        bias: [B, C], added to the scores of each stream's new token: its row of the [C, C] bias of the other forms.
        rotations: [2, B, 1, s / 2], or None.
        options: as for the other forms.
        streams: what came before; updated in place.
        chunk: the open chunk of the streams.

    Returns:
        [B, 1, e].

    Raises:
        ArgumentError: if the streams belong to a layer of other sizes.
    """
    check_streams(streams, options.chunk_size, projected.d_qk, projected.d_value)
    gated = step_native.step(projected, bias, rotations, options, streams)
    if gated is not None:
        return gated
    gate, v, z = projected.activate()
    maps = queries_and_keys(z, projected.gamma, projected.beta, rotations)
    return gate * step(maps, v, bias, options, streams, chunk)


def step(
    maps: Tensor,
    v: Tensor,
    bias: Tensor | None,
    options: MixedChunkOptions,
    streams: MixedChunkStreams,
    chunk: OpenChunk | None = None,
) -> Tensor:
    """Continue every stream by one token; the outputs equal those of `extend` for each stream alone.

    Args:
        maps: [B, 4, 1, s], the new tokens' q_quad, k_quad, q_lin and k_lin.
        v: [B, 1, e], their values.
        bias: [B, C], added to the scores of each stream's new token: its row of the [C, C] bias of the other forms.
        options: as for the other forms.
        streams: what came before; updated in place.
        chunk: the open chunk of the streams, if an earlier layer has already computed it.

    Returns:
        [B, 1, e].
    """
    sums, keys, values, position = streams
    dtype, result_dtype = sums.dtype, output_dtype(v, matmul_dtype(maps, v))
    with without_autocast(v):
        chunk = chunk or open_chunk(position, options, dtype)
        queries, new, v = maps[:, 0::2].to(dtype), maps[:, 1::2].to(keys.dtype), v.to(keys.dtype)
        place = chunk.slot[:, None, None]
        keys.scatter_(2, place[:, None].expand_as(new), new)
        values.scatter_(1, place.expand_as(v), v)
        group_k, group_v = (_group(x, chunk).to(dtype) for x in (keys[:, 1], values))
        sums.baddbmm_(group_k.mT, group_v)
        # Not len(v), which would make the batch size of an exported step a constant.
        compute = matmul_dtype(keys)
        products = torch.bmm(queries.flatten(0, 1).to(compute), keys.flatten(0, 1).to(compute).mT).to(dtype)
        quadratic, linear = products.view(v.shape[0], 2, *products.shape[1:]).unbind(1)
        weights = attention_weights(
            quadratic,
            d_qk=maps.shape[-1],
            visible=chunk.visible,
            bias=None if bias is None else bias[:, None],
            activation=options.activation,
            published_length=options.published_length,
            share=chunk.share,
        )
        # The linear part covers only complete chunks: subtract what the sums have of the open one, through the weights.
        weights = torch.addcmul(weights, linear, chunk.open_share, value=-1)
        across = torch.bmm((queries[:, 1] * chunk.summary_share).to(dtype), sums)
        out = across + torch.bmm(weights.to(compute), values.to(compute))
        position += 1
        return out.to(result_dtype)


def _group(x: Tensor, chunk: OpenChunk) -> Tensor:
    """The rows of each token's group if it is full, and zeros if not: [B, C, f] -> [B, F, f]."""
    rows = x.gather(1, chunk.group[..., None].expand(-1, -1, x.shape[-1]))
    return rows.masked_fill(~chunk.is_full, 0.0)
