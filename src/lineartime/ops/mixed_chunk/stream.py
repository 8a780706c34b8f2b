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

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lineartime.ops.activations import Activation, Normalization, attention_weights
from lineartime.ops.backends import Backend
from lineartime.ops.batch import Batch, cut_rows, fill, open_chunk_pieces
from lineartime.ops.checks import check_bias, check_continues
from lineartime.ops.make_batch import stream_batch
from lineartime.ops.mixed_chunk import cpu, memories
from lineartime.ops.mixed_chunk.inputs import Heads, MixedChunkOptions, Projected, check_heads
from lineartime.ops.modes import acc_dtype, is_traced, matmul_dtype, output_dtype, without_autocast
from lineartime.ops.quadratic.blocked import attend_visible
from lineartime.ops.state import State, in_place, writable


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


@dataclass(eq=False)
class MemoryState(MixedChunkState):
    """The state of the memory mesa; `summary` is its S.

    Attributes:
        last: [B, s], the Y of the last token, of which the next key tells.
        gram: [B, s, s], its P.
    """

    last: Tensor
    gram: Tensor


def mixed_chunk_state(
    batch_size: int,
    chunk_size: int,
    d_qk: int,
    d_value: int,
    like: Tensor,
    *,
    maps: int = 2,
    linear: bool = True,
    memory: memories.Memory = "sum",
) -> MixedChunkState:
    """The state before the first token, with keys and values in the dtype of `like`, on its device."""

    def zeros(*shape: int, dtype: torch.dtype = like.dtype) -> Tensor:
        return torch.zeros(batch_size, *shape, dtype=dtype, device=like.device)

    parts = (
        zeros(dtype=torch.long),
        zeros(d_qk if linear else 0, d_value, dtype=acc_dtype(like)),
        zeros(maps, chunk_size, d_qk),
        zeros(chunk_size, d_value),
    )
    if memory == "sum":
        return MixedChunkState(*parts)
    return MemoryState(*parts, zeros(d_qk), zeros(d_qk, d_qk, dtype=acc_dtype(like)))


SlotBias = Callable[[Tensor], Tensor]
"""The bias of queries in some slots of a chunk, int64 [...], for the keys of all its slots: [..., C]."""


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
    """`mixed_chunk_attention_extend` inside a model: [B, N, s], M keys [B, N, s], [B, N, e] -> [B, N, e] and the new state.

    `q_lin` is None without a linear part. The options are causal ones, and the batch describes the new tokens.
    """
    compute = matmul_dtype(q_quad, *keys, v)
    dtype, new = output_dtype(v, compute), v.shape[1]
    given = [x for x in (q_quad, q_lin, *keys, v, state.summary, state.keys, state.values) if x is not None]
    with without_autocast(v):
        if new == 1 and batch.counts is None and in_place(*given):
            out, state = _step(q_quad, q_lin, keys, v, bias, options, state, compute)
            return out.to(dtype), state
        new_keys, outputs = torch.stack(keys, 1), [v[:, :0].to(dtype)]
        start, counts = batch.start if batch.counts is None else None, batch.counts
        for piece, first, last in open_chunk_pieces(start or 0, new, options.chunk_size):
            q, of_summary = q_quad[:, piece].to(compute), None if q_lin is None else q_lin[:, piece].to(compute)
            own = None if counts is None else (counts - piece.start).clamp(0, last - first)
            slot = None if start is None else first
            out, state = _read(q, of_summary, new_keys[:, :, piece], v[:, piece], bias, options, state, slot, own)
            outputs.append(out.to(dtype))
        return torch.cat(outputs, 1), state


