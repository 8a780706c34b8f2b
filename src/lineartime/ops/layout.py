"""The layout of a batch: where its real tokens are. It is made once, when the batch enters a model, for all layers.

Shapes: B batch, T tokens, D documents, R rows, L slots of a row, C chunk size, f features.
A document is a row of the batch or, with `cu_seqlens`, one of the sequences packed into a single row.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.ops.activations import Normalization
from lineartime.ops.arrange import count_positions, cut_documents, document_rows, longest_row, to_device
from lineartime.ops.checks import as_mask, check_documents
from lineartime.ops.chunks import Chunks, Slots
from lineartime.ops.context import ContextGroup
from lineartime.ops.packs import similar_documents
from lineartime.ops.positions import partial_rotary_table, rotary_table
from lineartime.ops.prefix import prefix_tokens
from lineartime.ops.token_shift import previous_tokens

if TYPE_CHECKING:  # it imports this module
    from lineartime.ops.mixed_chunk.step import OpenChunk


class Parts(NamedTuple):
    """A pack whose documents differ much in length, split into smaller packs of documents of similar length.

    Attributes:
        tokens: int64 [T], the places of the tokens, one part after the other.
        layouts: the layouts of the parts.
    """

    tokens: Tensor
    layouts: "tuple[Layout, ...]"

    @property
    def sizes(self) -> list[int]:
        """The number of tokens of each part."""
        return [layout.positions.shape[-1] for layout in self.layouts]


class Layout(NamedTuple):
    """What every layer needs to know about a batch.

    Attributes:
        mask: bool [B, T], True for real tokens; None where all are.
        positions: int64 [T] or [B, T], the position of each token in its document, counting only real tokens.
        document: int64 [T], the document of each token; None if every row is one document.
        document_starts: int64 [D + 1], the boundaries of the documents; None if every row is one document.
        previous: int64 [B or 1, T], for a token shift: the place of the token before each one in its document, T if there is
            none. None if every row is one document without padding, or for a mixer without a token shift.
        rotations: [2, T, f] or [2, B, T, f], the cosines and sines of rotary positions; None for a mixer without them.
        chunk_rotations: [2, B or 1, G, C, f], the same, cut into chunks; None without chunks.
        place_rotations: [2, n, f], the same for the n places of a row or chunk, for a rotary bias; None without one.
        rows: each document as a row; None if the rows of the batch are whole documents without padding, or for a mixer with
            chunks.
        chunks: the documents cut into chunks; None for a mixer over whole rows.
        context: the processes over which every sequence is split; None if this process holds whole sequences.
        prefix: the layout of the prefixes alone, whose mask is True for their tokens (None if all tokens are in a prefix); None
            for a batch without prefixes.
        open_chunk: the place of the next token of each stream in its chunk, for a step of a mixer with chunks; None otherwise.
        parts: a pack split into smaller ones, which are computed separately (`by_part`) and have their own rotations, rows,
            chunks and prefixes; None for anything else.
        plan: the plan that it was made for; a mixer with another plan cannot use it.
    """

    mask: Tensor | None
    positions: Tensor
    document: Tensor | None = None
    document_starts: Tensor | None = None
    previous: Tensor | None = None
    rotations: Tensor | None = None
    chunk_rotations: Tensor | None = None
    place_rotations: Tensor | None = None
    rows: Slots | None = None
    chunks: Chunks | None = None
    context: ContextGroup | None = None
    prefix: "Layout | None" = None
    open_chunk: "OpenChunk | None" = None
    parts: Parts | None = None
    plan: "LayoutPlan | None" = None

    def by_part(self, read: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        """Apply a function that mixes tokens to each part of a pack, or to the whole batch: [B, T, ...] each -> [B, T, e].

        `read` receives the tensors of some tokens, with None for None, and the layout of these tokens.
        """
        if self.parts is None:
            return read(*tensors, self)
        tokens, layouts = self.parts
        nothing = [None] * len(layouts)
        cut = (nothing if x is None else x.index_select(1, tokens).split(self.parts.sizes, 1) for x in tensors)
        out = torch.cat([read(*part, layout) for *part, layout in zip(*cut, layouts, strict=True)], 1)
        return torch.empty_like(out).index_copy(1, tokens, out)

    def with_prefix(self, causal: Tensor, attend: "Callable[[Layout], Tensor]") -> Tensor:
        """Let every prefix token attend to its whole prefix.

        Args:
            causal: the outputs of a causal attention over everything, [B, T, e].
            attend: the same attention, bidirectional, over the tokens of a layout. It is called with that of the prefixes.

        Returns:
            [B, T, e], the outputs of `attend` at the tokens of prefixes, and the causal ones at all others.
        """
        if self.prefix is None:
            return causal
        bidirectional, mask = attend(self.prefix), self.prefix.mask
        return bidirectional if mask is None else torch.where(mask[..., None], bidirectional, causal)

    def by_row(self, attend: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Apply an attention to every document as a separate row: [B, T, f] each -> [B, T, e].

        `attend` maps [R, L, f] each, and `real`, bool [R, L] or None if there is no padding, to [R, L, e].
        """
        if self.rows is None:
            return attend(*tensors, None)
        out = attend(*(self.rows.arrange(x).flatten(0, 1) for x in tensors), self.rows.real.flatten(0, 1))
        return self.rows.restore(out.view(*self.rows.real.shape, out.shape[-1]))

    def require_chunks(self) -> Chunks:
        """The chunks; ArgumentError for a layout that was planned without a chunk size."""
        if self.chunks is None:
            raise ArgumentError("layout", "has no chunks: make it with a plan that has a chunk_size.")
        return self.chunks

    def elsewhere(self, causal: bool) -> int:
        """The number of tokens in other processes of the context that a token attends to."""
        if self.context is None:
            return 0
        return self.positions.shape[-1] * (self.context.rank if causal else self.context.size - 1)


