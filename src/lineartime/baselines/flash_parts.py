"""FLASH in parts, for its variants in this folder, each of which has another quadratic or linear part.

Shapes: B batch, T tokens, G chunks, C chunk size, s query/key width, e value width.
The definition of both parts is in `lineartime.ops.mixed_chunk.reference`.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from lineartime.layers.flash import FLASH
from lineartime.layers.gau import GatedOptions, GatedUnit
from lineartime.ops.activations import attention_weights
from lineartime.ops.batch import Batch, Reach
from lineartime.ops.mixed_chunk import stream
from lineartime.ops.mixed_chunk.chunked import chunk_attention, summary_attention
from lineartime.ops.modes import matmul_dtype, output_dtype, without_autocast


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, real: Tensor, bias: Tensor | None) -> Tensor:
    """Softmax attention to real keys: [B, G, Q, s], [B, G, K, s], [B, G, K, e], bool [B or 1, G, K] -> [B, G, Q, e]."""
    weights = attention_weights(
        q @ k.mT, d_qk=q.shape[-1], visible=real[:, :, None], bias=bias, activation="softmax", published_length=None
    )
    return weights.to(v.dtype) @ v


class FLASHInParts(FLASH):
    """The same function as `FLASH`, with its quadratic and its linear part as methods on chunks."""

    splits_context = False
    reads_prefix = False
    backend = None
    mix, mix_next = GatedUnit.mix, GatedUnit.mix_next  # its steps one by one

    def __init__(
        self, d_model: int, *, chunk_size: int = 256, relative_bias: bool = True, **options: Unpack[GatedOptions]
    ) -> None:
        # Passed explicitly, so that a caller who passes it gets a TypeError.
        super().__init__(d_model, chunk_size=chunk_size, relative_bias=relative_bias, memory="sum", **options)

    def attend(self, maps: Sequence[Tensor], v: Tensor, batch: Batch, causal: bool) -> Tensor:
        """Cut into chunks, attend and join: [B, T, s] and [B, T, e] -> [B, T, e]."""
        compute = matmul_dtype(*maps, v)
        with without_autocast(v):
            cut = [batch.cut(x.to(compute)) for x in maps]
            out = self.attend_chunks(cut, batch.cut(v.to(compute)), batch, self.chunk_bias(batch))
            return batch.join(out.to(output_dtype(v, compute)))

    def attend_next(self, maps: Sequence[Tensor], v: Tensor, state: Any, batch: Batch) -> tuple[Tensor, Any]:
        q_quad, k_quad, q_lin, k_lin = maps
        return stream.extend(q_quad, q_lin, [k_quad, k_lin], v, self.slot_bias(batch), self.options, state, batch)

    def attend_chunks(self, maps: Sequence[Tensor], v: Tensor, chunks: Batch, bias: Tensor | None) -> Tensor:
        """The sum of both parts: queries and keys, each [B, G, C, s], and values [B, G, C, e] -> [B, G, C, e]."""
        q_quad, k_quad, q_lin, k_lin = maps
        return self.quadratic_part(q_quad, k_quad, v, chunks, bias) + self.linear_part(q_lin, k_lin, v, chunks)

    def quadratic_part(self, q: Tensor, k: Tensor, v: Tensor, chunks: Batch, bias: Tensor | None) -> Tensor:
        """Attend inside chunks: [B, G, C, s], [B, G, C, s], [B, G, C, e] -> [B, G, C, e]."""
        return chunk_attention(q, k, v, chunks, bias, self.options)

    def linear_part(self, q: Tensor, k: Tensor, v: Tensor, chunks: Batch) -> Tensor:
        """Attend across chunks; shapes as for `quadratic_part`."""
        reach: Reach = "before" if self.causal else "all"
        return summary_attention(q, k, v, chunks, self.options, reach=reach)
