"""Sums over the chunks of a batch, and the open chunk of a stream, shared by all chunked attentions.

Shapes: B batch, T tokens, D documents, G chunks of all documents, C chunk size, N new tokens, f features.
"""

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.batch import Batch
from lineartime.ops.tracing import is_exporting

Reach = Literal["before", "others", "all"]
"""The chunks of its document that a chunk attends to: those strictly before it, all but itself, or all of them."""


def places(chunks: Batch) -> Tensor:
    """The place of every chunk in its document, int64 [G], starting at 0."""
    place = torch.arange(chunks.n_chunks, device=chunks.positions.device)
    return place if chunks.chunk_document is None else place - chunks.chunk_starts[chunks.chunk_document]


def sum_chunks(x: Tensor, chunks: Batch, reach: Reach) -> Tensor:
    """For each chunk, sum over the chunks in its reach: [B, G, ...] -> [B, G, ...], or [B, 1, ...] if all sums are equal."""
    if reach == "before":
        return exclusive_cumsum(x) if chunks.chunk_document is None else _sum_before(x, chunks)
    if chunks.chunk_document is None:
        total = x.sum(1, keepdim=True)
    else:
        n_documents = len(chunks.chunk_starts) - 1
        totals = x.new_zeros(x.shape[0], n_documents, *x.shape[2:]).index_add(1, chunks.chunk_document, x)
        total = totals[:, chunks.chunk_document]
    return total - x if reach == "others" else total


def count_before(counts: Tensor, chunks: Batch) -> Tensor:
    """For each chunk, sum integers over the chunks before it in its document, exactly: int64 [B, G]."""
    before = exclusive_cumsum(counts.long())
    return before if chunks.chunk_document is None else before - before[:, chunks.chunk_starts[chunks.chunk_document]]


def _sum_before(x: Tensor, chunks: Batch) -> Tensor:
    """For each chunk, sum over the chunks strictly before it in the same document: [B, G, ...] -> [B, G, ...].

    This is a scan in log2 steps (Hillis and Steele). A difference of prefix sums over all documents would lose digits, and an
    infinity in one document would spread to all later ones.
    """
    if is_exporting():  # a program cannot count steps; an infinity reaches other documents there
        assert chunks.chunk_document is not None
        before: Tensor = chunks.chunk_document[:, None].eq(chunks.chunk_document).tril(-1).to(x.dtype)
        return (before @ x.flatten(2)).view_as(x)
    total, reach = shift_chunks(x, chunks, 1), 1
    while reach < chunks.max_chunks:
        total = total + shift_chunks(total, chunks, reach)
        reach *= 2
    return total


def shift_chunks(x: Tensor, chunks: Batch, by: int) -> Tensor:
    """Shift chunks by `by` places inside their documents, filling with zeros: [B, G, ...] -> [B, G, ...]."""
    size = x.shape[1]
    along = [0, 0] * (x.dim() - 2)
    shifted = F.pad(x, [*along, by, 0])[:, :size] if by > 0 else F.pad(x, [*along, 0, -by])[:, -by:]
    if chunks.chunk_document is None:
        return shifted
    there = torch.arange(size, device=x.device) - by
    same = chunks.chunk_document == chunks.chunk_document[there.clamp(0, size - 1)]
    same = (same & (there >= 0) & (there < size)).view(-1, *[1] * (x.dim() - 2))
    return torch.where(same, shifted, torch.zeros_like(shifted))


def split_documents(x: Tensor, chunks: Batch) -> Tensor:
    """Make each document a row of its chunks, with zeros after those of shorter ones: [B, G, ...] -> [B, D, longest, ...]."""
    if chunks.chunk_document is None:
        return x[:, None]
    n_documents = len(chunks.chunk_starts) - 1
    split = x.new_zeros(x.shape[0], n_documents * chunks.max_chunks, *x.shape[2:])
    split = split.index_copy(1, chunks.chunk_document * chunks.max_chunks + places(chunks), x)
    return split.view(x.shape[0], n_documents, chunks.max_chunks, *x.shape[2:])


def join_documents(x: Tensor, chunks: Batch) -> Tensor:
    """The inverse of `split_documents`: [B, D, longest, ...] -> [B, G, ...]."""
    x = x.flatten(1, 2)
    return x if chunks.chunk_document is None else x[:, chunks.chunk_document * chunks.max_chunks + places(chunks)]


def exclusive_cumsum(x: Tensor, dim: int = 1) -> Tensor:
    """The cumulative sum along `dim` that excludes the current element."""
    shape = list(x.shape)
    shape[dim] = 1
    # Sizes of n - 1 would be compiled once for n = 2, and again for other n.
    return torch.cat([x.new_zeros(shape), x], dim).narrow(dim, 0, x.shape[dim]).cumsum(dim)


def open_chunk_pieces(position: int, new: int, chunk_size: int) -> Iterator[tuple[slice, int, int]]:
    """Cut N new tokens where a chunk fills up: yield the tokens, and where they begin and end in the open chunk."""
    start = 0
    while start < new:
        first = (position + start) % chunk_size
        last = min(chunk_size, first + new - start)
        yield slice(start, start + last - first), first, last
        start += last - first


def fill(rows: Tensor, first: int, x: Tensor) -> Tensor:
    """A copy of an open chunk's rows [..., C, f] with x [..., n, f] written at `first`."""
    return torch.cat([rows[..., :first, :], x.to(rows.dtype), rows[..., first + x.shape[-2] :, :]], -2)