def _read(
    q_quad: Tensor,
    q_lin: Tensor | None,
    new_keys: Tensor,
    new_values: Tensor,
    bias: SlotBias | None,
    options: MixedChunkOptions,
    state: MixedChunkState,
    slot: int | None,
    counts: Tensor | None,
) -> tuple[Tensor, MixedChunkState]:
    """Read a piece of at most C tokens, [B, n, ...], or the first `counts` of them in each stream.

    If all streams stand at a known slot, the piece ends in the open chunk, which is the window. Otherwise, it may end in the
    next chunk, and the window has both.
    """
    size, n, position, compute = options.chunk_size, new_values.shape[1], state.position, q_quad.dtype
    places = torch.arange(n, device=position.device)  # in the window
    if slot is not None:
        places = slot + places
        keys, values = fill(state.keys, slot, new_keys), fill(state.values, slot, new_values)
    else:
        places = (position % size)[:, None] + places
        keys, values = _window(state.keys, new_keys, places[:, None]), _window(state.values, new_values, places)
    slots = torch.arange(values.shape[1], device=position.device)
    visible = (slots <= places[..., None]) & (slots >= (places - places % size)[..., None])
    rows = None if bias is None else bias(places % size)
    if rows is not None and slot is None:
        rows = torch.cat([rows, rows], -1)
    out = attend_visible(
        q_quad, keys[:, 0].to(compute), values.to(compute), visible=visible, bias=rows,
        activation=options.activation, published_length=options.published_length,
    )  # fmt: skip

    after, sums = position + (n if counts is None else counts), _sums(state)
    complete = (position - position % size)[:, None, None]
    if q_lin is not None:
        read = _read_summary(q_lin, sums[0], complete, options)
        if slot is None or slot + n == size:
            sums = _fold(sums, keys[:, :, :size], values[:, :size], complete, options)
        if slot is None:
            read = torch.where(places[..., None] < size, read, _read_summary(q_lin, sums[0], complete + size, options))
        out = out + read
    if slot is None:
        full = after[:, None, None] >= complete + size
        sums = [torch.where(full, new, old) for new, old in zip(sums, _sums(state), strict=True)]
        keys = torch.where(full[..., None], keys[:, :, size:], keys[:, :, :size])
        values = torch.where(full, values[:, size:], values[:, :size])
    return out, _with_sums(replace(state, position=after, keys=keys, values=values), sums)


def _sums(state: MixedChunkState) -> list[Tensor]:
    """What the complete chunks left: the summary and, of mesa, P."""
    return [state.summary, state.gram] if isinstance(state, MemoryState) else [state.summary]


def _with_sums(state: MixedChunkState, sums: list[Tensor]) -> MixedChunkState:
    return replace(state, **dict(zip(("summary", "gram"), sums, strict=False)))


def _fold(sums: list[Tensor], keys: Tensor, values: Tensor, n: Tensor, options: MixedChunkOptions) -> list[Tensor]:
    """The sums with a full chunk after n tokens: keys [..., M, C, s], the quadratic part's first, and values [..., C, e]."""
    of_linear = keys[..., min(1, keys.shape[-3] - 1) :, :, :]
    k, v = of_linear.transpose(-3, -2).flatten(-2).to(sums[0].dtype), values.to(sums[0].dtype)
    if options.memory == "sum":
        return [sums[0] + k.mT @ v]
    summary, p = sums
    return list(memories.fold(summary, p, n.to(v.dtype), k, v))


def _read_summary(q_lin: Tensor, summary: Tensor, n_tokens: Tensor, options: MixedChunkOptions) -> Tensor:
    """The linear part: [B, n, s], the sum over n_tokens tokens [B, s, e] -> [B, n, e]."""
    return q_lin @ (summary / options.linear_divisor(n_tokens)).to(q_lin.dtype)


def _window(open_chunk: Tensor, new: Tensor, places: Tensor) -> Tensor:
    """Two chunks with an open one [B, ..., C, f] first, and new rows [B, ..., n, f] at `places`, [B, ..., n]."""
    window = torch.cat([open_chunk, torch.zeros_like(open_chunk)], -2)
    return window.scatter(-2, places[..., None].expand_as(new), new.to(window.dtype))


