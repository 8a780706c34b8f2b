"""FLASH in parts, so that a variant can replace one of them. `FLASH` itself calls one operation, which may be a fused kernel.

Shapes: B batch, T tokens, G chunks, C chunk size, s query/key width, e value width.
The definition of both parts is in `lineartime.ops.mixed_chunk.reference`.
"""

from collections.abc import Sequence
from functools import reduce
from operator import add

from torch import Tensor

from lineartime.layers.chunked import ChunkedUnit
from lineartime.layers.mixer import State
from lineartime.layers.opened import Part
from lineartime.ops.activations import attention_weights
from lineartime.ops.chunks import Chunks, Reach
from lineartime.ops.layout import Layout
from lineartime.ops.mixed_chunk import stream
from lineartime.ops.mixed_chunk.chunked import chunk_attention, summary_attention
from lineartime.ops.mixed_chunk.inputs import Heads
from lineartime.ops.mixed_chunk.stream import MixedChunkState
from lineartime.ops.precision import matmul_dtype, output_dtype, without_autocast


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, real: Tensor, bias: Tensor | None) -> Tensor:
    """Softmax attention to real keys: [B, G, Q, s], [B, G, K, s], [B, G, K, e], bool [B or 1, G, K] -> [B, G, Q, e]."""
    weights = attention_weights(
        q @ k.mT, d_qk=q.shape[-1], visible=real[:, :, None], bias=bias, activation="softmax", published_length=None
    )
    return weights.to(v.dtype) @ v


class FLASHInParts(ChunkedUnit[State]):
    """The same function as `FLASH`, with its quadratic and its linear part as methods on chunks."""

    def attend(self, maps: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Cut into chunks, attend and join: [B, maps, T, s] and [B, T, e] -> [B, T, e]."""
        return self._attend(self.parts, maps, v, layout)

    def attend_part(self, part: Part, maps: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """The quadratic or the linear part alone: [B, maps, T, s] and [B, T, w] -> [B, T, w]."""
        return self._attend((part,), maps, v, layout)

    def _attend(self, parts: Sequence[Part], maps: Tensor, v: Tensor, layout: Layout) -> Tensor:
        compute, chunks = matmul_dtype(maps, v), layout.require_chunks()
        with without_autocast(v):
            cut = [chunks.cut(x.to(compute)) for x in maps.unbind(1)]
            out = self.attend_chunks(parts, cut, chunks.cut(v.to(compute)), chunks, self.chunk_bias(layout))
            return chunks.join(out.to(output_dtype(v, compute)))

    def attend_chunks(
        self, parts: Sequence[Part], maps: list[Tensor], v: Tensor, chunks: Chunks, bias: Tensor | None
    ) -> Tensor:
        """The sum of parts: queries and keys, each [B, G, C, s], and values [B, G, C, w] -> [B, G, C, w].

        Queries and keys of the quadratic part come first, those of the linear part last.
        """
        outputs = []
        if "local" in parts:
            outputs.append(self.quadratic_part(maps[0], maps[1], v, chunks, bias))
        if "global" in parts:
            outputs.append(self.linear_part(maps[-2], maps[-1], v, chunks))
        return reduce(add, outputs)

    def quadratic_part(self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, bias: Tensor | None) -> Tensor:
        """Attend inside chunks: [B, G, C, s], [B, G, C, s], [B, G, C, e] -> [B, G, C, e]."""
        return chunk_attention(q, k, v, chunks, bias, self.options)

    def linear_part(self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks) -> Tensor:
        """Attend across chunks; shapes as for `quadratic_part`."""
        reach: Reach = "before" if self.causal else "all"
        return summary_attention(q, k, v, chunks, self.options, reach=reach)

    def quadratic_next(
        self, q: Tensor, k: Tensor, v: Tensor, state: MixedChunkState, layout: Layout
    ) -> tuple[Tensor, MixedChunkState]:
        """The quadratic part for N more tokens of streams, and the new state."""
        no_map = v.new_zeros(*v.shape[:2], 0)  # a linear part without features adds nothing
        return stream.extend(Heads(q, k, no_map, no_map, v), self.chunk_bias(layout), self.options, state)

    def quadratic_state(self, batch_size: int) -> MixedChunkState:
        """The state of the quadratic part alone, before the first token."""
        state = self.init_mixed_state(batch_size)
        return state._replace(summary=state.summary[:, :0], k_lin=state.k_lin[..., :0])
