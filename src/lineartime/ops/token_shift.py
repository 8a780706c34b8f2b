"""Token shift: the first half of a token's features is taken from the previous token.

    shifted[t] = [x[t - 1, :h], x[t, h:]]      h = ceil(d / 2), and zeros before the first token

t counts the real tokens of a document. The half is that of FLASH-pytorch (`shift_tokens`) and, for odd d, of `torch.chunk`.

Shapes: B batch, T tokens, N new tokens of a stream, d features, h of them shifted.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.context import ContextGroup, sum_elsewhere


def shifted_width(d_model: int) -> int:
    """h, the number of the d features that are taken from the previous token."""
    return (d_model + 1) // 2


def shift_tokens(x: Tensor, previous: Tensor | None = None, context: ContextGroup | None = None) -> Tensor:
    """Shift whole sequences: [B, T, d] -> [B, T, d].

    Args:
        x: [B, T, d].
        previous: int64 [B or 1, T], the place of the token before each one, from `previous_tokens`; None if every row is a
            single document without padding.
        context: the processes over which every sequence is split; None if x holds whole sequences.
    """
    width = shifted_width(x.shape[-1])
    first, rest = x[..., :width], x[..., width:]
    if context is not None:  # this slice continues that of the previous process, like a stream
        last = first[:, -1:].sum(1)  # zeros for a slice without tokens, which the attention rejects with an error
        return shift_next(x, sum_elsewhere(last, context, "just before"))[0]
    if previous is None:
        before = F.pad(first, (0, 0, 1, 0))[:, :-1]
    else:
        before = F.pad(first, (0, 0, 0, 1)).gather(1, previous[..., None].expand(x.shape[0], -1, width))
    return torch.cat([before, rest], -1)


def shift_next(x: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Shift N more tokens of streams.

    Args:
        x: [B, N, d].
        last: [B, h], the first half of the last token before them; zeros before the first token.

    Returns:
        [B, N, d], and the new `last`, in the dtype of the old one.
    """
    width = last.shape[-1]
    first, rest = x[..., :width], x[..., width:]
    read = torch.cat([last[:, None].to(x.dtype), first], 1)
    return torch.cat([read[:, :-1], rest], -1), read[:, -1].to(last.dtype)


def previous_tokens(positions: Tensor, mask: Tensor | None) -> Tensor:
    """The place of the real token before each token in its document; T, one past the last place, if there is none.

    Args:
        positions: int64 [T] or [B, T], the position of each token in its document, counting only real tokens.
        mask: bool [B, T], True for real tokens; None if all are real.

    Returns:
        int64 [B or 1, T].
    """
    length = positions.shape[-1]
    places = torch.arange(length, device=positions.device)
    if mask is None:
        before = places - 1
    else:
        rank = F.pad(mask.cumsum(1), (1, 0))[:, :-1]  # real tokens of the row before each
        slot = rank.masked_fill(~mask, length)  # padding goes to one past the last place
        of_rank = slot.new_zeros(slot.shape[0], length + 1).scatter(1, slot, places.expand_as(slot))
        before = of_rank.gather(1, (rank - 1).clamp(min=0))
    before = before.masked_fill(positions == 0, length)
    return before if before.dim() == 2 else before[None]
