"""Token shift: the first half of a token's features is taken from the previous token.

    shifted[t] = [x[t - 1, :h], x[t, h:]]      h = ceil(d / 2), and zeros before the first token

t counts the real tokens of a document. The half is that of FLASH-pytorch (`shift_tokens`) and, for odd d, of `torch.chunk`.

Shapes: B batch, T tokens, N new tokens of a stream, d features, h of them shifted.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.context import ContextGroup, sum_elsewhere
from lineartime.ops.state import in_place, writable


def shifted_width(d_model: int) -> int:
    """h, the number of the d features that are taken from the previous token."""
    return (d_model + 1) // 2


def shift_tokens(x: Tensor, positions: Tensor | None, context: ContextGroup | None = None) -> Tensor:
    """Shift whole sequences: [B, T, d] -> [B, T, d].

    Args:
        x: [B, T, d], the tokens of documents one after the other.
        positions: int64 [T], the position of each token in its document; None if every row is one document.
        context: the processes over which every sequence is split; None if x holds whole sequences.
    """
    width = shifted_width(x.shape[-1])
    first, rest = x[..., :width], x[..., width:]
    if context is not None:  # this slice continues that of the previous process, like a stream
        last = first[:, -1:].sum(1)  # zeros for a slice without tokens, which the attention rejects with an error
        return shift_next(x, sum_elsewhere(last, context, "just before"))[0]
    return torch.cat([tokens_before(first, positions), rest], -1)


def tokens_before(x: Tensor, positions: Tensor | None) -> Tensor:
    """What stands before each token of whole sequences, [B, T, d]: see `shift_tokens`."""
    before = F.pad(x, (0, 0, 1, 0))[:, :-1]
    return before if positions is None else before.masked_fill((positions == 0)[:, None], 0.0)


def shift_next(x: Tensor, last: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Shift N more tokens of streams.

    Args:
        x: [B, N, d].
        last: [B, h], the first half of the last token before them; zeros before the first token.
        counts: int64 [B], the number of tokens that are real, which come first; None if all are.

    Returns:
        [B, N, d], and the new `last`, in the dtype of the old one; that of a single token in its memory, too.
    """
    width = last.shape[-1]
    first, rest = x[..., :width], x[..., width:]
    read = torch.cat([last[:, None].to(x.dtype), first], 1)
    end = read[:, -1] if counts is None else read.gather(1, counts[:, None, None].expand(-1, 1, width))[:, 0]
    if x.shape[1] == 1 and in_place(x, last):
        last = writable(last).copy_(end)
    else:
        last = end.to(last.dtype).contiguous()
    return torch.cat([read[:, :-1], rest], -1), last