class LayoutPlan(NamedTuple):
    """What a mixer needs from a layout.

    Attributes:
        rotary_width: s, the width of the vectors that are rotated; None for no rotation.
        rotary_features: the number of their features that are rotated; None for all.
        bias_width: the width of the vectors of a rotary relative bias; None without one.
        bias_places: the number of places that such a bias spans; None for the length of a row.
        chunk_size: C of a mixer with chunks; None for a mixer over whole rows.
        normalization: how a mixer with chunks divides scores and sums, for its steps; None for others.
        max_length: the maximum number of tokens in a row; None for no limit.
        token_shift: whether tokens take half of their features from the previous token.
        dtype: the dtype of the rotations.
    """

    rotary_width: int | None = None
    rotary_features: int | None = None
    bias_width: int | None = None
    bias_places: int | None = None
    chunk_size: int | None = None
    normalization: Normalization | None = None
    max_length: int | None = None
    token_shift: bool = False
    dtype: torch.dtype = torch.float32


NO_PLAN = LayoutPlan()
MIN_CHUNK_SIZE = 16
"""The minimum size of the chunks of short documents or rows. Sizes are powers of two: few sizes need few kernels."""


def make_layout(
    shape: tuple[int, ...],
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    *,
    device: torch.device,
    plan: LayoutPlan = NO_PLAN,
    context: ContextGroup | None = None,
    whole_chunks: bool = False,
) -> Layout:
    """Make the layout of a batch, as far as a mixer needs it. Nothing else reads the values of `cu_seqlens`.

    With `cu_seqlens`, and with a mask or prefixes for a mixer over whole rows, it copies the lengths of the documents to the
    host. Compiled code cannot do this. It makes room for every possible division into documents, and leaves slots empty.

    Args:
        shape: [B, T, ...], the shape of the tokens.
        mask: [B, T], bool or integers 0 and 1, True for real tokens.
        cu_seqlens: int [D + 1], the boundaries of D documents packed into a single row. On the CPU, they are read without
            waiting for a GPU.
        prefix_lengths: int [B], or [D] with `cu_seqlens`: the number of real tokens at the start of each row, or document, that
            are its prefix.
        device: the device of the tokens.
        plan: what the mixer needs.
        context: the processes over which every sequence is split.
        whole_chunks: whether a pack of short documents is cut into chunks of the full size, too, all in one part. Packs then
            have the same structure, so that compiled code which takes a layout suits them all.

    Raises:
        ArgumentError: if `mask`, `cu_seqlens` or `prefix_lengths` do not match the tokens, or are given with a `context`.
    """
    batch, length = shape[:2]
    mask = as_mask("mask", mask, batch, length, device)
    lengths = check_documents(shape, cu_seqlens)
    for name, value in (("mask", mask), ("cu_seqlens", cu_seqlens), ("prefix_lengths", prefix_lengths)):
        if context is not None and value is not None:
            raise ArgumentError(
                name,
                "is given, but sequences that are split over processes can have neither padding, document boundaries nor "
                f"prefixes: pass slices of whole sequences to every process, without {name}.",
            )
    document: Tensor | None = None
    starts = torch.zeros(1, dtype=torch.long, device=device)
    if cu_seqlens is not None:
        starts = to_device(cu_seqlens.long(), device)
        document = torch.arange(starts.shape[0] - 1, device=device).repeat_interleave(starts.diff(), output_size=length)
    positions = count_positions(length, mask, starts, document, device)
    if context is not None:
        positions = positions + context.rank * length
    layout = Layout(mask, positions, document, None if document is None else starts, context=context)
    if plan.token_shift and (mask is not None or document is not None):
        layout = layout._replace(previous=previous_tokens(positions, mask))
    prefix = None
    if prefix_lengths is not None:
        prefix = prefix_tokens(prefix_lengths, batch, positions, mask, document, layout.document_starts)
    if lengths is None or context is not None or torch.compiler.is_compiling():  # compiled code may get any length
        return _arranged(layout, prefix, batch, lengths, plan)
    if whole_chunks and document is not None and plan.chunk_size is not None:
        return _arranged(layout, prefix, batch, lengths, plan)
    groups = similar_documents(lengths)
    if len(groups) < 2:
        return _arranged(layout, prefix, batch, lengths, _for_lengths(plan, lengths))._replace(plan=plan)
    return layout._replace(parts=_parts(layout, prefix, groups, lengths, plan), plan=plan)


