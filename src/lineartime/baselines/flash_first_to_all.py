"""FLASH for fine-tuning: first tokens that attend with softmax, in two strengths.

Shapes: B batch, T tokens, G chunks, C chunk size, s query/key width, e value width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 4.3.

    [CLS]:         the first token of the document attends to its chunk with softmax in the place of relu^2
    first-to-all:  the first token of every chunk attends to the whole document with softmax

Both replace a query's quadratic part; its linear part stays. The relative bias belongs to places in a chunk, so that
first-to-all goes without.
"""

from typing import ClassVar

import torch
from torch import Tensor

from lineartime.baselines.flash_parts import FLASHInParts
from lineartime.layers.bidirectional import BidirectionalMixer
from lineartime.ops.activations import attention_weights
from lineartime.ops.chunks import Chunks

# 1. The definitions, of the quadratic part for one document: [T, s], [T, s], [T, e] -> [T, e] for the first tokens ------


def cls_softmax_oracle(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, chunk_size: int) -> dict[int, Tensor]:
    """The new output of the document's first token; bias: [C, C]."""
    near = slice(0, min(chunk_size, len(v)))
    weights = (k[near] @ q[0] / q.shape[-1] ** 0.5 + bias[0, near]).softmax(0)
    return {0: weights @ v[near]}


def first_to_all_oracle(q: Tensor, k: Tensor, v: Tensor, *, chunk_size: int) -> dict[int, Tensor]:
    """The new outputs of the first tokens of all chunks."""
    return {t: (k @ q[t] / q.shape[-1] ** 0.5).softmax(0) @ v for t in range(0, len(v), chunk_size)}


# 2. The layers --------------------------------------------------------------------------------------------------------


class CLSFLASH(BidirectionalMixer, FLASHInParts):
    """`FLASH` whose first token, [CLS], attends to its chunk with softmax; arguments as there."""

    why_not_causal: ClassVar[str] = "its first token has to see the tokens that follow"

    def quadratic_part(self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks) -> Tensor:
        """With the first row of each document's first chunk exchanged."""
        plain, bias = super().quadratic_part(q, k, v, chunks), self.chunk_bias()
        weights = attention_weights(
            q[:, :, :1] @ k.mT,
            d_qk=self.d_qk,
            visible=None if chunks.real is None else chunks.real[:, :, None],
            bias=None if bias is None else bias[:1],
            activation="softmax",
            published_length=None,
        )
        document = chunks.documents(v.device)
        is_first = torch.ones_like(document, dtype=torch.bool)
        is_first[1:] = document[1:] != document[:-1]
        first = torch.where(is_first[:, None, None], weights.to(v.dtype) @ v, plain[:, :, :1])
        return torch.cat([first, plain[:, :, 1:]], 2)


class FirstToAllFLASH(BidirectionalMixer, FLASHInParts):
    """`FLASH` in which the first token of every chunk attends to the whole document with softmax; arguments as there."""

    why_not_causal: ClassVar[str] = "the first token of a chunk has to see the whole sequence"

    def quadratic_part(self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks) -> Tensor:
        """With the first row of every chunk exchanged, in time T^2 / C."""
        plain, document = super().quadratic_part(q, k, v, chunks), chunks.documents(v.device)
        visible = document[:, None] == document.repeat_interleave(chunks.chunk_size)  # [G, G C]
        if chunks.real is not None:
            visible = visible & chunks.real.flatten(1)[:, None]
        weights = attention_weights(
            q[:, :, 0] @ k.flatten(1, 2).mT,
            d_qk=self.d_qk,
            visible=visible,
            bias=None,
            activation="softmax",
            published_length=None,
        )
        first = weights.to(v.dtype) @ v.flatten(1, 2)
        return torch.cat([first[:, :, None], plain[:, :, 1:]], 2)
