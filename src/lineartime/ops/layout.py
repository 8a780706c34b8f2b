"""Where real tokens stand: padded batches and packs of documents, laid out densely.

Shapes: B batch, T tokens, D documents, S slots, f features.
A document is a row of the batch, or, with `cu_seqlens`, one of the sequences packed into a single row.
"""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def check_tokens(shape: torch.Size, mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Raise ValueError unless `mask` and `cu_seqlens` fit tokens of shape [B, T, ...]."""
    batch, length = shape[:2]
    check_mask("mask", mask, batch, length)
    if cu_seqlens is not None:
        if not isinstance(cu_seqlens, Tensor):
            raise ValueError(f"cu_seqlens is a {type(cu_seqlens).__name__}, but must be a tensor.")
        if batch != 1:
            raise ValueError(f"cu_seqlens packs documents into one row, but the batch has {batch} rows: use [1, total].")
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.numel() < 1:
            raise ValueError("cu_seqlens must be a one-dimensional integer tensor [0, end of document 1, ..., total].")
        ends = cu_seqlens.tolist()
        if ends[0] != 0 or ends[-1] != length or any(a > b for a, b in pairwise(ends)):
            raise ValueError(f"cu_seqlens is {_shortened(ends)}, but must rise from 0 to the {length} tokens of the row.")


def check_mask(argument: str, mask: Tensor | None, batch: int, length: int) -> None:
    """Raise ValueError, naming the argument, unless the mask is None or bool [batch, length]."""
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise ValueError(f"{argument} is a {type(mask).__name__}, but must be a tensor.")
    if mask.dtype != torch.bool:
        raise ValueError(f"{argument} has dtype {mask.dtype}, but must be torch.bool, True for real tokens.")
    if mask.shape != (batch, length):
        raise ValueError(f"{argument} has shape {list(mask.shape)}, but must be [B, T] = [{batch}, {length}].")


def _shortened(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"[{', '.join(map(str, numbers[:6]))}, ..., {numbers[-1]}]"


def document_lengths(length: int, cu_seqlens: Tensor | None) -> list[int]:
    """The number of tokens, padding included, of each document of a row."""
    return [length] if cu_seqlens is None else cu_seqlens.diff().tolist()


def token_positions(length: int, mask: Tensor | None, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """The position of every token in its document, real tokens alone being counted: int64, [T] or [B, T]."""
    if cu_seqlens is None:
        start = torch.zeros(length, dtype=torch.long, device=device)
    else:
        lengths = cu_seqlens.diff().to(device)
        start = cu_seqlens[:-1].to(device).long().repeat_interleave(lengths, output_size=length)
    if mask is None:
        return torch.arange(length, device=device) - start
    real_before = F.pad(mask.cumsum(1), (1, 0))
    return real_before[:, :-1] - real_before[:, start]


def by_document(
    attend: Callable[..., Tensor], *tensors: Tensor, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Apply a definition to the real tokens of each document alone, for oracles, which need not care about padding then.

    `attend` maps the tensors of one document, [n, f] each with n > 0, to [n, e]; the last of `tensors` is e wide. All of them
    are [B, T, f]; the result is [B, T, e], with zeros at padding.
    """
    values = tensors[-1]
    out = torch.zeros_like(values)
    for b in range(values.shape[0]):
        start = 0
        for length in document_lengths(values.shape[1], cu_seqlens):
            real = [t for t in range(start, start + length) if mask is None or mask[b, t]]
            start += length
            if real:
                rows = torch.tensor([b] * len(real)), torch.tensor(real)
                out = out.index_put(rows, attend(*(tensor[b, real] for tensor in tensors)))
    return out


class TokenLayout(NamedTuple):
    """A map from the tokens of a batch to slots, with the real tokens of each document side by side in order.

    Attributes:
        slots: int64 [B, T], the slot of each token; padding has S, one behind the last slot.
        real: bool [B, rows, slots of a row], which slots hold a real token; a batch row has S = rows * slots of a row.
    """

    slots: Tensor
    real: Tensor

    def arrange(self, x: Tensor) -> Tensor:
        """[B, T, f] -> [B, rows, slots of a row, f], with zeros in the slots that hold no real token."""
        batch, rows, size = self.real.shape
        index = self.slots[..., None].expand(-1, -1, x.shape[-1])
        arranged = x.new_zeros(batch, rows * size + 1, x.shape[-1]).scatter(1, index, x)
        return arranged[:, :-1].view(batch, rows, size, x.shape[-1])

    def restore(self, y: Tensor) -> Tensor:
        """[B, rows, slots of a row, f] -> [B, T, f], with zeros at padding: the way back from `arrange`."""
        y = F.pad(y.flatten(1, 2), (0, 0, 0, 1))
        return y.gather(1, self.slots[..., None].expand(-1, -1, y.shape[-1]))


def document_rows(batch: int, length: int, mask: Tensor | None, cu_seqlens: Tensor | None, device: torch.device) -> TokenLayout:
    """One row per document, as long as the longest without its padding: for attention that looks at whole documents."""
    lengths = document_lengths(length, cu_seqlens)
    longest = max(lengths, default=0)
    if mask is not None:
        longest = max((int(document.sum(1).max()) for document in mask.split(lengths, 1) if document.numel()), default=0)
    starts = [document * longest for document in range(len(lengths))]
    return _layout(batch, mask, lengths, starts, (len(lengths), longest), device)


def document_chunks(
    batch: int, length: int, chunk_size: int, mask: Tensor | None, cu_seqlens: Tensor | None, device: torch.device
) -> tuple[TokenLayout, list[int]]:
    """Each document cut into chunks from its own start, and the number of chunks of each document."""
    lengths = document_lengths(length, cu_seqlens)
    chunks = [-(-tokens // chunk_size) for tokens in lengths]
    starts = [chunk_size * before for before in accumulate(chunks, initial=0)][: len(chunks)]
    return _layout(batch, mask, lengths, starts, (sum(chunks), chunk_size), device), chunks


def _layout(
    batch: int, mask: Tensor | None, lengths: list[int], starts: list[int], rows: tuple[int, int], device: torch.device
) -> TokenLayout:
    """The layout in which document i, of so many tokens with padding, begins at slot starts[i]."""
    length = sum(lengths)
    per_document = torch.tensor(lengths, dtype=torch.long, device=device)
    document = torch.arange(len(lengths), device=device).repeat_interleave(per_document, output_size=length)
    first = (per_document.cumsum(0) - per_document)[document]
    start = torch.tensor(starts, dtype=torch.long, device=device)[document]
    n_slots = rows[0] * rows[1]
    if mask is None:
        slots = (start + torch.arange(length, device=device) - first).expand(batch, length)
    else:
        real_before = F.pad(mask.cumsum(1), (1, 0))
        slots = torch.where(mask, start + real_before[:, :-1] - real_before[:, first], n_slots)
    real = torch.zeros(batch, n_slots + 1, dtype=torch.bool, device=device).scatter(1, slots, True)
    return TokenLayout(slots, real[:, :-1].view(batch, *rows))