def _for_lengths(plan: LayoutPlan, lengths: list[int]) -> LayoutPlan:
    """The plan with chunks no larger than the longest document needs, rounded up to a power of two."""
    if plan.chunk_size is None:
        return plan
    needed = max(MIN_CHUNK_SIZE, 1 << (max([1, *lengths]) - 1).bit_length())
    return plan._replace(chunk_size=min(plan.chunk_size, needed))


def _parts(layout: Layout, prefix: Tensor | None, groups: list[list[int]], lengths: list[int], plan: LayoutPlan) -> Parts:
    """Split a pack into a separate pack for each group of documents."""
    device, every_length = layout.positions.device, torch.tensor(lengths)
    group_of = torch.full_like(every_length, len(groups))  # the group of documents without tokens
    for index, group in enumerate(groups):
        group_of[group] = index
    tokens = to_device(group_of.repeat_interleave(every_length).argsort(stable=True), device)
    layouts, first = [], 0
    for group in groups:
        own = every_length[group]
        size = int(own.sum())
        here = tokens[first : first + size]
        first += size
        part = Layout(
            None if layout.mask is None else layout.mask[:, here],
            layout.positions[..., here],
            to_device(torch.arange(len(group)).repeat_interleave(own), device),
            to_device(F.pad(own.cumsum(0), (1, 0)), device),
        )
        of_part = own.tolist()
        own_prefix = None if prefix is None else prefix[:, here]
        layouts.append(_arranged(part, own_prefix, 1, of_part, _for_lengths(plan, of_part)))
    return Parts(tokens, tuple(layouts))


