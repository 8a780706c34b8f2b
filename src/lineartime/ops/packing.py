"""Where the tokens of a batch stand: one description of equal rows, padding, packs, prefixes and streams.

A document is a row of a batch, a sequence of a pack, or what a stream reads next. `Packing` puts the real tokens of all
documents one after the other, [N, ...]. `Grid` cuts documents into chunks, from their own start, and is where tokens meet:

    keys     [G, C, ...]    chunk g holds the keys and values of its tokens, and zeros in other slots
    queries  [G, Q, ...]    at most Q of its slots are new tokens, one after the other
    last     [G, Q]         the last slot of its chunk that a query sees

Causal, bidirectional and prefix are one number a document: how many of its first tokens see each other (none, all, or P). A
stream is a document whose first chunk already holds tokens. A mixer that knows no chunks has one for each document, a row.

Chunks of equal rows are views. Other shapes come from one copy of the lengths to the host. Traced code, which cannot copy them,
makes room for every division into documents: tokens beyond the real ones then stand behind the grid, where nobody reads them.

Shapes: B rows, T tokens of a row; N real tokens, n of a grid; D documents, G chunks, C slots of a chunk, Q queries of a chunk.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.checks import check_prefix_lengths
from lineartime.ops.context import ContextGroup
from lineartime.ops.modes import acc_dtype, is_exporting, is_traced, under_transform
from lineartime.ops.positions import in_part, rotary_table, rotate

MAX_GROUPS = 4
"""The maximum number of groups of documents of similar length."""
WASTE = 4
"""Two groups are merged if the padding adds at most 1 / WASTE to the cost of the pack."""
GROUP_COST = 2**18
"""The cost of the operations of one more group, in scores: about a millisecond on a CPU."""
SLOT_COST = 128
"""The cost of the other computations for each slot of a row, padding included, in scores."""
Made = TypeVar("Made")


@dataclass(frozen=True, eq=False)
class Grid:
    """G chunks of C slots.

    Attributes:
        size, width: C and Q.
        chunks: how many chunks each document has: a number if all have as many, a list, or None if the device alone knows.
        first: int64 [D], the first chunk of each document.
        document, begin: int64 [G], the document of each chunk, and the position of its first slot.
        start, end: int64 [D], how many tokens each document has before these, and after them.
        prefix: int64 [D], how many first tokens see each other: all, if the grid is bidirectional; None for none.
        causal: whether the tokens after a prefix see earlier ones alone; False if a prefix is the whole document.
        slot, query_place: int64 [n], where each token stands among G C keys and G Q queries; None if chunks are views of rows.
        count: n.
    """

    size: int
    width: int
    chunks: int | list[int] | None
    first: Tensor
    document: Tensor
    begin: Tensor
    start: Tensor
    end: Tensor
    prefix: Tensor | None
    causal: bool
    slot: Tensor | None
    query_place: Tensor | None
    count: int

    def keys(self, x: Tensor, open_chunk: Tensor | None = None) -> Tensor:
        """[n, ...] -> [G, C, ...], after the open chunks of streams, [D, C, ...]; zeros in other slots."""
        if self.slot is None:
            return self._cut(x)
        out = x.new_zeros(self.document.shape[0] * self.size + 1, *x.shape[1:])  # the last place is for tokens without a slot
        if open_chunk is not None:
            slot = torch.arange(open_chunk.shape[1], device=x.device)
            kept = slot < (self.start - self.begin[self.first])[:, None]
            slot = torch.where(kept, self.first[:, None] * self.size + slot, len(out) - 1)
            out = out.index_copy(0, slot.flatten(), open_chunk.flatten(0, 1).to(x.dtype))
        return out.index_copy(0, self.slot, x)[:-1].view(self.document.shape[0], self.size, *x.shape[1:])

    def queries(self, x: Tensor) -> Tensor:
        """[n, ...] -> [G, Q, ...]; zeros where no token stands."""
        if self.query_place is None:
            return self._cut(x)
        out = x.new_zeros(self.document.shape[0] * self.width + 1, *x.shape[1:])
        return out.index_copy(0, self.query_place, x)[:-1].view(self.document.shape[0], self.width, *x.shape[1:])

    def tokens(self, y: Tensor) -> Tensor:
        """[G, Q, ...] -> [n, ...]: the inverse of `queries`."""
        if self.query_place is not None:  # tokens without a place get any output
            return y.flatten(0, 1).index_select(0, self.query_place.clamp(max=max(0, self.document.shape[0] * self.width - 1)))
        assert self.chunks is not None
        assert not isinstance(self.chunks, list)
        rows = y.reshape(self.end.shape[0], self.chunks * self.width, *y.shape[2:])
        length = self.count // max(1, self.end.shape[0])
        if is_exporting() or (is_traced() and not torch.is_grad_enabled()):
            # Of a slice, code would ask whether it is contiguous, and be compiled again for whole chunks. With gradients, it
            # is: that of a selection is a sum in no fixed order on a GPU.
            rows = rows.index_select(1, torch.arange(length, device=y.device))
        return merged(rows[:, :length], self.count)

    def _cut(self, x: Tensor) -> Tensor:
        """Equal rows in chunks: [n, ...] -> [G, C, ...]."""
        assert self.chunks is not None
        assert not isinstance(self.chunks, list)
        documents, slots = self.end.shape[0], self.chunks * self.size
        length = self.count // max(1, documents)
        if not is_traced() and slots == length:  # compiled code would be compiled for whole chunks, and again for others
            return x.view(documents * self.chunks, self.size, *x.shape[1:])
        rows = x.view(documents, length, *x.shape[1:])
        if is_exporting():  # by index, not by views of sizes that divide others
            place = torch.arange(slots, device=x.device)
            rows = rows.index_select(1, place.clamp(max=length - 1))
            rows = torch.where((place < length).view(-1, *[1] * (x.dim() - 1)), rows, 0.0)
        elif is_traced():  # which would be compiled again for no slots without a token
            rows = F.pad(rows, (*[0, 0] * (x.dim() - 1), 0, slots - length))
        else:  # F.pad writes twice
            rows = torch.cat([rows, rows.new_zeros(documents, slots - length, *x.shape[1:])], 1)
        return rows.reshape(documents * self.chunks, self.size, *x.shape[1:])

    def sum_before(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """For each chunk, the sum over the chunks before it in its document: [G, ...] -> [G, ...], for a reader of some dtype.

        A difference of sums over all documents would lose digits, and spread infinities.
        """
        if isinstance(self.chunks, list):
            if not self.chunks:
                return x
            nothing = torch.zeros_like(x[:1])
            return torch.cat([sums for part in x.split(self.chunks) for sums in (nothing, part[:-1].cumsum(0))])
        if self.chunks is not None:
            rows = x.reshape(self.end.shape[0], self.chunks, *x.shape[1:])
            if not is_exporting():
                return F.pad(rows, (*[0, 0] * (x.dim() - 1), 1, -1)).cumsum(1).to(dtype or x.dtype).flatten(0, 1)
            return torch.cat([torch.zeros_like(rows[:, :1]), rows], 1).narrow(1, 0, self.chunks).cumsum(1).flatten(0, 1)
        if is_exporting():  # a program cannot count steps; an infinity reaches other documents there
            together = self.document[:, None].eq(self.document).tril(-1).to(x.dtype)
            return (together @ x.flatten(1)).view_as(x)
        own = (torch.arange(x.shape[0], device=x.device) - self.first[self.document]).view(-1, *[1] * (x.dim() - 1))
        total, reach = torch.where(own >= 1, x.roll(1, 0), 0), 1
        while reach < x.shape[0]:  # sums of 1, 2, 4, ... chunks
            total, reach = total + torch.where(own >= reach, total.roll(reach, 0), 0), 2 * reach
        return total

    def sum_of(self, x: Tensor) -> Tensor:
        """The sum over the chunks of each document: [G, ...] -> [D, ...]."""
        if isinstance(self.chunks, list):
            return torch.stack([part.sum(0) for part in x.split(self.chunks)]) if self.chunks else x[:0]
        if self.chunks is None:
            return (self.sum_before(x) + x).index_select(0, self.final)
        return x.reshape(self.end.shape[0], self.chunks, *x.shape[1:]).sum(1)

    def of_documents(self, x: Tensor) -> Tensor:
        """What each chunk's document has: [D, ...] -> [G, ...]."""
        if self.chunks is not None and not isinstance(self.chunks, list) and not is_exporting():
            return x[:, None].expand(-1, self.chunks, *[-1] * (x.dim() - 1)).flatten(0, 1)
        return x.index_select(0, self.document)

    @property
    def is_full(self) -> bool:
        """Whether the host knows that each slot holds a token; compiled code would be compiled once for either answer."""
        return not is_traced() and self.slot is None and self.count == self.document.shape[0] * self.size

    @property
    def final(self) -> Tensor:
        """int64 [D], the chunk in which each document ends."""
        return self.first + ((self.end - self.begin[self.first] - 1) // self.size).clamp(min=0)

    @property
    def real(self) -> Tensor:
        """Which slots hold a token, bool [G, C]."""
        return self.slots_before(self.end)

    def slots_before(self, position: Tensor) -> Tensor:
        """Which slots stand before a position of their document, int64 [D]: bool [G, C]."""
        return self.begin[:, None] + torch.arange(self.size, device=self.document.device) < position[self.document][:, None]

    @property
    def sizes(self) -> Tensor:
        """int64 [G], the number of tokens in each chunk."""
        return (self.end[self.document] - self.begin).clamp(0, self.size)

    @property
    def full(self) -> Tensor:
        """Which chunks have a token in every slot, bool [G]."""
        return self.begin + self.size <= self.end[self.document]

    @property
    def query_slot(self) -> Tensor:
        """int64 [G, Q] or [1, Q], the slots of queries; nobody reads those beyond a document's tokens."""
        slot = torch.arange(self.width, device=self.document.device)[None]
        if self.width == self.size:
            return slot
        return ((self.start[self.document] - self.begin).clamp(min=0)[:, None] + slot).clamp(max=self.size - 1)

    @property
    def in_prefix(self) -> Tensor:
        """Whether a query is one of the tokens that see each other, bool [G, Q]; only with prefixes."""
        assert self.prefix is not None
        return self.begin[:, None] + self.query_slot < self.prefix[self.document][:, None]

    @property
    def last(self) -> Tensor:
        """int64 [G, Q], [1, Q] or [G, 1]: the last slot that a query sees."""
        if self.prefix is None:
            return self.query_slot
        inside = (self.prefix[self.document] - self.begin).clamp(max=self.size)[:, None] - 1
        return torch.where(self.in_prefix, inside, self.query_slot) if self.causal else inside


@dataclass(frozen=True, eq=False)
class Packing:
    """The documents of a batch, and the order in which their real tokens are computed.

    Attributes:
        shape: (B, T), of the tokens that `pack` takes.
        order: int64 [N], the places in B T of the tokens; None if all are there in their order.
        position: int64 [N / sharing], of each token in its document.
        sharing: how many equal rows share these positions; 1 if they do not.
        start, new: int64 [D], how many tokens each document has before these, and how many these are.
        starts, lengths: the same on the host; None if it does not know them.
        longest: the most tokens that a document has, or a bound of it.
        even: whether it is known here that all documents have equally many tokens, which are read as views.
        streams: whether the documents are continued later.
        prefix: int64 [D], how many first tokens of a causal document see each other; None for no prefix.
        groups: the numbers of documents of similar length, which stand one after the other; empty for a single group.
        one_grid: whether all documents stand in one grid of whole chunks.
        context: the processes over which every sequence is split; None if this process holds whole sequences.
        any_division: whether code that is traced reads any division of one row into documents.
        memo: what layers share, by name: see `shared`.
    """

    shape: tuple[int, int]
    order: Tensor | None
    position: Tensor
    sharing: int
    start: Tensor
    new: Tensor
    starts: list[int] | None
    lengths: list[int] | None
    longest: int
    even: bool
    streams: bool = False
    prefix: Tensor | None = None
    groups: tuple[int, ...] = ()
    one_grid: bool = False
    context: ContextGroup | None = None
    any_division: bool = False
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        """N."""
        return self.position.shape[0] * self.sharing

    @property
    def common_start(self) -> int | None:
        """How many tokens every document has before these, if that is one number and the host knows it."""
        starts = self.starts
        return starts[0] if starts and all(start == starts[0] for start in starts) else None

    def shared(self, key: Any, make: Callable[[], Made]) -> Made:
        """What `make` returns: made for the first layer that asks, and kept for the others, except in traced code."""
        if not is_exporting() and key in self.memo:
            found: Made = self.memo[key]
            return found
        made = make()
        if not is_traced():
            self.memo[key] = made
        return made

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [N, ...]."""
        x = x.reshape(self.shape[0] * self.shape[1], *x.shape[2:])
        if self.order is None:
            return x
        if self.lengths is None:  # the order has places behind all tokens
            x = F.pad(x, (*[0, 0] * (x.dim() - 1), 0, 1))
        return x.index_select(0, self.order)

    def unpack(self, x: Tensor) -> Tensor:
        """[N, ...] -> [B, T, ...], with zeros at padding: the inverse of `pack`."""
        if self.order is not None:
            total = self.shape[0] * self.shape[1]
            x = x.new_zeros(total + 1, *x.shape[1:]).index_copy(0, self.order, x)[:-1]
        return x.view(*self.shape, *x.shape[1:])

    def rotate(self, x: Tensor, width: int | None = None) -> Tensor:
        """Rotate vectors [N, ..., s] by their positions: `width` features, the first ones of each half; None for all."""
        table = in_part(self.rotations(width or x.shape[-1], acc_dtype(x)), x.shape[-1])
        rows = x.view(self.sharing, self.position.shape[0], *x.shape[1:])
        return rotate(rows, table.view(2, -1, *[1] * (x.dim() - 2), table.shape[-1])).view(x.shape)

    def rotations(self, width: int, dtype: torch.dtype) -> Tensor:
        """The cosines and sines of the positions, [2, N / sharing, width / 2], for `width` features."""
        return self.shared(("rotations", width, dtype), lambda: self.rotations_at(self.position, width, dtype))

    def rotations_at(self, position: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """The cosines and sines of positions [...], [2, ..., width / 2]; documents of a pack share those that they have."""
        if is_traced() or self.lengths is None or self.even or self.streams:
            return rotary_table(position, width // 2, dtype)
        places = torch.arange(max(1, self.longest), device=position.device)
        rows = self.shared(("table", width, dtype), lambda: rotary_table(places, width // 2, dtype))
        return rows.index_select(1, position.flatten().clamp(max=len(places) - 1)).view(2, *position.shape, width // 2)

    def earlier(self, x: Tensor, n: int, recent: Tensor | None = None) -> tuple[list[Tensor], Tensor | None]:
        """The tokens 1, 2, ..., n before each token in its document, [N, f] each, and the last n of each stream, [D, n, f].

        Before the first token stand the `recent` ones of a stream, [D, n, f], or zeros.
        """
        if self.even:
            rows = x.view(self.new.shape[0], self.longest, x.shape[1])
            known = F.pad(rows, (0, 0, n, 0)) if recent is None else torch.cat([recent.to(x.dtype), rows], 1)
            before = [known[:, n - by : n - by + self.longest].flatten(0, 1) for by in range(1, n + 1)]
            return before, None if recent is None else known[:, self.longest :].to(recent.dtype)
        first, before = self.new.cumsum(0) - self.new, []
        inside = torch.arange(x.shape[0], device=x.device) - first[self.document]
        for by in range(1, n + 1):
            old = 0 if recent is None else recent.to(x.dtype)[self.document, (n - by + inside).clamp(max=n - 1)]
            before.append(torch.where((inside < by)[:, None], old, F.pad(x, (0, 0, by, 0))[: x.shape[0]]))
        if recent is None:
            return before, None
        place = self.new[:, None] + torch.arange(-n, 0, device=x.device)  # among the new tokens of a stream
        kept = recent.gather(1, (place + n).clamp(0, n - 1)[..., None].expand_as(recent))
        token = (first[:, None] + place).clamp(min=0)
        new = F.pad(x, (0, 0, 0, 1)).index_select(0, token.flatten()).view_as(kept).to(recent.dtype)
        return before, torch.where((place >= 0)[..., None], new, kept)

    @property
    def document(self) -> Tensor:
        """int64 [N], the document of each token; the last one for those that traced code has behind all."""
        return self.shared("document", lambda: _document(self.new, self.count))

    def by_grid(self, chunk_size: int | None, causal: bool, *tensors: Tensor | None) -> "Iterator[tuple[Any, ...]]":
        """Each grid of `grids`, with its tokens of each tensor: [N, ...] -> [n, ...]."""
        grids = self.grids(chunk_size, causal=causal)
        if len(grids) == 1:
            yield (grids[0], *tensors)
            return
        counts = [grid.count for grid in grids]
        parts = ([None] * len(grids) if x is None else x.split(counts) for x in tensors)
        yield from zip(grids, *parts, strict=True)

    def by_row(self, attend: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Apply an attention to each document as a row: [N, ...] each -> [N, ...].

        `attend` maps [R, L, ...] each, and `real`, bool [R, L] or None if there is no padding, to [R, L, ...].
        """
        if self.even:
            return self.tokens(attend(*map(self.to_rows, tensors), None))
        by_grid = self.by_grid(None, True, *tensors)
        outputs = [grid.tokens(attend(*map(grid.queries, own), grid.real)) for grid, *own in by_grid]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def to_rows(self, x: Tensor) -> Tensor:
        """The tokens of streams as rows, [N, ...] -> [D, L, ...], with zeros after those of shorter ones."""
        if self.even:
            return x.view(self.new.shape[0], self.longest, *x.shape[1:])
        (grid,) = self.grids(None, causal=True)
        return grid.queries(x)

    def tokens(self, rows: Tensor) -> Tensor:
        """The inverse of `to_rows`: [D, L, ...] -> [N, ...]."""
        if self.even:
            return merged(rows, self.count)
        (grid,) = self.grids(None, causal=True)
        return grid.tokens(rows)

    def grids(self, chunk_size: int | None, *, causal: bool) -> list[Grid]:
        """Cut the documents into chunks of at most `chunk_size` slots or, if it is None, make each of them a row.

        Documents that are shorter than a chunk stand in a grid of their own, with fewer slots. Rows begin with the first of
        these tokens, chunks with the tokens of their stream before.
        """
        return self.shared(("grids", chunk_size, causal), lambda: list(self._grids(chunk_size, causal)))

    def _grids(self, chunk_size: int | None, causal: bool) -> Iterator[Grid]:
        if not self.groups or self.lengths is None:
            yield self._grid(slice(None), self.lengths, chunk_size, causal)
            return
        first = 0
        lengths = [self.lengths[stop - many : stop] for many, stop in zip(self.groups, accumulate(self.groups), strict=True)]
        for size, group in groupby(lengths, lambda own: min(max(own), chunk_size or max(own))):
            own = [length for each in group for length in each]
            yield self._grid(slice(first, first + len(own)), own, size if chunk_size else None, causal)
            first += len(own)

    def _grid(self, own: slice, lengths: list[int] | None, chunk_size: int | None, causal: bool) -> Grid:
        """The grid of some documents, of these lengths."""
        new, start, device = self.new[own], self.start[own], self.new.device
        longest = max(lengths, default=0) if lengths else self.longest
        count = self.count if lengths is None else sum(lengths)
        prefix = None if self.prefix is None else self.prefix[own]
        if not causal:  # the whole document is a prefix, also the part that other processes have
            prefix = new if self.context is None else new * self.context.size
        chunks: int | list[int] | None
        if chunk_size is None:  # a row of these tokens alone
            size, views, chunks = longest, self.even, 1
            start = base = torch.zeros_like(start)
        else:
            size, views, chunks = self._chunks(chunk_size, own, lengths, longest)
            base = start - start % size  # where the first chunk of each document begins
        end, documents = start + new, new.shape[0]
        if chunks is not None and not isinstance(chunks, list):  # a number, which code that is exported has as a symbol
            first = chunks * torch.arange(documents, device=device)
            chunk = torch.arange(documents * chunks, device=device)
            document = chunk // chunks
        else:
            each = ((end - base + size - 1) // size).clamp(min=1)
            first = each.cumsum(0) - each
            chunk = torch.arange(documents + count // size if chunks is None else sum(chunks), device=device)
            document = _document(each, chunk.shape[0])
        begin = base[document] + (chunk - first[document]) * size
        width = min(size, max(1, longest)) if self.streams and not views else size
        grid = Grid(size, width, chunks, first, document, begin, start, end, prefix, causal, None, None, count)
        return grid if views else _with_places(grid, new)

    def _chunks(
        self, chunk_size: int, own: slice, lengths: list[int] | None, longest: int
    ) -> tuple[int, bool, int | list[int] | None]:
        """The slots of a chunk, whether chunks are views, and `Grid.chunks`, of documents with these lengths."""
        fixed = self.streams or self.one_grid or is_traced()  # else, short documents have short chunks
        size = chunk_size if fixed else min(chunk_size, max(1, longest))
        views = self.even and (not self.streams or (self.common_start is not None and self.common_start % size == 0))
        if not views and lengths is not None and self.starts is not None and not self.one_grid:
            starts = self.starts[own]
            return size, views, [max(1, -(-(start % size + n) // size)) for start, n in zip(starts, lengths, strict=True)]
        if not views and self.new[own].shape[0] != self.shape[0]:  # any division of a pack
            return size, views, None
        # Rows, of which those of streams may begin with the last slot of a chunk.
        bound = longest + (size - 1 if self.streams and not views else 0)
        return size, views, bound // size + 1 if is_exporting() else max(1, (bound + size - 1) // size)


def _with_places(grid: Grid, new: Tensor) -> Grid:
    """The grid with the slots and places of its tokens, of which each document has `new`, int64 [D]."""
    token, document, total = torch.arange(grid.count, device=new.device), _document(new, grid.count), grid.document.shape[0]
    inside = token - (new.cumsum(0) - grid.end + grid.begin[grid.first])[document]  # its slot among those of its document
    slot = place = grid.first[document] * grid.size + inside
    if grid.width < grid.size:
        chunk = (slot // grid.size).clamp(max=total - 1)
        place = chunk * grid.width + slot % grid.size - (grid.start[grid.document] - grid.begin).clamp(min=0)[chunk]
    real = token < new.sum()  # traced code has others behind them
    return replace(
        grid, slot=torch.where(real, slot, total * grid.size), query_place=torch.where(real, place, total * grid.width)
    )


def merged(rows: Tensor, count: int) -> Tensor:
    """Rows [A, B, ...] as [A B, ...], `count` of them. Code that is traced copies them: it must not ask if this is a view."""
    if not is_traced():
        return rows.flatten(0, 1)
    return rows.clone(memory_format=torch.contiguous_format).view(count, *rows.shape[2:])


def _document(counts: Tensor, total: int) -> Tensor:
    """The document of each of `total` places, int64 [total], if document d has counts[d] of them, one after the other."""
    ends = counts.cumsum(0).clamp(0, total)
    marks = torch.zeros(total + 1, dtype=torch.long, device=counts.device)  # torch.searchsorted warns under vmap
    ended = marks.index_add(0, ends, torch.ones_like(ends)).cumsum(0)[:-1]
    return ended.clamp(max=max(0, counts.shape[0] - 1))


def describe(
    shape: tuple[int, ...],
    *,
    device: torch.device,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    document_lengths: list[int] | None = None,
    prefix: Tensor | None = None,
    position: Tensor | None = None,
    context: ContextGroup | None = None,
    one_grid: bool = False,
) -> Packing:
    """Describe tokens [B, T, ...]; the mask and the boundaries are checked already.

    Args:
        shape: [B, T, ...].
        device: that of the tokens.
        mask: bool [B, T], True for real tokens.
        cu_seqlens: int [D + 1], the boundaries of D documents packed into a single row.
        document_lengths: their lengths, padding included, if the host has read them already.
        prefix: int [D], how many first tokens of a document see each other.
        position: int64 [B], how many tokens streams have read before; None for whole sequences.
        context: the processes over which every sequence is split.
        one_grid: whether documents of all lengths stand in one grid of whole chunks, so that code which is compiled for one
            packing suits all.

    Raises:
        ArgumentError: if prefixes are longer than their documents, or are not one for each.
    """
    (rows, length), streams = shape[:2], position is not None
    plain = mask is None and cu_seqlens is None
    new, seen = torch.full((rows,), length, device=device), None
    if cu_seqlens is not None:
        new = to_device(cu_seqlens.long(), device).diff()
    if mask is not None:
        seen = F.pad(mask.flatten().cumsum(0), (1, 0))
        new = seen[F.pad(new.cumsum(0), (1, 0))].diff()
    if prefix is not None:
        prefix = check_prefix_lengths(prefix, new, of_rows=cu_seqlens is None)
    offset = 0 if context is None else context.rank * length
    start = torch.full_like(new, offset) if position is None else position.clone()  # a step writes into that of a state
    starts: list[int] | None = None
    lengths: list[int] | None = None
    if is_traced() or under_transform() or (streams and length == 1 and device.type != "cpu"):
        pass  # the host cannot know them, or would have to wait
    elif mask is None and (not streams or start.is_meta):
        lengths = [length] * rows if cu_seqlens is None else document_lengths or cu_seqlens.diff().tolist()
        starts = [offset] * len(lengths)
    elif plain:
        starts, lengths = start.tolist(), [length] * rows
    else:
        lengths, starts = torch.stack([new, start]).tolist()
    even = plain or (lengths is not None and not one_grid and len(set(lengths)) == 1)
    longest = length if lengths is None else max(lengths, default=0)
    count = rows * length if lengths is None else sum(lengths)
    order = None  # padding goes to the last place, which is cut off
    if mask is not None and seen is not None and (lengths is None or count < rows * length):
        rank, token = torch.where(mask.flatten(), seen[1:] - 1, count), torch.arange(rows * length, device=device)
        order = torch.full((count + 1,), rows * length, device=device).index_copy(0, rank, token)[:-1]
    groups: list[list[int]] = []
    if lengths is not None and not (even or streams or one_grid) and len(groups := similar_documents(lengths)) > 1:
        chosen = [document for group in groups for document in group]
        documents = to_device(torch.tensor(chosen, device="cpu"), device)
        begin, new, start = (new.cumsum(0) - new)[documents], new[documents], start[documents]
        lengths = [lengths[document] for document in chosen]
        prefix = None if prefix is None else prefix[documents]
        token = torch.arange(count, device=device) + (begin - new.cumsum(0) + new).repeat_interleave(new, output_size=count)
        order = token if order is None else order[token]

    if even and not is_exporting() and (not streams or (starts is not None and len(set(starts)) == 1)):
        offset = starts[0] if streams and starts else offset
        position, sharing = torch.arange(offset, offset + longest, device=device), new.shape[0]  # which equal rows share
    elif even:
        position, sharing = (start[:, None] + torch.arange(longest, device=device)).flatten(), 1
    else:
        token, document = torch.arange(count, device=device), _document(new, count)
        position, sharing = token - (new.cumsum(0) - new - start)[document], 1
        if lengths is None:  # those behind the real tokens have any position that a document may have
            position = torch.where(token < new.sum(), position, 0)
    return Packing(
        (rows, length), order, position, sharing, start, new, starts, lengths, longest, even, streams, prefix,
        tuple(map(len, groups)) if len(groups) > 1 else (), one_grid, context, lengths is None and cu_seqlens is not None,
    )  # fmt: skip


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
