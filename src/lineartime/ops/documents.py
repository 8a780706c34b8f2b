"""Definitions applied to one document at a time, so that they need not handle padding and packing."""

from collections.abc import Callable

import torch
from torch import Tensor


def by_document(
    attend: Callable[..., Tensor], *tensors: Tensor, document: Tensor | None = None, real: Tensor | None = None
) -> Tensor:
    """Apply a definition to the real tokens of each document separately; slow.

    `attend` maps the tensors of one document, [n, f] each with n > 0, to [n, e]; the last of `tensors` has width e. All of them
    are [B, T, f]; the result is [B, T, e], with zeros at padding. `document`, int64 [T], is that of each token, and `real`,
    bool [B, T], is False for padding; None for one document, and if there is no padding.
    """
    rows, length, _ = tensors[-1].shape
    if document is None:
        document = torch.zeros(length, dtype=torch.long, device=tensors[-1].device)
    out = torch.zeros_like(tensors[-1])
    for row in range(rows):
        for one in document.unique():
            own = document == one if real is None else (document == one) & real[row]
            tokens = own.nonzero()[:, 0]
            if len(tokens):
                places = (torch.full_like(tokens, row), tokens)
                out = out.index_put(places, attend(*(tensor[row, tokens] for tensor in tensors)))
    return out