def _step(
    q_quad: Tensor,
    q_lin: Tensor | None,
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
    position, keys, values, *sums = (writable(x) for x in (state.position, state.keys, state.values, *_sums(state)))
    size = options.chunk_size
    slot = position % size
    place = slot[:, None, None]
    new = torch.stack(new_keys, 1).to(keys.dtype)
    keys.scatter_(2, place[:, None].expand_as(new), new)
    values.scatter_(1, place.expand_as(new_values), new_values.to(values.dtype))
    visible = torch.arange(size, device=slot.device) <= place
    products = torch.bmm(q_quad.to(compute), keys[:, 0].to(compute).mT)
    weights = attention_weights(
        products, d_qk=keys.shape[-1], visible=visible, bias=None if bias is None else bias(slot)[:, None],
        activation=options.activation, published_length=options.published_length,
    )  # fmt: skip
    out = torch.bmm(weights.to(compute), values.to(compute))
    if q_lin is not None:
        complete = (position - slot)[:, None, None]
        out = out + torch.bmm(q_lin.to(sums[0].dtype) / options.linear_divisor(complete), sums[0])
        fold_full_chunks(sums, keys, values, complete, slot == size - 1, options)
    position += 1
    return out, _with_sums(replace(state, position=position, keys=keys, values=values), sums)


def fold_full_chunks(
    sums: list[Tensor], keys: Tensor, values: Tensor, n: Tensor, full: Tensor, options: MixedChunkOptions
) -> None:
    """Fold the open chunks of streams that are full, bool [B], into the sums after n tokens, [B, 1, 1], in place."""
    if full.device.type == "cpu" and not is_traced():
        for row in full.nonzero()[:, 0].tolist() if full.any() else ():
            for own, new in zip(sums, _fold([x[row] for x in sums], keys[row], values[row], n[row], options), strict=True):
                own[row] = new
    elif options.memory == "sum":  # no copy to the host: the same operations at each token
        added = keys[:, -1].to(sums[0].dtype).masked_fill(~full[:, None, None], 0.0)
        sums[0].baddbmm_(added.mT, values.to(sums[0].dtype))
    else:
        for own, new in zip(sums, _fold(sums, keys, values, n, options), strict=True):
            own.copy_(torch.where(full[:, None, None], new, own))


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
        backend: the form that reads whole chunks of streams at one position: "tiled" and "auto" take tiles, if they can run
            and no gradient is needed. Plain PyTorch reads everything else.

    Returns:
        The new tokens' outputs [B, N, e] and the new state.
    """

    def plainly(projected: Projected, batch: Batch, state: MixedChunkState) -> tuple[Tensor, MixedChunkState]:
        gate, (q_quad, k_quad, q_lin, k_lin, v) = projected.heads(batch.rotations)
        keys = [k_quad, *k_lin.split(projected.d_qk, -1)]
        attended, state = extend(q_quad, q_lin, keys, v, bias, options, state, batch)
        return gate * attended, state

    (streams, new, _), start, size = projected.tokens.shape, batch.start, options.chunk_size
    if start is None or batch.counts is not None or not projected.tokens.numel():
        return plainly(projected, batch, state)
    first, last = -start % size, new - (start + new) % size  # where whole chunks begin and end
    if first >= last:
        return plainly(projected, batch, state)
    table = None if bias is None else bias(torch.arange(size, device=projected.tokens.device))
    if not cpu.can_extend(projected, table, options, state.summary, backend):
        return plainly(projected, batch, state)

    def piece(first: int, last: int) -> tuple[Projected, Batch]:
        rotations = None if batch.rotations is None else batch.rotations[..., first:last, :]
        own = Batch((streams, last - first), batch.positions[..., first:last], rotations=rotations, start=start + first)
        part = projected._replace(tokens=projected.tokens[:, first:last])
        if part.linear is not None:
            q, k = part.linear
            part = part._replace(linear=(q[:, first:last], k[:, first:last]))
        return part, own

    before, state = plainly(*piece(0, first), state)
    here, own = piece(first, last)
    chunks = cut_rows(own, size, None)
    summary, n = state.summary, start + first
    if isinstance(state, MemoryState) and here.linear is not None:
        (q, k), p = here.linear, state.gram
        here = here._replace(linear=(memories.solved_queries(q, k, chunks, causal=True, before=p, n_before=n), k))
        with without_autocast(k):
            summary, wide = memories.unsolved(summary, p, n), k.to(p.dtype)
            state = replace(state, gram=p + wide.mT @ wide)
    whole, summary = cpu.extend_gated(here, table, chunks, options, summary, n)
    if isinstance(state, MemoryState):
        with without_autocast(summary):
            summary = memories.inverse(state.gram, start + last) @ summary
    state = replace(state, summary=summary, position=state.position + (last - first))
    after, state = plainly(*piece(last, new), state)
    return torch.cat([before, whole, after], 1), state
