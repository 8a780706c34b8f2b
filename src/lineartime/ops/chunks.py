"""Sums over the chunks of documents, and the open chunk of a stream: what all chunked attentions share.

Shapes: B batch, G chunks of all documents, C chunk size, N new tokens of a stream, f features.
"""

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.layout import Chunks

Reach = Literal["before", "others", "all"]
"""The chunks that a chunk reads of its document: those strictly before it, all but itself, or all of them."""


def sum_chunks(x: Tensor, chunks: Chunks, reach: Reach) -> Tensor:
    """For each chunk, the sum over the chunks it reads: [B, G, ...] -> the same, or [B, 1, ...] where all are equal."""
    if reach == "before":
        return exclusive_cumsum(x) if chunks.document is None else _sum_before(x, chunks)
    if chunks.document is None:
        total = x.sum(1, keepdim=True)
    else:
        n_documents = len(chunks.document_starts) - 1
        totals = x.new_zeros(x.shape[0], n_documents, *x.shape[2:]).index_add(1, chunks.document, x)
        total = totals[:, chunks.document]
    return total - x if reach == "others" else total


def _sum_before(x: Tensor, chunks: Chunks) -> Tensor:
    """The sum over the chunks of the same document that stand strictly before: [B, G, ...] -> the same.

    A scan in log2 steps (Hillis and Steele): a difference of prefix sums over all documents would lose digits, and would carry
    an infinity of one document into all later ones.
    """
    total, reach = shift_chunks(x, chunks, 1), 1
    while reach < chunks.longest:
        total = total + shift_chunks(total, chunks, reach)
        reach *= 2
    return total


def shift_chunks(x: Tensor, chunks: Chunks, by: int) -> Tensor:
    """Put into every chunk what stands `by` chunks before it in its document, and zeros where nothing does: [B, G, ...]."""
    size = x.shape[1]
    along = [0, 0] * (x.dim() - 2)
    shifted = F.pad(x, [*along, by, 0])[:, :size] if by > 0 else F.pad(x, [*along, 0, -by])[:, -by:]
    if chunks.document is None:
        return shifted
    there = torch.arange(size, device=x.device) - by
    same = chunks.document == chunks.document[there.clamp(0, size - 1)]
    same = (same & (there >= 0) & (there < size)).view(-1, *[1] * (x.dim() - 2))
    return torch.where(same, shifted, torch.zeros_like(shifted))


def split_documents(x: Tensor, chunks: Chunks) -> Tensor:
    """Each document as a row of its chunks, zeros behind those of shorter ones: [B, G, ...] -> [B, D, longest, ...]."""
    if chunks.document is None:
        return x[:, None]
    n_documents = len(chunks.document_starts) - 1
    split = x.new_zeros(x.shape[0], n_documents * chunks.longest, *x.shape[2:])
    split = split.index_copy(1, chunks.document * chunks.longest + chunks.places(), x)
    return split.view(x.shape[0], n_documents, chunks.longest, *x.shape[2:])


def join_documents(x: Tensor, chunks: Chunks) -> Tensor:
    """The inverse of `split_documents`: [B, D, longest, ...] -> [B, G, ...]."""
    x = x.flatten(1, 2)
    return x if chunks.document is None else x[:, chunks.document * chunks.longest + chunks.places()]


def exclusive_cumsum(x: Tensor, dim: int = 1) -> Tensor:
    """The sum of what stands strictly before, along `dim`."""
    before = x.narrow(dim, 0, max(0, x.shape[dim] - 1)).cumsum(dim)
    return torch.cat([torch.zeros_like(x.narrow(dim, 0, min(1, x.shape[dim]))), before], dim)


def open_chunk_pieces(position: int, new: int, chunk_size: int) -> Iterator[tuple[slice, int, int]]:
    """Cut N new tokens where a chunk fills up: which of them, and where in the open chunk they begin and end."""
    start = 0
    while start < new:
        first = (position + start) % chunk_size
        last = min(chunk_size, first + new - start)
        yield slice(start, start + last - first), first, last
        start += last - first


def fill(rows: Tensor, first: int, x: Tensor) -> Tensor:
    """A copy of an open chunk's rows [..., C, f] with x [..., n, f] written at `first`."""
    return torch.cat([rows[..., :first, :], x.to(rows.dtype), rows[..., first + x.shape[-2] :, :]], -2)
