"""The arrangement of the tokens of a layout in rows or chunks, and their positions.

Shapes: B batch, T tokens, R rows, L slots of a row, C chunk size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.checks import require
from lineartime.ops.chunks import Chunks, Slots
from lineartime.ops.layout import Layout
from lineartime.ops.tracing import is_known, under_transform


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device. Copies to a GPU use pinned memory, so that the host does not wait."""
    if device.type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def count_positions(length: int, mask: Tensor | None, starts: Tensor, document: Tensor | None, device: torch.device) -> Tensor:
    """The position of every token in its document, counting only real tokens, and 0 at padding: int64, [T] or [B, T]."""
    start = torch.zeros(length, dtype=torch.long, device=device) if document is None else starts[document]
    if mask is None:
        return torch.arange(length, device=device) - start
    real_before = F.pad(mask.cumsum(1), (1, 0))
    return (real_before[:, :-1] - real_before[:, start]).masked_fill(~mask, 0)


def longest_row(lengths: list[int] | None, layout: Layout, limit: int | None) -> int:
    """The number of real tokens of the longest document; in compiled code and under vmap, an upper bound of it."""
    mask, real_tokens = layout.mask, layout.positions + 1
    traced = torch.compiler.is_compiling()
    longest = real_tokens.shape[-1] if traced or not lengths else max(lengths)
    if traced or under_transform():
        if limit is None or longest <= limit:
            return longest
        real = real_tokens if mask is None else real_tokens * mask
        require(real <= limit, "max_length", f"is {limit}, but a sequence has more tokens.")
        return limit
    return int((real_tokens * mask).max()) if mask is not None and mask.numel() else longest


def document_rows(batch: int, longest: int, layout: Layout) -> Slots:
    """One row per document, as long as the longest document without padding, for attention over whole documents."""
    if layout.document is None or layout.document_starts is None:
        return _slots(batch, torch.zeros_like(layout.positions), layout, 1, longest)
    return _slots(batch, layout.document * longest, layout, layout.document_starts.shape[0] - 1, longest)


def cut_documents(batch: int, chunk_size: int, lengths: list[int] | None, layout: Layout) -> Chunks:
    """Cut each document into chunks, beginning at its own start."""
    device, length, starts = layout.positions.device, layout.positions.shape[-1], layout.document_starts
    if layout.document is None or starts is None:
        n_chunks = longest = (length + chunk_size - 1) // chunk_size if length else 1
        document_starts = n_chunks * torch.arange(2, device=device)  # needs no copy to a GPU
        if layout.mask is not None:
            slots = _slots(batch, torch.zeros_like(layout.positions), layout, n_chunks, chunk_size)
            return Chunks(length, chunk_size, n_chunks, longest, slots, slots.real, document_starts, None)
        real = None
        if not is_known(n_chunks * chunk_size == length):
            in_use = torch.arange(n_chunks * chunk_size, device=device) < length
            real = in_use.expand(batch, -1).unflatten(1, (-1, chunk_size))
        return Chunks(length, chunk_size, n_chunks, longest, None, real, document_starts, None)
    if lengths is None:  # at most, every document ends with a chunk that is not full
        n_chunks = longest = length // chunk_size + starts.shape[0] - 1
    else:
        per_document = [-(-tokens // chunk_size) for tokens in lengths]
        n_chunks, longest = sum(per_document), max(per_document, default=0)
    chunks = (starts.diff() + chunk_size - 1) // chunk_size
    document_starts = F.pad(chunks.cumsum(0), (1, 0))
    slots = _slots(batch, document_starts[layout.document] * chunk_size, layout, n_chunks, chunk_size)
    ended = torch.bucketize(torch.arange(n_chunks, device=device), document_starts[1:], right=True)
    of_chunk = ended.clamp(max=max(0, starts.shape[0] - 2))  # unused chunks belong to the last document
    return Chunks(length, chunk_size, n_chunks, longest, slots, slots.real, document_starts, of_chunk)


def _slots(batch: int, first: Tensor, layout: Layout, rows: int, size: int) -> Slots:
    """Assign each real token the slot with the index `first` + position; padding has no slot."""
    mask, n_slots = layout.mask, rows * size
    index = (first + layout.positions).expand(batch, -1)
    if mask is not None:
        index = index.masked_fill(~mask, n_slots)
    real = torch.zeros(batch, n_slots + 1, dtype=torch.bool, device=index.device).scatter(1, index, True)
    return Slots(index, real[:, :-1].view(batch, rows, size))
