"""How layouts are made: of a batch, once, when it enters a model; and of the next tokens of streams.

Shapes: B batch, T tokens, D documents.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.errors import ArgumentError, LineartimeError
from lineartime.ops.arrange import count_positions, cut_documents, document_rows, longest_row, to_device
from lineartime.ops.checks import as_mask, check_documents
from lineartime.ops.chunks import Chunks
from lineartime.ops.context import ContextGroup
from lineartime.ops.layout import NO_PLAN, Layout, LayoutPlan, Parts
from lineartime.ops.packs import similar_documents
from lineartime.ops.positions import partial_rotary_table, rotary_table
from lineartime.ops.prefix import prefix_tokens
from lineartime.ops.token_shift import previous_tokens

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
    if torch.jit.is_tracing():
        raise LineartimeError("A layer cannot be recorded by torch.jit.trace, whose records have one length: use torch.export.")
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
    device, every_length = layout.positions.device, torch.tensor(lengths, device="cpu")
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
            to_device(torch.arange(len(group), device="cpu").repeat_interleave(own), device),
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
