"""Definitions applied to one document at a time, so that they need not handle padding and packing."""

from collections.abc import Callable

import torch
from torch import Tensor

from lineartime.ops.layout import Layout


def by_document(attend: Callable[..., Tensor], *tensors: Tensor, layout: Layout) -> Tensor:
    """Apply a definition to the real tokens of each document separately; slow.

    `attend` maps the tensors of one document, [n, f] each with n > 0, to [n, e]; the last of `tensors` has width e. All of them
    are [B, T, f]; the result is [B, T, e], with zeros at padding.
    """
    batch, length, _ = tensors[-1].shape
    document = torch.zeros(length, dtype=torch.long, device=tensors[-1].device) if layout.document is None else layout.document
    out = torch.zeros_like(tensors[-1])
    for b in range(batch):
        for one in document.unique():
            real = document == one if layout.mask is None else (document == one) & layout.mask[b]
            tokens = real.nonzero()[:, 0]
            if len(tokens):
                rows = (torch.full_like(tokens, b), tokens)
                out = out.index_put(rows, attend(*(tensor[b, tokens] for tensor in tensors)))
    return out
