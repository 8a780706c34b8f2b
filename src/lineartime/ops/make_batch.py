"""How batches are described: of whole sequences, once, when they enter a layer or a model; and of the next tokens of streams.

Shapes: B batch or streams, T tokens of a row, N tokens of a pack or new ones of a stream, D documents.
"""

from dataclasses import replace
from itertools import groupby, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.errors import ArgumentError, LineartimeError
from lineartime.ops.batch import Batch, Needs, cut_rows
from lineartime.ops.checks import as_mask, check_documents, check_whole, is_readable, require, shortened
from lineartime.ops.context import ContextGroup
from lineartime.ops.modes import is_traced, under_transform
from lineartime.ops.positions import rotary_table

MIN_CHUNK_SIZE = 16
"""The minimum size of the chunks of short documents. Sizes are powers of two: few sizes need few kernels."""
MAX_GROUPS = 4
"""The maximum number of groups in a pack. Code is compiled for each number of groups."""
WASTE = 4
"""Two groups are merged if the padding adds at most 1 / WASTE to the cost of the pack."""
GROUP_COST = 2**18
"""The cost of the operations of one more group, in scores: about a millisecond on a CPU."""
SLOT_COST = 128
"""The cost of the other computations for each slot of a row, padding included, in scores."""


def make_batch(
    shape: tuple[int, ...],
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    *,
    device: torch.device,
    needs: Needs = Needs(),  # noqa: B008  # it is immutable
    context: ContextGroup | None = None,
    whole_chunks: bool = False,
) -> Batch:
    """Describe a batch, as far as a mixer needs it.

    It copies the lengths of documents, padding and prefixes to the host. Code that is compiled, which cannot do this, makes
    room for every possible division into documents.

    Args:
        shape: [B, T, ...], the shape of the tokens.
        mask: [B, T], bool or integers 0 and 1, True for real tokens.
        cu_seqlens: int [D + 1], the boundaries of D documents packed into a single row. On the CPU, they are read without
            waiting for a GPU.
        prefix_lengths: int [B], or [D] with `cu_seqlens`: the number of real tokens at the start of each row, or document, that
            are its prefix.
        device: the device of the tokens.
        needs: what the mixer needs.
        context: the processes over which every sequence is split.
        whole_chunks: whether a pack of short documents is cut into chunks of the full size, too, all in one part. Packs then
            have the same structure, so that compiled code which takes a batch suits them all.

    Raises:
        ArgumentError: if `mask`, `cu_seqlens` or `prefix_lengths` do not match the tokens, or are given with a `context`.
    """
    if torch.jit.is_tracing():
        raise LineartimeError("A layer cannot be recorded by torch.jit.trace, whose records have one length: use torch.export.")
    rows, length = shape[:2]
    mask = as_mask("mask", mask, rows, length, device)
    lengths = check_documents(shape, cu_seqlens)
    for name, value in (("mask", mask), ("cu_seqlens", cu_seqlens), ("prefix_lengths", prefix_lengths)):
        if context is not None and value is not None:
            raise ArgumentError(
                name,
                "is given, but sequences that are split over processes can have neither padding, document boundaries nor "
                f"prefixes: pass slices of whole sequences to every process, without {name}.",
            )
    if mask is None and cu_seqlens is None and prefix_lengths is None:
        batch = _equal_rows(rows, length, device, needs, context)
        return _rotated(batch, needs)
    if cu_seqlens is None and (is_traced() or under_transform()):
        return _rotated(_rows_in_front((rows, length), mask, prefix_lengths, device, needs), needs)
    if cu_seqlens is None:
        lengths, ends = [length] * rows, length * torch.arange(rows + 1, device=device)
    else:
        ends = to_device(cu_seqlens.long(), device)
    pack, lengths = _packed((rows, length), mask, ends, lengths)
    equal = cu_seqlens is None and lengths == [length] * rows
    batch = _equal_rows(rows, length, device, needs, context) if equal else pack
    if prefix_lengths is not None:
        assert pack.document is not None
        assert pack.starts is not None
        in_prefix = prefix_tokens(
            prefix_lengths, pack.positions, pack.document, pack.starts, pack.is_real, of_rows=cu_seqlens is None
        )
        in_prefix = in_prefix.view(rows, length) if equal else in_prefix
        inner, own = _packed((in_prefix.shape[0], in_prefix.shape[1]), in_prefix, pack.starts, lengths)
        batch = replace(batch, in_prefix=in_prefix, prefix=_arranged(inner, own, length, needs))
    if not equal:
        batch = _in_parts(batch, lengths, needs) if not whole_chunks or needs.chunk_size is None else batch
        batch = batch if batch.parts else _arranged(batch, lengths, length, needs, whole_chunks)
    return _rotated(batch, needs)


