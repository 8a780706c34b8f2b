"""Translate the arguments of transformers that describe a batch into those of lineartime.

Shapes: B batch, T tokens, P tokens read before, D documents.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.ops.checks import as_mask, require


def checked_mask(attention_mask: Tensor | None, embedded: Tensor, past: int = 0) -> Tensor | None:
    """The mask of the new tokens, bool [B, T]; None if all tokens of `embedded` [B, T, d] are real.

    The given mask may also cover the `past` tokens of a cache, [B, P + T].
    """
    if attention_mask is None:
        return None
    batch, length = embedded.shape[:2]
    if past and attention_mask.dim() == 2 and attention_mask.shape[1] != length:
        if attention_mask.shape[1] != past + length:
            raise ArgumentError(
                "attention_mask",
                f"has shape {list(attention_mask.shape)}, but must be [B, T] = {[batch, length]}, or [B, past + T] with the "
                f"{past} tokens of the cache.",
            )
        attention_mask = attention_mask[:, past:]
    if attention_mask.is_floating_point():  # some collators make float masks
        binary = (attention_mask == 0) | (attention_mask == 1)
        require(binary, "attention_mask", "has values other than 0 and 1, but must be 1 for real tokens and 0 for padding.")
        attention_mask = attention_mask != 0
    mask = as_mask("attention_mask", attention_mask, batch, length, embedded.device)
    if mask is not None and not torch.compiler.is_compiling() and bool(mask.all()):
        return None  # rows without padding are read faster
    return mask


def real_tokens(mask: Tensor | None, tokens: Tensor) -> Tensor:
    """Which tokens [B, T, ...] are real, bool [B, T]; without a mask, all are."""
    return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device) if mask is None else mask


def check_labels(labels: Tensor, logits: Tensor) -> None:
    """Raise ArgumentError unless there is a label for each of the logits [B, T, V].

    Losses flatten both, so that labels [T, B] would be compared with the logits of other tokens.
    """
    if labels.shape != logits.shape[:-1]:
        shape, wanted = list(labels.shape), list(logits.shape[:-1])
        raise ArgumentError("labels", f"has shape {shape}, but must be [B, T] = {wanted}, one for each token.")


def packed_boundaries(
    mask: Tensor | None,
    embedded: Tensor,
    /,  # `_` may hold arguments of these names
    cu_seq_lens_q: Tensor | None = None,
    position_ids: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """The boundaries, int64 [D + 1], of documents packed into one row, from whichever argument gives them; None if none does.

    A document begins where its position is 0, or where the index of the sequence changes.

    Raises:
        ArgumentError: for positions that differ from those that the model computes itself, or documents that are not alone in
            a single row without padding.
    """
    if cu_seq_lens_q is not None:
        return cu_seq_lens_q
    begins = None if position_ids is None else _begins_by_positions(position_ids, mask, embedded)
    if begins is None and seq_idx is not None:
        begins = _begins_by_indices(seq_idx, mask, embedded)
    return None if begins is None else F.pad(begins.nonzero()[:, 0], (0, 1), value=embedded.shape[1])


def _begins_by_indices(seq_idx: Tensor, mask: Tensor | None, embedded: Tensor) -> Tensor | None:
    """Where documents begin, bool [T]; None if each row is one document."""
    batch, length = embedded.shape[:2]
    if seq_idx.shape != (batch, length):
        raise ArgumentError("seq_idx", f"has shape {list(seq_idx.shape)}, but must be [B, T] = [{batch}, {length}].")
    changes = seq_idx.diff(dim=1) != 0
    if not bool(changes.any()):
        return None
    if batch > 1 or mask is not None:
        raise ArgumentError(
            "seq_idx",
            "has several documents in a row, but only those of a single unpadded row can be told apart: pack one row.",
        )
    return F.pad(changes[0], (1, 0), value=True)


def _begins_by_positions(position_ids: Tensor, mask: Tensor | None, embedded: Tensor) -> Tensor | None:
    """Where documents begin, bool [T]; None if each row is one document."""
    batch, length = embedded.shape[:2]
    if position_ids.dim() != 2 or position_ids.shape[1] != length or position_ids.shape[0] not in (1, batch):
        raise ArgumentError("position_ids", f"has shape {list(position_ids.shape)}, but must be [B, T] = [{batch}, {length}].")
    place = torch.arange(length, device=position_ids.device)
    counted = place if mask is None else (mask.cumsum(1) - 1) * mask
    if bool(((position_ids if mask is None else position_ids * mask) == counted).all()):
        return None
    begins = position_ids[0] == 0
    start = torch.where(begins, place, 0).cummax(0).values  # of each token's document
    if batch > 1 or mask is not None or not bool((position_ids[0] == place - start).all()):
        raise ArgumentError(
            "position_ids",
            "differs from the model's own positions, which count the real tokens of each row from 0, or of each document "
            "packed into a single unpadded row: leave it out.",
        )
    return begins
