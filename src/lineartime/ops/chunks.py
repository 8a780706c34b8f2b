"""Documents cut into chunks, sums over chunks, and the chunk that a stream has open: what all chunked attentions share.

Shapes: B batch, T tokens, N new tokens of a stream, D documents, G chunks of all documents, C chunk size, f features.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.layout import TokenLayout, document_chunks

Reach = Literal["before", "others", "all"]
"""The chunks a chunk reads of its document: those strictly before it, all but itself, or all of them."""


class Chunks(NamedTuple):
    """The tokens of a batch cut into chunks, each document from its own start.

    Attributes:
        length: T.
        chunk_size: C.
        per_document: the number of chunks of each document.
        layout: where every token goes, or None where all tokens already stand side by side.
        real: bool [B, G, C], which slots hold a token; None where all do. Empty slots stand behind the tokens of a document.
    """

    length: int
    chunk_size: int
    per_document: list[int]
    layout: TokenLayout | None
    real: Tensor | None

    def cut(self, x: Tensor) -> Tensor:
        """[B, T, f] -> [B, G, C, f], with zeros in the slots that hold no token."""
        if self.layout is not None:
            return self.layout.arrange(x)
        if self.n_slots > self.length:
            x = F.pad(x, (0, 0, 0, self.n_slots - self.length))
        cut: Tensor = x.unflatten(1, (-1, self.chunk_size))
        return cut

    def join(self, y: Tensor) -> Tensor:
        """[B, G, C, f] -> [B, T, f], with zeros at padding: the way back from `cut`."""
        if self.layout is not None:
            return self.layout.restore(y)
        y = y.flatten(1, 2)
        return y[:, : self.length] if self.n_slots > self.length else y

    def by_document(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Apply a function to the chunks of each document alone: [B or 1, G, ...] each -> [B, G, ...], shaped as the last."""
        if len(self.per_document) == 1:
            return function(*tensors)
        documents = zip(*(tensor.split(self.per_document, 1) for tensor in tensors), strict=True)
        outputs = [function(*document) for document in documents]
        return torch.cat(outputs, 1) if outputs else tensors[-1]

    @property
    def n_slots(self) -> int:
        """G * C."""
        return sum(self.per_document) * self.chunk_size

    @property
    def document_starts(self) -> list[int]:
        """Where documents begin and end, counted in chunks: [0, ..., G]."""
        return list(accumulate(self.per_document, initial=0))

    def slots(self, device: torch.device) -> Tensor:
        """`real`, or as many True: bool [B or 1, G, C]."""
        if self.real is not None:
            return self.real
        return torch.ones(1, sum(self.per_document), self.chunk_size, dtype=torch.bool, device=device)

    def sizes(self, like: Tensor) -> Tensor:
        """The number of tokens in every chunk, as numbers of the dtype and on the device of `like`: [B or 1, G]."""
        if self.real is None:
            return like.new_full((1, sum(self.per_document)), float(self.chunk_size))
        return self.real.sum(-1).to(like.dtype)


def cut_chunks(like: Tensor, chunk_size: int, mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Chunks:
    """How to cut tokens of shape [B, T, ...] into chunks; `mask` and `cu_seqlens` as for every attention."""
    batch, length = like.shape[:2]
    if mask is not None or cu_seqlens is not None:
        layout, per_document = document_chunks(batch, length, chunk_size, mask, cu_seqlens, like.device)
        return Chunks(length, chunk_size, per_document, layout, layout.real)
    chunks = max(1, -(-length // chunk_size))
    real = None
    if chunks * chunk_size != length:
        slots = torch.arange(chunks * chunk_size, device=like.device)
        real = (slots < length).expand(batch, -1).unflatten(1, (-1, chunk_size))
    return Chunks(length, chunk_size, [chunks], None, real)


def sum_chunks(x: Tensor, chunks: Chunks, reach: Reach) -> Tensor:
    """For each chunk, the sum over the chunks it reads: [B, G, ...] -> the same, or [B, 1, ...] where all are equal."""

    def within(document: Tensor) -> Tensor:
        if reach == "before":
            return exclusive_cumsum(document)
        total = document.sum(1, keepdim=True)
        return total - document if reach == "others" else total

    if len(chunks.per_document) == 1:
        return within(x)
    return chunks.by_document(lambda document: within(document).expand_as(document), x)


def exclusive_cumsum(x: Tensor, dim: int = 1) -> Tensor:
    """The sum of what stands strictly before, along `dim`."""
    before = x.narrow(dim, 0, max(0, x.shape[dim] - 1)).cumsum(dim)
    return torch.cat([torch.zeros_like(x.narrow(dim, 0, min(1, x.shape[dim]))), before], dim)


def shift_chunks(x: Tensor, chunks: Chunks, by: int) -> Tensor:
    """Put into every chunk what stands `by` chunks before it in its document, and zeros where there is none: [B, G, ...]."""

    def within(document: Tensor) -> Tensor:
        none = torch.zeros_like(document[:, : abs(by)])
        return torch.cat([none, document[:, :-by]] if by > 0 else [document[:, -by:], none], 1)

    return chunks.by_document(within, x)


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