def _equal_rows(rows: int, length: int, device: torch.device, needs: Needs, context: ContextGroup | None) -> Batch:
    positions = torch.arange(length, device=device)
    if context is not None:
        positions = positions + context.rank * length
    batch = Batch((rows, length), positions, context=context)
    if needs.chunk_size is None:
        return batch
    size = needs.chunk_size if context is not None or is_traced() else _size_for(needs.chunk_size, length)
    return cut_rows(batch, size, None)


def _rows_in_front(
    shape: tuple[int, int], mask: Tensor | None, prefix_lengths: Tensor | None, device: torch.device, needs: Needs
) -> Batch:
    """The rows [B, T] of code that is traced, which cannot leave out padding: it comes last in each row."""
    rows, length = shape

    def arranged(batch: Batch) -> Batch:
        return batch if needs.chunk_size is None else cut_rows(batch, needs.chunk_size, batch.is_real)

    batch = Batch(shape, torch.arange(length, device=device))
    if mask is not None:
        batch = _in_front(batch, mask)
    if prefix_lengths is None:
        return arranged(batch)
    counts = torch.full((rows,), length, device=device) if batch.counts is None else batch.counts
    row = torch.arange(rows, device=device).repeat_interleave(length, output_size=rows * length)
    in_prefix = prefix_tokens(
        prefix_lengths, batch.positions.repeat(rows), row, F.pad(counts.cumsum(0), (1, 0)), None, of_rows=True
    ).view(rows, length)
    prefix = arranged(_in_front(Batch(shape, batch.positions), in_prefix))
    return replace(arranged(batch), in_prefix=in_prefix, prefix=prefix)


def _in_front(batch: Batch, mask: Tensor) -> Batch:
    """Move the real tokens of each row, bool [B, T], to its front."""
    (rows, length), device = mask.shape, mask.device
    counts = mask.sum(1)
    place = torch.where(mask, mask.cumsum(1) - 1, counts[:, None] + (~mask).cumsum(1) - 1)
    first = length * torch.arange(rows, device=device)[:, None]
    every = torch.arange(rows * length, device=device)
    order = torch.zeros_like(every).scatter(0, (place + first).flatten(), every)
    return replace(batch, order=order, is_real=torch.arange(length, device=device) < counts[:, None], counts=counts)


def _size_for(chunk_size: int, longest: int) -> int:
    """A chunk size no larger than the longest document needs, rounded up to a power of two."""
    return min(chunk_size, max(MIN_CHUNK_SIZE, 1 << (max(1, longest) - 1).bit_length()))


def _packed(
    shape: tuple[int, int], mask: Tensor | None, ends: Tensor, lengths: list[int] | None
) -> tuple[Batch, list[int] | None]:
    """The pack of the real tokens [B, T] of documents with the boundaries `ends`, int64 [D + 1] in B T, and their lengths."""
    total, device = shape[0] * shape[1], ends.device
    if mask is None:
        order = is_real = None
        starts, count = ends, total
    else:
        real = mask.flatten()
        before = F.pad(real.cumsum(0), (1, 0))
        starts = before[ends]
        if is_traced() or under_transform():  # padding comes last
            place = torch.where(real, before[:-1], before[-1] + (~real).cumsum(0) - 1)
            everything = torch.arange(total, device=device)
            order, count, lengths = torch.zeros_like(everything).scatter(0, place, everything), total, None
            is_real = (everything < before[-1])[None]
        else:
            lengths = starts.diff().tolist()
            count, is_real = sum(lengths), None
            order = None if count == total else real.nonzero()[:, 0]
    tokens = torch.arange(count, device=device)
    document = _count_ends(starts[1:], count)
    if is_real is not None:
        document = document.clamp(max=max(0, starts.shape[0] - 2))
    if order is None and shape[0] > 1:
        order = tokens
    positions = tokens - starts[document] if starts.shape[0] > 1 else tokens
    if is_real is not None:
        positions = positions.masked_fill(~is_real[0], 0)
    return Batch(shape, positions, order, is_real, document=document, starts=starts), lengths


def _count_ends(ends: Tensor, count: int) -> Tensor:
    """For each of `count` places, how many of the `ends`, int64 [D] up to `count`, are there or before it, int64 [count]."""
    marks = torch.zeros(count + 1, dtype=torch.long, device=ends.device)  # torch.bucketize warns under vmap
    return marks.index_add(0, ends.clamp(0, count), torch.ones_like(ends)).cumsum(0)[:-1]


