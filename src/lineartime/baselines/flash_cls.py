"""FLASH for fine-tuning: [CLS], the first token of a document, attends to its chunk with softmax instead of relu^2.

Shapes: T tokens, R rows, L tokens of a row, C chunk size, s query/key width, e value width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 4.3.

    o_quad[0] = sum over j in L(0) of softmax over j (q_quad[0].k_quad[j] / sqrt(s) + bias[-j]) v[j]

For this query, softmax replaces the quadratic part. The linear part stays.
"""

from typing import ClassVar

from torch import Tensor

from lineartime.baselines.blocks import masked_products
from lineartime.baselines.flash_parts import FLASHBySoftmax
from lineartime.ops.packing import Packing


def flash_cls_oracle(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, chunk_size: int) -> dict[int, Tensor]:
    """The new output of the document's first token; bias: [2 C - 1], for the distances from 1 - C to C - 1."""
    near = slice(0, min(chunk_size, len(v)))
    weights = (k[near] @ q[0] / q.shape[-1] ** 0.5 + bias[chunk_size - 1 :][near]).softmax(0)
    return {0: weights @ v[near]}


class FLASHCLS(FLASHBySoftmax):
    """FLASH for fine-tuning: [CLS] attends with softmax.

    [CLS] is the first token of a document. It attends to its chunk. The options are those of `FLASH`.
    """

    name = "flash-cls"
    why_not_causal: ClassVar[str] = "its first token has to see the tokens that follow"

    def by_softmax(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor, packing: Packing) -> Tensor:
        k, v, real = k[:, : self.chunk_size], v[:, : self.chunk_size], real[:, : self.chunk_size]
        scores = masked_products(q[:, :1], k, real[:, None])
        if self.bias is not None:
            scores = scores + self.bias(k.shape[1], packing)[k.shape[1] - 1 :]
        return scores.softmax(-1).to(v.dtype) @ v
