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

from lineartime.baselines.bidirectional import BidirectionalMixer
from lineartime.baselines.flash_parts import FLASHInParts
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


# 2. The parallel form, and the layers -------------------------------------------------------------------------------


def softmax_row(q: Tensor, k: Tensor, v: Tensor, real: Tensor, bias: Tensor | None) -> Tensor:
    """Softmax attention to real keys: [B, G, Q, s], [B, G, K, s], [B, G, K, e], bool [B or 1, G, K] -> [B, G, Q, e]."""
    weights = attention_weights(
        q @ k.mT, d_qk=q.shape[-1], visible=real[:, :, None], bias=bias, activation="softmax", published_length=None
    )
    return weights.to(v.dtype) @ v


class CLSFLASH(BidirectionalMixer, FLASHInParts):
    """`FLASH` whose first token, [CLS], attends to its chunk with softmax; arguments as there."""

    why_not_causal: ClassVar[str] = "its first token has to see the tokens that follow"

    def quadratic_part(self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks) -> Tensor:
        """With the first row of each document's first chunk exchanged."""
        bias = self.chunk_bias()

        def document(q: Tensor, k: Tensor, v: Tensor, slots: Tensor, plain: Tensor) -> Tensor:
            first = softmax_row(q[:, :1, :1], k[:, :1], v[:, :1], slots[:, :1], None if bias is None else bias[:1])
            row = torch.cat([first, plain[:, :1, 1:]], 2)
            return torch.cat([row, plain[:, 1:]], 1)

        return chunks.by_document(document, q, k, v, chunks.slots(v.device), super().quadratic_part(q, k, v, chunks))


class FirstToAllFLASH(BidirectionalMixer, FLASHInParts):
    """`FLASH` in which the first token of every chunk attends to the whole document with softmax; arguments as there."""

    why_not_causal: ClassVar[str] = "the first token of a chunk has to see the whole sequence"

    def quadratic_part(self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks) -> Tensor:
        """With the first row of every chunk exchanged, in time T^2 / C."""

        def document(q: Tensor, k: Tensor, v: Tensor, slots: Tensor, plain: Tensor) -> Tensor:
            queries = q[:, None, :, 0]  # [B, 1, g, s]
            keys, values, real = (x.flatten(1, 2)[:, None] for x in (k, v, slots))  # [B, 1, g C, ...]
            first = softmax_row(queries, keys, values, real, None)[:, 0]
            return torch.cat([first[:, :, None], plain[:, :, 1:]], 2)

        return chunks.by_document(document, q, k, v, chunks.slots(v.device), super().quadratic_part(q, k, v, chunks))
