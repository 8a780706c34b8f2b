"""Mixed chunk attention of streams: more tokens of each, at any positions, in constant memory.

The last tokens of a stream, which do not fill a chunk, are kept one by one, in the slots of an open chunk. New tokens are read
in pieces that span at most two chunks, so that the scores of a piece need only the open chunk and the piece itself:

    window      = the open chunk, and the new tokens in the slots after its own
    quadratic   : as in reference.py, within the chunks of the window
    linear      : q_lin . summary / |R|, of the chunks before the token's own
    a full chunk: summary += sum over its tokens of k_lin v^T

Shapes: B streams, N new tokens of each, C chunk size, s query/key width, e value width, M maps of keys (1 if both parts share
one, or there is one part), W slots of the window.
The definition is the causal one of reference.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lineartime.ops.activations import Activation, Normalization, attention_weights, visible_share
from lineartime.ops.backends import Backend
from lineartime.ops.batch import Batch, cut_chunks
from lineartime.ops.checks import check_bias, check_continues
from lineartime.ops.make_batch import stream_batch
from lineartime.ops.mixed_chunk import cpu, triton
from lineartime.ops.mixed_chunk.inputs import Heads, MixedChunkOptions, Projected, check_heads
from lineartime.ops.precision import acc_dtype, matmul_dtype, output_dtype, without_autocast
from lineartime.ops.state import State, in_place, writable
from lineartime.ops.tracing import is_traced

SlotBias = Callable[[Tensor], Tensor]
"""The bias of queries in some slots of a chunk, int64 [...], for the keys of all its slots: [..., C]."""


@dataclass(eq=False)
class MixedChunkState(State):
    """What causal streams remember; its size does not depend on the number of tokens read.

    Attributes:
        position: int64 [B], the number of tokens that each stream has read; position % C of them are in the open chunk.
        summary: [B, s, e], the sum of k_lin v^T over all complete chunks, in float32 or better.
        keys: [B, M, C, s], the keys of the open chunk: of the quadratic and of the linear part.
        values: [B, C, e], its values. The slots after its tokens hold any numbers.
    """

    position: Tensor
    summary: Tensor
    keys: Tensor
    values: Tensor


def mixed_chunk_state(
    batch_size: int, chunk_size: int, d_qk: int, d_value: int, like: Tensor, *, maps: int = 2, linear: bool = True
) -> MixedChunkState:
    """The state before the first token, with keys and values in the dtype of `like`, on its device."""

    def zeros(*shape: int, dtype: torch.dtype = like.dtype) -> Tensor:
        return torch.zeros(batch_size, *shape, dtype=dtype, device=like.device)

    return MixedChunkState(
        zeros(dtype=torch.long),
        zeros(d_qk if linear else 0, d_value, dtype=acc_dtype(like)),
        zeros(maps, chunk_size, d_qk),
        zeros(chunk_size, d_value),
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
    """Continue causal sequences by N tokens; the outputs equal those of one causal `mixed_chunk_attention` over everything.

    Args:
        q_quad, k_quad, q_lin, k_lin, v: [B, N, s] and [B, N, e] of the new tokens.
        state: what came before, with the chunk size in its shapes; it is consumed.
        bias: [C, C].
        activation, normalization: as for `mixed_chunk_attention`.

    Returns:
        The new tokens' outputs [B, N, e] and the new state.

    Raises:
        ArgumentError: if shapes do not match, or the activation or normalization is unknown.
    """
    heads = Heads(q_quad, k_quad, q_lin, k_lin, v)
    options = MixedChunkOptions(state.values.shape[1], causal=True, activation=activation, normalization=normalization)
    check_heads(heads)
    check_continues(k_quad=(k_quad, state.keys[:, 0]), k_lin=(k_lin, state.keys[:, -1]), v=(v, state.values))
    check_bias(bias, options.chunk_size, "C")
    of_slots = None if bias is None else bias.__getitem__
    return extend(q_quad, q_lin, [k_quad, k_lin], v, of_slots, options, state, stream_batch(state.position, v.shape))


def extend(
    q_quad: Tensor,
    q_lin: Tensor | None,
    keys: list[Tensor],
    v: Tensor,
    bias: SlotBias | None,
    options: MixedChunkOptions,
    state: MixedChunkState,
    batch: Batch,
) -> tuple[Tensor, MixedChunkState]:
    """`mixed_chunk_attention_extend` inside a model.

    Args:
        q_quad, q_lin: [B, N, s]; q_lin is None without a linear part.
        keys: M tensors [B, N, s].
        v: [B, N, e].
        bias: that of the quadratic part, or None.
        options: causal ones.
        state: what came before; it is consumed.
        batch: the new tokens.

    Returns:
        [B, N, e] and the new state.
    """
    compute = matmul_dtype(q_quad, *keys, v)
    result, new = output_dtype(v, compute), v.shape[1]
    queries = [q for q in (q_quad, q_lin) if q is not None]
    with without_autocast(v):
        if new == 1 and batch.counts is None and in_place(*queries, *keys, v, state.summary, state.keys, state.values):
            out, state = _step(queries, keys, v, bias, options, state, compute)
            return out.to(result), state
        stacked = torch.stack(keys, 1)
        outputs = [v[:, :0].to(result)]
        start, counts = batch.start if batch.counts is None else None, batch.counts
        for piece, _ in _pieces(start or 0, new, options.chunk_size, whole=False):
            own = None if counts is None else (counts - piece.start).clamp(0, piece.stop - piece.start)
            slot = None if start is None else (start + piece.start) % options.chunk_size
            part = [q[:, piece].to(compute) for q in queries]
            out, state = _read(part, stacked[:, :, piece], v[:, piece], bias, options, state, slot, own, compute)
            outputs.append(out.to(result))
        return torch.cat(outputs, 1), state


def _pieces(position: int, length: int, chunk_size: int, whole: bool) -> Iterator[tuple[slice, bool]]:
    """Cut new tokens after `position` others where chunks end, and tell whether a piece consists of whole chunks.

    A piece is at most one chunk unless `whole` chunks are read at once.
    """
    start = 0
    while start < length:
        room = -(position + start) % chunk_size
        at_once = 0 if room or not whole else (length - start) // chunk_size * chunk_size
        stop = min(start + (at_once or room or chunk_size), length)
        yield slice(start, stop), at_once > 0
        start = stop


def _read(
    queries: list[Tensor],
    new_keys: Tensor,
    new_values: Tensor,
    bias: SlotBias | None,
    options: MixedChunkOptions,
    state: MixedChunkState,
    slot: int | None,
    counts: Tensor | None,
    compute: torch.dtype,
) -> tuple[Tensor, MixedChunkState]:
    """Read a piece of at most C tokens, [B, n, ...]: `counts` of each, from `slot` on if that is known and the same for all."""
    size, n, device = options.chunk_size, new_values.shape[1], new_values.device
    new_keys, new_values = new_keys.to(state.keys.dtype), new_values.to(state.values.dtype)
    after = state.position + (n if counts is None else counts)
    if slot is not None:  # the piece ends in the open chunk
        keys, values = (
            torch.cat([x[..., :slot, :], new], -2) for x, new in ((state.keys, new_keys), (state.values, new_values))
        )
        places = torch.arange(slot, slot + n, device=device)
        visible = torch.ones(n, slot + n, dtype=torch.bool, device=device).tril(slot)
        rows = None if bias is None else bias(places)[..., : slot + n]
    else:
        first = state.position % size
        places = first[:, None] + torch.arange(n, device=device)  # [B, n]
        keys = _window(state.keys, new_keys, places[:, None])
        values = _window(state.values, new_values, places)
        slots = torch.arange(2 * size, device=device)
        visible = (slots <= places[..., None]) & (slots >= (places - places % size)[..., None])
        rows = None if bias is None else torch.cat([bias(places % size)] * 2, -1)
    k, v = keys.to(compute), values.to(compute)
    weights = attention_weights(
        queries[0] @ k[:, 0].mT, d_qk=k.shape[-1], visible=visible, bias=rows,
        activation=options.activation, published_length=options.published_length,
    )  # fmt: skip
    out = weights.to(compute) @ v
    complete = (state.position - state.position % size)[:, None, None]
    if slot is not None:
        if len(queries) > 1:
            out = out + queries[1] @ (state.summary / options.linear_divisor(complete)).to(compute)
        if slot + n < size:
            kept = (torch.cat([x, old[..., slot + n :, :]], -2) for x, old in ((keys, state.keys), (values, state.values)))
            return out, MixedChunkState(after, state.summary, *kept)
        return out, MixedChunkState(after, _folded(state.summary, keys, values), keys, values)
    folded = _folded(state.summary, keys[..., :size, :], values[:, :size])
    if len(queries) > 1:
        before, then = (
            queries[1] @ (total / options.linear_divisor(tokens)).to(compute)
            for total, tokens in ((state.summary, complete), (folded, complete + size))
        )
        out = out + torch.where(places[..., None] < size, before, then)
    full = (after - (state.position - first) >= size)[:, None, None]
    kept_keys = torch.where(full[..., None], keys[..., size:, :], keys[..., :size, :])
    kept_values = torch.where(full, values[:, size:], values[:, :size])
    return out, MixedChunkState(after, torch.where(full, folded, state.summary), kept_keys, kept_values)


def _window(open_chunk: Tensor, new: Tensor, places: Tensor) -> Tensor:
    """Two chunks with an open one [B, ..., C, f] first, and new rows [B, ..., n, f] at `places`, [B, ..., n]."""
    window = torch.cat([open_chunk, torch.zeros_like(open_chunk)], -2)
    return window.scatter(-2, places[..., None].expand_as(new), new)


def _folded(summary: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The summary with a full chunk: [B, s, e], keys [B, M, C, s] and values [B, C, e] -> [B, s, e]."""
    if not summary.shape[1]:
        return summary
    return summary + keys[:, -1].to(summary.dtype).mT @ values.to(summary.dtype)


