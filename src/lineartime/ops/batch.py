"""What is known about a batch: where its tokens and documents are, worked out once, where the batch enters a layer or a model.

Equal rows without padding stay as they are, [B, T, ...]. Every other batch becomes a pack, [1, N, ...]: its real tokens alone,
document by document. A document is a row of the batch or, with `cu_seqlens`, a sequence of a row. A mixer reads a batch by
chunks, or by rows, where a row is a document that is one chunk. All chunked attentions share the sums over chunks.

Shapes: B batch, T tokens of a row, N tokens of the pack, D documents, G chunks, C slots of a chunk, f features.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.context import ContextGroup
from lineartime.ops.modes import is_exporting, is_known, is_traced


def _none() -> Tensor:
    """No boundaries. It is made anew for each batch: torch.compile refuses a tensor as the default of a field."""
    return torch.empty(0, dtype=torch.long, device="cpu")


class Needs(NamedTuple):
    """What a mixer needs to know of a batch; mixers with equal needs share it.

    Attributes:
        chunk_size: C of a mixer with chunks; None for a mixer over whole rows.
        rotary_width: the width of the vectors that are rotated by their positions; None for no rotation.
        max_length: the maximum number of tokens of a row; None for no limit.
        dtype: the dtype of the rotations.
    """

    chunk_size: int | None = None
    rotary_width: int | None = None
    max_length: int | None = None
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, eq=False)
class Batch:
    """The tokens of a batch, their documents, and how a mixer arranges them.

    Attributes:
        shape: (B, T), of the tokens that `pack` takes.
        positions: int64 [T], or [N] of a pack, the position of each token in its document; [B, N] for streams.
        order: int64 [N], the places in B T of the tokens of the pack; None if they are already in order.
        is_real: bool, which of these tokens are real; None if all are. Only code that is traced, which cannot leave out the
            others, and streams have tokens that are not.
        rotations: [2, ..., f], the cosines and sines of the positions; None for a mixer without them.
        document: int64 [N], the document of each token of a pack; None for equal rows.
        starts: int64 [D + 1], the boundaries of the documents of a pack; None for equal rows.
        chunk_size, n_chunks: C, and G of a row.
        max_chunks: the number of chunks of the longest document, or an upper bound of it.
        slot: int64 [N], the slot of each token among G C; None if tokens are in order of their slots.
        real: bool [B, G, C], whether a slot holds a token; None if all do. Empty slots come after a document's tokens.
        chunk_starts: int64 [D + 1], the boundaries of the documents, counted in chunks; empty without chunks.
        chunk_document: int64 [G], the document of each chunk; None if there is one for each row.
        in_prefix, prefix: bool [1, N] or [B, T], the tokens of prefixes, and the batch of them alone; None without prefixes.
        parts: the batches of documents of similar length, which are computed one after the other; empty for a single one.
        context: the processes over which every sequence is split; None if this process holds whole sequences.
        start: the position of the first token of streams that all stand there; None if they differ, or are on a GPU.
        counts: int64 [B], the number of real tokens that come first in each stream; None if all are real.
        memo: what layers share, by name: see `shared`.
    """

    shape: tuple[int, int]
    positions: Tensor
    order: Tensor | None = None
    is_real: Tensor | None = None
    rotations: Tensor | None = None
    document: Tensor | None = None
    starts: Tensor | None = None
    chunk_size: int = 0
    n_chunks: int = 1
    max_chunks: int = 1
    slot: Tensor | None = None
    real: Tensor | None = None
    chunk_starts: Tensor = field(default_factory=_none)
    chunk_document: Tensor | None = None
    in_prefix: Tensor | None = None
    prefix: "Batch | None" = None
    parts: "tuple[Batch, ...]" = ()
    context: ContextGroup | None = None
    start: int | None = None
    counts: Tensor | None = None
    memo: dict[Any, Tensor] = field(default_factory=dict, repr=False)

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [1, N, ...]; equal rows and streams keep their rows. Tokens that are not real become zeros."""
        if self.order is None:
            return x
        packed = x.flatten(0, 1).index_select(0, self.order)
        rows = (1, -1) if self.counts is None else self.shape
        return self._real_only(packed.view(*rows, *x.shape[2:]))

    def unpack(self, y: Tensor) -> Tensor:
        """[1, N, ...] -> [B, T, ...], with zeros at padding: the inverse of `pack`."""
        if self.order is None:
            return y
        batch, length = self.shape
        y = self._real_only(y).flatten(0, 1)
        return y.new_zeros(batch * length, *y.shape[1:]).index_copy(0, self.order, y).view(batch, length, *y.shape[1:])

    def _real_only(self, x: Tensor) -> Tensor:
        if self.is_real is None:
            return x
        return x.masked_fill(~self.is_real.view(*self.is_real.shape, *[1] * (x.dim() - 2)), 0)

    def by_part(self, read: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Apply a function that mixes tokens to each part, or to the whole batch: [B, T, ...] each -> [B, T, e].

        `read` receives the tensors of some tokens, and the batch of these tokens.
        """
        if not self.parts:
            return read(*tensors, self)
        out = torch.cat([read(*map(part.pack, tensors), part) for part in self.parts], 1)
        order = torch.cat([part.order for part in self.parts if part.order is not None])
        return torch.empty_like(out).index_copy(1, order, out)

    def by_row(self, attend: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Apply an attention to every document as a row: [B, T, f] each -> [B, T, e].

        `attend` maps [R, L, f] each, and `real`, bool [R, L] or None if there is no padding, to [R, L, e].
        """
        if self.document is None:
            return attend(*map(self._real_only, tensors), self.is_real)
        out = attend(*(self.cut(x)[0] for x in tensors), None if self.real is None else self.real[0])
        return self.join(out[None])

    def with_prefix(self, causal: Tensor, attend: "Callable[..., Tensor]", *tensors: Tensor) -> Tensor:
        """The outputs [1, N, e] of a causal attention, with those of `attend`, of [1, P, f] and their batch, in prefixes."""
        if self.prefix is None or self.in_prefix is None:
            return causal
        bidirectional = self.prefix.unpack(attend(*map(self.prefix.pack, tensors), self.prefix))
        return torch.where(self.in_prefix[..., None], bidirectional, causal)

    def cut(self, x: Tensor) -> Tensor:
        """[B, T, f] -> [B, G, C, f], with zeros in the slots that hold no token."""
        if is_exporting() and self.slot is None and self.real is not None:
            return self._cut(x).masked_fill(~self.real[..., None], 0)
        return self._cut(self._real_only(x))

    def _cut(self, x: Tensor) -> Tensor:
        size = self.n_chunks * self.chunk_size
        if self.slot is not None:
            filled = x.new_zeros(size + 1, *x.shape[2:]).index_copy(0, self.slot, x[0])[:-1]
            return filled.view(1, self.n_chunks, self.chunk_size, *x.shape[2:])
        if is_exporting():
            return x[:, _places(self.n_chunks, self.chunk_size, x.device).clamp(max=x.shape[1] - 1)]
        if self.real is not None:
            x = F.pad(x, (0, 0, 0, size - x.shape[1]))
        return x.view(x.shape[0], self.n_chunks, self.chunk_size, *x.shape[2:])

    def join(self, y: Tensor) -> Tensor:
        """[B, G, C, f] -> [B, T, f]: the inverse of `cut`."""
        length = self.positions.shape[-1]
        y = y.flatten(1, 2)
        if self.slot is not None:
            if self.is_real is not None:  # padding has the slot after the last
                y = F.pad(y, (0, 0, 0, 1))
            return y.index_select(1, self.slot)
        if self.real is None or (not is_exporting() and (torch.is_grad_enabled() or not self._is_of_any_length())):
            return y[:, :length]
        # Operations on a slice would ask whether it is contiguous, and be compiled again for whole chunks. With gradients, they
        # are: that of a selection is a sum in no fixed order on a GPU.
        return y.index_select(1, torch.arange(length, device=y.device))

    @property
    def first_position(self) -> int:
        """The position of the first token of streams that all stand there, as `start`, where it is known."""
        assert self.start is not None
        return self.start

    def after(self, position: Tensor) -> Tensor:
        """The positions of streams after these tokens, int64 [B], given those before them."""
        return position + (self.shape[1] if self.counts is None else self.counts)

    @property
    def chunk_rotations(self) -> Tensor | None:
        """The rotations cut into chunks, [2, B or 1, G, C, f]; None without rotations."""
        if self.rotations is None:
            return None
        rows = self.rotations if self.rotations.dim() == 4 else self.rotations[:, None]
        if self.slot is None:
            cut: Tensor = self._cut(rows.flatten(0, 1)).unflatten(0, (2, -1))
            return cut
        return torch.stack([self._cut(x) for x in rows])

    def shared(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        """What `make` returns: computed by the first layer that asks, and kept for the others, except in traced code."""
        if is_traced():
            return make()
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def _is_of_any_length(self) -> bool:
        """Whether code is being compiled for whole chunks and for others."""
        slots, length = self.n_chunks * self.chunk_size, self.positions.shape[-1]
        return not (is_known(slots == length) or is_known(slots != length))

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

    def elsewhere(self, causal: bool) -> int:
        """The number of tokens in other processes of the context that a token attends to."""
        if self.context is None:
            return 0
        return self.positions.shape[-1] * (self.context.rank if causal else self.context.size - 1)


def cut_rows(batch: Batch, size: int, real: Tensor | None) -> Batch:
    """Cut equal rows [B, T] into chunks; `real`, bool [B, T], is False for the padding at the end of shorter rows."""
    rows, length = batch.shape
    device = batch.positions.device
    n_chunks = (length + size - 1) // size if length else 1
    if is_exporting():
        n_chunks = n_chunks + 1  # a program is made for one chunk, or for any number from two
        places = _places(n_chunks, size, device)  # by index, not by views of sizes that divide others
        marks = (places < length)[None].expand(rows, -1, -1)
        real = marks if real is None else marks & real[:, places.clamp(max=length - 1)]
    elif not is_known(n_chunks * size == length):
        if real is None:
            real = (torch.arange(n_chunks * size, device=device) < length).expand(rows, -1)
        else:
            real = F.pad(real, (0, n_chunks * size - length))
    if real is not None and not is_exporting():
        real = real.view(rows, n_chunks, size)
    starts = n_chunks * torch.arange(2, device=device)  # needs no copy to a GPU
    return replace(batch, chunk_size=size, n_chunks=n_chunks, max_chunks=n_chunks, real=real, chunk_starts=starts)


def _places(n_chunks: int, size: int, device: torch.device) -> Tensor:
    """The places of the slots of chunks in their row, int64 [G, C]."""
    return size * torch.arange(n_chunks, device=device)[:, None] + torch.arange(size, device=device)


def cut_chunks(rows: Tensor, chunk_size: int, real: Tensor | None = None) -> Batch:
    """The chunks of rows [B, T, ...]; `real`, bool [B, T], is False for the padding at the end of shorter rows."""
    positions = torch.arange(rows.shape[1], device=rows.device)
    return cut_rows(Batch((rows.shape[0], rows.shape[1]), positions), chunk_size, real)


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
