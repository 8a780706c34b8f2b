"""FLASH for fine-tuning: [CLS], the first token of a document, attends to its chunk with softmax in the place of relu^2.

Shapes: B batch, T tokens, G chunks, C chunk size, s query/key width, e value width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 4.3.

Softmax replaces the quadratic part of that query; its linear part stays.
"""

from typing import ClassVar

import torch
from torch import Tensor

from lineartime.baselines.bidirectional import BidirectionalMixer
from lineartime.baselines.flash_parts import FLASHInParts, softmax_attention
from lineartime.ops.chunks import Chunks


def flash_cls_oracle(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, chunk_size: int) -> dict[int, Tensor]:
    """The new output of the document's first token; bias: [C, C]."""
    near = slice(0, min(chunk_size, len(v)))
    weights = (k[near] @ q[0] / q.shape[-1] ** 0.5 + bias[0, near]).softmax(0)
    return {0: weights @ v[near]}


class FLASHCLS(BidirectionalMixer, FLASHInParts):
    """FLASH for fine-tuning: [CLS] attends with softmax.

    [CLS] is the first token of a document. It attends to its chunk. Options are those of `FLASH`.
    """

    name = "flash-cls"
    why_not_causal: ClassVar[str] = "its first token has to see the tokens that follow"

    def quadratic_part(self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks) -> Tensor:
        """That of `FLASH`, with softmax in the first row of each document."""
        bias = self.chunk_bias()

        def document(q: Tensor, k: Tensor, v: Tensor, slots: Tensor, plain: Tensor) -> Tensor:
            first = softmax_attention(q[:, :1, :1], k[:, :1], v[:, :1], slots[:, :1], None if bias is None else bias[:1])
            row = torch.cat([first, plain[:, :1, 1:]], 2)
            return torch.cat([row, plain[:, 1:]], 1)

        return chunks.by_document(document, q, k, v, chunks.slots(v.device), super().quadratic_part(q, k, v, chunks))