def _step(
    queries: list[Tensor],
    new_keys: list[Tensor],
    new_values: Tensor,
    bias: SlotBias | None,
    options: MixedChunkOptions,
    state: MixedChunkState,
    compute: torch.dtype,
) -> tuple[Tensor, MixedChunkState]:
    """Read one token of each stream, [B, 1, ...], in the memory of the state, whose shapes do not change.

    A step can so be recorded as a CUDA graph, or be a part of an exported program.
    """
    position, summary, keys, values = (writable(x) for x in (state.position, state.summary, state.keys, state.values))
    size, acc = options.chunk_size, summary.dtype
    slot = position % size
    place = slot[:, None, None]
    new = torch.stack(new_keys, 1).to(keys.dtype)
    keys.scatter_(2, place[:, None].expand_as(new), new)
    values.scatter_(1, place.expand_as(new_values), new_values.to(values.dtype))
    visible = torch.arange(size, device=slot.device) <= place
    products = torch.bmm(queries[0].to(compute), keys[:, 0].to(compute).mT).to(acc)
    weights = attention_weights(
        products, d_qk=keys.shape[-1], visible=visible, bias=None if bias is None else bias(slot)[:, None],
        activation=options.activation, published_length=options.published_length,
        share=visible_share(visible, options.published_length, products),
    )  # fmt: skip
    out = torch.bmm(weights.to(compute), values.to(compute))
    if len(queries) > 1:
        complete = (position - slot)[:, None, None]
        out = out + torch.bmm(queries[1].to(acc) / options.linear_divisor(complete), summary)
        _fold_full_chunks(summary, keys, values, slot == size - 1)
    position += 1
    return out, MixedChunkState(position, summary, keys, values)


