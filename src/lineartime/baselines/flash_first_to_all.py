"""FLASH for fine-tuning: the first token of every chunk attends to the whole document with softmax instead of relu^2.

Shapes: B batch, T tokens, G chunks, C chunk size, s query/key width, e value width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 4.3.

    o_quad[t] = sum over all j of softmax over j (q_quad[t].k_quad[j] / sqrt(s)) v[j]        for the first token t of a chunk

For these queries, softmax replaces the quadratic part. The linear part stays. They have no relative bias, because the bias is
only defined for positions inside a chunk.
"""

from typing import ClassVar

import torch
from torch import Tensor

from lineartime.baselines.flash_parts import FLASHInParts, softmax_attention
from lineartime.ops.batch import Batch, join_documents, split_documents


def flash_first_to_all_oracle(q: Tensor, k: Tensor, v: Tensor, *, chunk_size: int) -> dict[int, Tensor]:
    """The new outputs of the first tokens of all chunks."""
    return {t: (k @ q[t] / q.shape[-1] ** 0.5).softmax(0) @ v for t in range(0, len(v), chunk_size)}


class FLASHFirstToAll(FLASHInParts):
    """FLASH for fine-tuning: the first token of each chunk attends to all tokens.

    These tokens attend to the whole document with softmax. The options are those of `FLASH`.
    """

    name = "flash-first-to-all"
    why_not_causal: ClassVar[str] = "the first token of a chunk has to see the whole sequence"

    def quadratic_part(self, q: Tensor, k: Tensor, v: Tensor, chunks: Batch, bias: Tensor | None) -> Tensor:
        """Replace the first row of every chunk, in time T^2 / C."""
        plain = super().quadratic_part(q, k, v, chunks, bias)
        queries = split_documents(q[:, :, 0], chunks)  # [B, D, g, s]
        documents = (split_documents(x, chunks) for x in (k, v, chunks.holds_token(v.device)))
        keys, values, real = (x.flatten(2, 3) for x in documents)  # [B, D, g C, ...]
        first = join_documents(softmax_attention(queries, keys, values, real, None), chunks)  # [B, G, e]
        return torch.cat([first[:, :, None], plain[:, :, 1:]], 2)