def _in_parts(batch: Batch, lengths: list[int] | None, needs: Needs) -> Batch:
    """Split a pack whose documents differ much in length into packs of documents of similar length."""
    if lengths is None or batch.is_real is not None or torch.compiler.is_compiling():
        return batch
    groups = similar_documents(lengths)
    if len(groups) < 2:
        return batch
    device, every_length = batch.positions.device, torch.tensor(lengths, device="cpu")
    group_of = torch.full_like(every_length, len(groups))  # the group of documents without tokens
    for index, group in enumerate(groups):
        group_of[group] = index
    tokens = to_device(group_of.repeat_interleave(every_length).argsort(stable=True), device)
    parts, first = [], 0
    for group in groups:
        own = every_length[group]
        here = tokens[first : first + int(own.sum())]
        first += len(here)
        part = Batch(
            (1, len(batch.positions)),
            batch.positions[here],
            here,
            document=to_device(torch.arange(len(group), device="cpu").repeat_interleave(own), device),
            starts=to_device(F.pad(own.cumsum(0), (1, 0)), device),
        )
        if batch.in_prefix is not None:
            marks = batch.in_prefix[:, here]
            assert part.starts is not None
            inner, of_prefixes = _packed((1, len(here)), marks, part.starts, own.tolist())
            part = replace(part, in_prefix=marks, prefix=_arranged(inner, of_prefixes, 0, needs))
        parts.append(_arranged(part, own.tolist(), 0, needs))
    return replace(batch, parts=tuple(parts), prefix=None)