def _arranged(layout: Layout, prefix: Tensor | None, batch: int, lengths: list[int] | None, plan: LayoutPlan) -> Layout:
    """Add rows or chunks, rotations, and the layout of the prefixes, whose tokens `prefix`, bool [B, T], marks."""
    device, length = layout.positions.device, layout.positions.shape[-1]
    n_places = length
    if plan.chunk_size is not None:
        layout = layout._replace(chunks=cut_documents(batch, plan.chunk_size, lengths, layout))
    elif layout.mask is not None or layout.document is not None:
        n_places = longest_row(lengths, layout, plan.max_length)
        layout = layout._replace(rows=document_rows(batch, n_places, layout))
    layout = _with_rotations(layout, plan, plan.bias_places or n_places, device)
    if prefix is None:
        return layout
    return layout._replace(prefix=_arranged(layout._replace(mask=prefix), None, batch, lengths, plan))


def cut_chunks(rows: Tensor, chunk_size: int, mask: Tensor | None = None) -> Chunks:
    """The chunks of rows [B, T, ...]; `mask`, bool [B, T], is True for real tokens."""
    return make_layout(rows.shape, mask, device=rows.device, plan=LayoutPlan(chunk_size=chunk_size)).require_chunks()


def stream_layout(position: int, count: int, *, device: torch.device, plan: LayoutPlan = NO_PLAN) -> Layout:
    """The layout of the next `count` tokens of streams that have read `position` tokens."""
    layout = Layout(None, torch.arange(position, position + count, device=device))
    return _with_rotations(layout, plan, plan.bias_places or position + count, device)


def prefix_layout(shape: tuple[int, ...], *, device: torch.device, plan: LayoutPlan = NO_PLAN) -> Layout:
    """The layout of the first tokens [B, N, ...] of streams, all of them the prefix of their stream."""
    layout = make_layout(shape, device=device, plan=plan)
    return layout._replace(prefix=layout)


def step_layout(positions: Tensor, *, plan: LayoutPlan = NO_PLAN) -> Layout:
    """The layout of one more token for each of B streams at their own positions, int64 [B]."""
    return _with_rotations(Layout(None, positions[:, None]), plan, plan.bias_places or 0, positions.device)


def _with_rotations(layout: Layout, plan: LayoutPlan, n_places: int, device: torch.device) -> Layout:
    layout = layout._replace(plan=plan)
    if plan.rotary_width is not None:
        layout = rotated_by(layout, layout.positions, plan.rotary_width, plan.dtype, plan.rotary_features)
    if plan.bias_width is not None:
        places = torch.arange(n_places, device=device)
        layout = layout._replace(place_rotations=rotary_table(places, plan.bias_width // 2, plan.dtype))
    return layout


def rotated_by(layout: Layout, positions: Tensor, width: int, dtype: torch.dtype, rotated: int | None = None) -> Layout:
    """Add rotations by `positions`, [T] or [B, T], of vectors of this width, or of `rotated` of their features."""
    if layout.parts is not None:
        tokens, layouts = layout.parts
        own = positions[..., tokens].split(layout.parts.sizes, -1)
        turned = tuple(rotated_by(part, of_part, width, dtype, rotated) for part, of_part in zip(layouts, own, strict=True))
        return layout._replace(parts=Parts(tokens, turned))
    rotations = partial_rotary_table(positions, width, rotated, dtype)
    if layout.prefix is not None:
        layout = layout._replace(prefix=rotated_by(layout.prefix, positions, width, dtype, rotated))
    chunks = layout.chunks
    if chunks is None:
        return layout._replace(rotations=rotations)
    by_row = rotations if rotations.dim() == 4 else rotations[:, None]
    if chunks.slots is not None:
        by_row = by_row.expand(-1, chunks.slots.slot.shape[0], -1, -1)
    cut = torch.stack([chunks.cut(x) for x in by_row])
    return layout._replace(rotations=rotations, chunk_rotations=cut)
