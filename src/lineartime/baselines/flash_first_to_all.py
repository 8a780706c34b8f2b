"""FLASH for fine-tuning: the first token of every chunk attends to the whole document with softmax instead of relu^2.

Shapes: T tokens, R rows, L tokens of a row, C chunk size, s query/key width, e value width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 4.3.

    o_quad[t] = sum over all j of softmax over j (q_quad[t].k_quad[j] / sqrt(s)) v[j]        for the first token t of a chunk

For these queries, softmax replaces the quadratic part. The linear part stays. They have no relative bias, because the bias is
only defined for positions inside a chunk.
"""

from typing import ClassVar

from torch import Tensor

from lineartime.baselines.blocks import masked_products
from lineartime.baselines.flash_parts import FLASHBySoftmax
from lineartime.ops.packing import Packing


def flash_first_to_all_oracle(q: Tensor, k: Tensor, v: Tensor, *, chunk_size: int) -> dict[int, Tensor]:
    """The new outputs of the first tokens of all chunks."""
    return {t: (k @ q[t] / q.shape[-1] ** 0.5).softmax(0) @ v for t in range(0, len(v), chunk_size)}


class FLASHFirstToAll(FLASHBySoftmax):
    """FLASH for fine-tuning: the first token of each chunk attends to all tokens.

    These tokens attend to the whole document with softmax. The options are those of `FLASH`.
    """

    name = "flash-first-to-all"
    why_not_causal: ClassVar[str] = "the first token of a chunk has to see the whole sequence"

    def by_softmax(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor, packing: Packing) -> Tensor:
        """In time T^2 / C."""
        return masked_products(q[:, :: self.chunk_size], k, real[:, None]).softmax(-1).to(v.dtype) @ v