def _fold_full_chunks(summary: Tensor, keys: Tensor, values: Tensor, full: Tensor) -> None:
    """Add the chunks of streams that are full, bool [B], to the summary, in place."""
    if full.device.type == "cpu" and not is_traced():
        if not full.any():
            return
        for row in full.nonzero()[:, 0].tolist():
            summary[row].addmm_(keys[row, -1].to(summary.dtype).mT, values[row].to(summary.dtype))
    else:  # no copy to the host: the same operations at each token
        added = keys[:, -1].to(summary.dtype).masked_fill(~full[:, None, None], 0.0)
        summary.baddbmm_(added.mT, values.to(summary.dtype))


def extend_projected(
    projected: Projected,
    bias: SlotBias | None,
    batch: Batch,
    options: MixedChunkOptions,
    state: MixedChunkState,
    backend: Backend = "auto",
) -> tuple[Tensor, MixedChunkState]:
    """Gated attention for N more tokens of streams: all of FLASH between its two projections.

    Args:
        projected: the new tokens, [B, N, 2 e + s], with gamma and beta.
        bias, options, state: as for `extend`.
        batch: the new tokens, with their rotations.
        backend: the form that reads whole chunks of streams at one position, if it can run and no gradient is needed: "triton",
            "tiled", or "auto", which takes the one for the device. Plain PyTorch reads everything else.

    Returns:
        The new tokens' outputs [B, N, e] and the new state.
    """
    new, start, size = projected.tokens.shape[1], batch.start, options.chunk_size

    def plainly(piece: slice, state: MixedChunkState) -> tuple[Tensor, MixedChunkState]:
        here, own = _part(projected, batch, piece)
        gate, heads = here.heads(own.rotations)
        attended, state = extend(heads.q_quad, heads.q_lin, [heads.k_quad, heads.k_lin], heads.v, bias, options, state, own)
        return gate * attended, state

    if start is None or batch.counts is not None or new < size or not projected.tokens.numel():
        return plainly(slice(0, new), state)
    table = None if bias is None else bias(torch.arange(size, device=projected.tokens.device))
    forms = [x for x in (triton, cpu) if x.can_extend(projected, table, options, state.summary, backend)]
    if not forms:
        return plainly(slice(0, new), state)
    outputs = []
    for piece, is_whole in _pieces(start, new, size, whole=True):
        if not is_whole:
            out, state = plainly(piece, state)
        else:
            here, own = _part(projected, batch, piece)
            chunks = replace(cut_chunks(here.tokens, size), rotations=own.rotations)
            out, summary = forms[0].extend_gated(here, table, chunks, options, state.summary, start + piece.start)
            state = replace(state, summary=summary, position=state.position + here.tokens.shape[1])
        outputs.append(out)
    return torch.cat(outputs, 1), state


def _part(projected: Projected, batch: Batch, piece: slice) -> tuple[Projected, Batch]:
    """Some of the new tokens of streams, and their batch."""
    if piece == slice(0, projected.tokens.shape[1]):
        return projected, batch
    rotations = None if batch.rotations is None else batch.rotations[..., piece, :]
    changes: dict[str, Any] = {"start": None if batch.start is None else batch.start + piece.start, "rotations": rotations}
    return projected._replace(tokens=projected.tokens[:, piece]), replace(
        batch, positions=batch.positions[..., piece], **changes
    )