def _arranged(batch: Batch, lengths: list[int] | None, most: int, needs: Needs, whole_chunks: bool = False) -> Batch:
    """Arrange the documents of a pack, of at most `most` tokens if their `lengths` are not known, in chunks or in rows."""
    assert batch.document is not None
    assert batch.starts is not None
    device, total, documents = batch.positions.device, batch.positions.shape[-1], batch.starts.shape[0] - 1
    counts = batch.starts.diff()
    if needs.chunk_size is None:
        size = _longest_row(batch, lengths, most, needs.max_length)
        n_chunks, longest = documents, 1
        chunk_starts = torch.arange(documents + 1, device=device)
    else:
        size = needs.chunk_size
        if lengths is None:  # at most, every document ends with a chunk that is not full
            n_chunks = longest = total // size + documents
        else:
            size = size if whole_chunks else _size_for(size, max(lengths, default=0))
            per_document = [-(-tokens // size) for tokens in lengths]
            n_chunks, longest = sum(per_document), max(per_document, default=0)
        chunk_starts = F.pad(((counts + size - 1) // size).cumsum(0), (1, 0))
    batch = replace(batch, chunk_size=size, n_chunks=n_chunks, max_chunks=longest, chunk_starts=chunk_starts)
    if lengths is None or whole_chunks or documents != 1:
        ended = _count_ends(chunk_starts[1:], n_chunks)
        batch = replace(
            batch, chunk_document=ended.clamp(max=max(0, documents - 1))
        )  # unused chunks belong to the last document
    slots = n_chunks * size
    if lengths is not None and slots == total and not whole_chunks:
        return batch
    slot = batch.positions if documents == 0 else chunk_starts[batch.document] * size + batch.positions
    if batch.is_real is not None:
        slot = slot.masked_fill(~batch.is_real[0], slots)
    real = torch.zeros(slots + 1, dtype=torch.bool, device=device).index_fill(0, slot, True)
    return replace(batch, slot=slot, real=real[:-1].view(1, n_chunks, size))


def _longest_row(batch: Batch, lengths: list[int] | None, most: int, limit: int | None) -> int:
    """The number of tokens of the longest document; in code that is traced, an upper bound of it."""
    if lengths is not None:
        return max(lengths, default=0)
    if limit is None or most <= limit:
        return most
    require(batch.positions < limit, "max_length", f"is {limit}, but a sequence has more tokens.")
    return limit


def _rotated(batch: Batch, needs: Needs) -> Batch:
    if needs.rotary_width is None:
        return batch
    return rotated_by(batch, rotary_table(batch.positions, needs.rotary_width // 2, needs.dtype))


def rotated_by(batch: Batch, table: Tensor) -> Batch:
    """Add the rotations of the batch's tokens, [2, ..., f]."""

    def of(inner: Batch, table: Tensor) -> Batch:
        flat = table.flatten(1, -2)  # of equal rows, it holds the positions of one, or of all

        def select(other: Batch) -> Batch:
            if other.counts is not None:  # rows whose real tokens come first have the positions of equal rows
                return of(other, table)
            return of(other, flat if other.order is None else flat.index_select(1, other.order % flat.shape[1]))

        prefix = None if inner.prefix is None else select(inner.prefix)
        return replace(inner, rotations=table, prefix=prefix, parts=tuple(map(select, inner.parts)))

    return of(batch, table)


def stream_batch(position: Tensor, shape: tuple[int, ...], mask: Tensor | None = None, *, needs: Needs = Needs()) -> Batch:  # noqa: B008
    """Describe N more tokens [B, N, ...] of streams that have read `position` tokens, int64 [B].

    `mask`, bool [B, N], is True for real tokens, which `pack` moves to the front of their row.
    """
    (streams, new), device = shape[:2], position.device
    start = _start(position, new)
    tokens = torch.arange(new, device=device)
    positions = position[:, None] + tokens if start is None else start + tokens
    batch = Batch((streams, new), positions, start=start)
    if mask is not None:
        batch = _in_front(batch, mask)
    if needs.rotary_width is None:
        return batch
    return replace(batch, rotations=rotary_table(positions, needs.rotary_width // 2, needs.dtype))


def _start(position: Tensor, new: int) -> int | None:
    """The position at which all streams are, if the host knows; on the meta device, without values, the beginning."""
    if is_traced() or under_transform() or not position.numel():
        return None if position.numel() else 0
    if position.is_meta:
        return 0
    if new == 1 and position.device.type != "cpu":  # copying it to the host would wait for all that a GPU computes
        return None
    first, *others = position.tolist()
    return int(first) if all(other == first for other in others) else None


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device. Copies to a GPU use pinned memory, so that the host does not wait."""
    if device.type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def similar_documents(lengths: list[int]) -> list[list[int]]:
    """Group the documents of a pack, of these lengths, to compute together, shortest first; leave out those without tokens.

    A mixer computes documents as rows that are as long as the longest, or as chunks. One long document among thousands of short
    ones would make thousands of long rows, nearly all padding.
    """
    by_length = sorted((document for document, tokens in enumerate(lengths) if tokens), key=lengths.__getitem__)
    groups = [list(group) for _, group in groupby(by_length, lambda document: (lengths[document] - 1).bit_length())]

    def cost(group: list[int]) -> int:
        """In scores of an attention in which every slot of a row attends to every slot; rows are as long as the last."""
        longest = lengths[group[-1]]
        return len(group) * longest * (longest + SLOT_COST)

    least = sum(map(cost, groups))
    while len(groups) > 1:
        padding = [cost(one + other) - cost(one) - cost(other) for one, other in pairwise(groups)]
        added = min(padding)
        if len(groups) <= MAX_GROUPS and added > max(GROUP_COST, least // WASTE):
            break
        at = padding.index(added)
        groups[at : at + 2] = [groups[at] + groups[at + 1]]
    return [sorted(group) for group in groups]


def check_prefix(prefix_lengths: Tensor | None, causal: bool) -> None:
    """Raise ArgumentError if prefixes are given for an attention that is not causal."""
    if prefix_lengths is not None and not causal:
        raise ArgumentError("prefix_lengths", "is given, but only causal attention has prefixes: use causal=True.")


def prefix_tokens(
    prefix_lengths: Tensor, positions: Tensor, document: Tensor, starts: Tensor, is_real: Tensor | None, of_rows: bool
) -> Tensor:
    """Which tokens of a pack are in a prefix, bool [1, N].

    Args:
        prefix_lengths: int [D].
        positions, document: int64 [N], the position of each token in its document, and the document.
        starts: int64 [D + 1], the boundaries of the documents.
        is_real: bool [1, N], or None if all tokens are real.
        of_rows: whether a document is a row of a batch, for messages.

    Raises:
        ArgumentError: if the lengths do not match the documents.
    """
    n_documents, size, where = starts.shape[0] - 1, "[B]" if of_rows else "[D]", "row" if of_rows else "document"
    check_whole("prefix_lengths", prefix_lengths)
    if prefix_lengths.shape != (n_documents,):
        raise ArgumentError("prefix_lengths", f"has shape {list(prefix_lengths.shape)}, but must be {size} = [{n_documents}].")
    if prefix_lengths.is_meta and not positions.is_meta:
        raise ArgumentError("prefix_lengths", f"is on the meta device, but must be on {positions.device}, like the tokens.")
    lengths = prefix_lengths.to(positions.device, torch.long)
    given = f"is {shortened(lengths.tolist())}, but " if is_readable(lengths) else ""
    predicate = f"{given}must be from 0 to the number of real tokens of each {where}."
    require((lengths >= 0) & (lengths <= starts.diff()), "prefix_lengths", predicate)
    marked = (positions < lengths[document])[None]
    return marked if is_real is None else marked & is_real
