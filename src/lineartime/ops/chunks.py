"""Documents cut into chunks, sums over chunks, and the open chunk of a stream, shared by all chunked attentions.

Shapes: B batch, T tokens, D documents, R rows of L slots, G chunks of all documents, C chunk size, N new tokens, f features,
F tokens of a group, which streams add to their sums at once.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.tracing import is_known

Reach = Literal["before", "others", "all"]
"""The chunks of its document that a chunk attends to: those strictly before it, all but itself, or all of them."""


class Slots(NamedTuple):
    """A map from the tokens of a batch to slots, in which the real tokens of each document are contiguous and in order.

    Attributes:
        slot: int64 [B, T], the slot of each token; padding has R * L, one past the last slot.
        real: bool [B, R, L], whether a slot holds a real token.
    """

    slot: Tensor
    real: Tensor

    def arrange(self, x: Tensor) -> Tensor:
        """[B, T, f] -> [B, R, L, f], with zeros in the slots that hold no real token."""
        batch, rows, size = self.real.shape
        index = self.slot[..., None].expand(-1, -1, x.shape[-1])
        arranged = x.new_zeros(batch, rows * size + 1, x.shape[-1]).scatter(1, index, x)
        return arranged[:, :-1].view(batch, rows, size, x.shape[-1])

    def restore(self, y: Tensor) -> Tensor:
        """[B, R, L, f] -> [B, T, f], with zeros at padding: the inverse of `arrange`."""
        y = F.pad(y.flatten(1, 2), (0, 0, 0, 1))
        return y.gather(1, self.slot[..., None].expand(-1, -1, y.shape[-1]))


class Chunks(NamedTuple):
    """The tokens of a batch cut into chunks of C, each document from its own start.

    Attributes:
        length: T.
        chunk_size: C.
        n_chunks: G, the chunks of all documents of a row.
        max_chunks: the number of chunks of the longest document, or an upper bound of it.
        slots: the slots of the tokens; None if all tokens are already contiguous.
        real: bool [B, G, C], whether a slot holds a token; None if all do. Empty slots come after a document's tokens.
        document_starts: int64 [D + 1], the boundaries of the documents, counted in chunks.
        document: int64 [G], the document of each chunk; None for a single document.
    """

    length: int
    chunk_size: int
    n_chunks: int
    max_chunks: int
    slots: Slots | None
    real: Tensor | None
    document_starts: Tensor
    document: Tensor | None

    def cut(self, x: Tensor) -> Tensor:
        """[B, T, f] -> [B, G, C, f], with zeros in the slots that hold no token."""
        if self.slots is not None:
            return self.slots.arrange(x)
        if self.real is not None:
            x = F.pad(x, (0, 0, 0, self.n_chunks * self.chunk_size - self.length))
        cut: Tensor = x.unflatten(1, (-1, self.chunk_size))
        return cut

    def join(self, y: Tensor) -> Tensor:
        """[B, G, C, f] -> [B, T, f], with zeros at padding: the inverse of `cut`."""
        if self.slots is not None:
            return self.slots.restore(y)
        y = y.flatten(1, 2)
        if torch.is_grad_enabled() or not self._is_of_any_length():
            return y[:, : self.length]
        # Operations on a slice would ask whether it is contiguous, and be compiled again for whole chunks. With gradients, they
        # are: that of a selection is a sum in no fixed order on a GPU.
        return y.index_select(1, torch.arange(self.length, device=y.device))

    def _is_of_any_length(self) -> bool:
        """Whether code is being compiled for whole chunks and for others."""
        slots = self.n_chunks * self.chunk_size
        known = is_known(slots == self.length) or is_known(slots != self.length)
        return not known and not torch.compiler.is_exporting()

    def holds_token(self, device: torch.device) -> Tensor:
        """Which slots hold a token, bool [B or 1, G, C]: `real`, or all True."""
        if self.real is not None:
            return self.real
        return torch.ones(1, self.n_chunks, self.chunk_size, dtype=torch.bool, device=device)

    def sizes(self, like: Tensor) -> Tensor:
        """The number of tokens in every chunk, with the dtype and on the device of `like`: [B or 1, G]."""
        if self.real is None:
            return like.new_full((1, self.n_chunks), float(self.chunk_size))
        return self.real.sum(-1).to(like.dtype)

    def places(self) -> Tensor:
        """The place of every chunk in its document, int64 [G], starting at 0."""
        place = torch.arange(self.n_chunks, device=self.document_starts.device)
        return place if self.document is None else place - self.document_starts[self.document]


class OpenChunk(NamedTuple):
    """The slot of the next token of each stream in its chunk, and what it attends to: the same for all layers of a model.

    Attributes:
        slots: int64 [C], the slots of a chunk.
        slot: int64 [B], the slot of the token.
        visible: bool [B, 1, C], True for the token and those before it in its chunk.
        share: [B, 1, C], the factor of the weights: see `visible_share`.
        summary_share: [B, 1, 1], the factor of the sum over the previous chunks; zero in the first chunk.
        open_share: [B, 1, C], the same factor for the tokens of the open chunk that the sums contain, which are subtracted, and
            zero for others. A group that the token completes is among them, because `step` adds it to the sums first.
        group: int64 [B, F], the slots of the token's group.
        is_full: bool [B, 1, 1], whether the token is the last one of its group.
    """

    slots: Tensor
    slot: Tensor
    visible: Tensor
    share: Tensor
    summary_share: Tensor
    open_share: Tensor
    group: Tensor
    is_full: Tensor


def sum_chunks(x: Tensor, chunks: Chunks, reach: Reach) -> Tensor:
    """For each chunk, sum over the chunks in its reach: [B, G, ...] -> [B, G, ...], or [B, 1, ...] if all sums are equal."""
    if reach == "before":
        return exclusive_cumsum(x) if chunks.document is None else _sum_before(x, chunks)
    if chunks.document is None:
        total = x.sum(1, keepdim=True)
    else:
        n_documents = len(chunks.document_starts) - 1
        totals = x.new_zeros(x.shape[0], n_documents, *x.shape[2:]).index_add(1, chunks.document, x)
        total = totals[:, chunks.document]
    return total - x if reach == "others" else total


def count_before(counts: Tensor, chunks: Chunks) -> Tensor:
    """For each chunk, sum integers over the chunks before it in its document, exactly: int64 [B, G]."""
    before = exclusive_cumsum(counts.long())
    return before if chunks.document is None else before - before[:, chunks.document_starts[chunks.document]]


def _sum_before(x: Tensor, chunks: Chunks) -> Tensor:
    """For each chunk, sum over the chunks strictly before it in the same document: [B, G, ...] -> [B, G, ...].

    This is a scan in log2 steps (Hillis and Steele). A difference of prefix sums over all documents would lose digits, and an
    infinity in one document would spread to all later ones.
    """
    total, reach = shift_chunks(x, chunks, 1), 1
    while reach < chunks.max_chunks:
        total = total + shift_chunks(total, chunks, reach)
        reach *= 2
    return total


def shift_chunks(x: Tensor, chunks: Chunks, by: int) -> Tensor:
    """Shift chunks by `by` places inside their documents, filling with zeros: [B, G, ...] -> [B, G, ...]."""
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
    """Make each document a row of its chunks, with zeros after those of shorter ones: [B, G, ...] -> [B, D, longest, ...]."""
    if chunks.document is None:
        return x[:, None]
    n_documents = len(chunks.document_starts) - 1
    split = x.new_zeros(x.shape[0], n_documents * chunks.max_chunks, *x.shape[2:])
    split = split.index_copy(1, chunks.document * chunks.max_chunks + chunks.places(), x)
    return split.view(x.shape[0], n_documents, chunks.max_chunks, *x.shape[2:])


def join_documents(x: Tensor, chunks: Chunks) -> Tensor:
    """The inverse of `split_documents`: [B, D, longest, ...] -> [B, G, ...]."""
    x = x.flatten(1, 2)
    return x if chunks.document is None else x[:, chunks.document * chunks.max_chunks + chunks.places()]


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
