"""FLASH for fine-tuning: [CLS], the first token of a document, attends to its chunk with softmax instead of relu^2.

Shapes: B batch, T tokens, G chunks, C chunk size, s query/key width, e value width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 4.3.

    o_quad[0] = sum over j in L(0) of softmax over j (q_quad[0].k_quad[j] / sqrt(s) + bias[-j]) v[j]

For this query, softmax replaces the quadratic part. The linear part stays.
"""

from typing import ClassVar

import torch
from torch import Tensor

from lineartime.baselines.flash_parts import FLASHInParts, softmax_attention
from lineartime.ops.batch import Batch, places


def flash_cls_oracle(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, chunk_size: int) -> dict[int, Tensor]:
    """The new output of the document's first token; bias: [C, C]."""
    near = slice(0, min(chunk_size, len(v)))
    weights = (k[near] @ q[0] / q.shape[-1] ** 0.5 + bias[0, near]).softmax(0)
    return {0: weights @ v[near]}


class FLASHCLS(FLASHInParts):
    """FLASH for fine-tuning: [CLS] attends with softmax.

    [CLS] is the first token of a document. It attends to its chunk. The options are those of `FLASH`.
    """

    name = "flash-cls"
    why_not_causal: ClassVar[str] = "its first token has to see the tokens that follow"

    def quadratic_part(self, q: Tensor, k: Tensor, v: Tensor, chunks: Batch, bias: Tensor | None) -> Tensor:
        plain = super().quadratic_part(q, k, v, chunks, bias)
        # Every chunk computes such a row, [B, G, 1, e], but only the first chunk of a document uses it.
        row = softmax_attention(q[:, :, :1], k, v, chunks.holds_token(v.device), None if bias is None else bias[:1])
        first = torch.where((places(chunks) == 0)[:, None, None], row, plain[:, :, :1])
        return torch.cat([first, plain[:, :, 1:]], 2)
