"""FLASH in parts, of which a variant replaces one. `FLASH` itself calls a single operation, which a kernel can compute.

Shapes: B batch, T tokens, G chunks, C chunk size, s query/key width, e value width.
"""

from torch import Tensor

from lineartime.layers.flash import FLASH
from lineartime.layers.gated import GatedUnit
from lineartime.ops.activations import attention_weights
from lineartime.ops.chunks import Chunks, Reach, cut_chunks
from lineartime.ops.mixed_chunk import chunk_attention, summary_attention
from lineartime.ops.mixed_chunk_stream import MixedChunkState, mixed_chunk_attention_extend
from lineartime.ops.precision import matmul_dtype, output_dtype, without_autocast


class FLASHInParts(FLASH):
    """The same function as `FLASH`; its quadratic and its linear part are methods that work on chunks."""

    has_backends = False
    splits_context = False
    # Not the single operations of `FLASH`.
    attend_and_gate = GatedUnit.attend_and_gate
    join_streams = GatedUnit.join_streams

    def attend(self, maps: Tensor, v: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        """Cut into chunks, attend, and join: [B, maps, T, s] and [B, T, e] -> [B, T, e]."""
        compute = matmul_dtype(maps, v)
        with without_autocast(v):
            chunks = cut_chunks(v, self.chunk_size, mask, cu_seqlens)
            cut = [chunks.cut(x.to(compute)) for x in maps.unbind(1)]
            out = self.attend_chunks(cut, chunks.cut(v.to(compute)), chunks)
            return chunks.join(out.to(output_dtype(v, compute)))

    def attend_chunks(self, maps: list[Tensor], v: Tensor, chunks: Chunks) -> Tensor:
        """Queries and keys, each [B, G, C, s], and values [B, G, C, e] -> [B, G, C, e]."""
        q_quad, k_quad, q_lin, k_lin = maps
        return self.quadratic_part(q_quad, k_quad, v, chunks) + self.linear_part(q_lin, k_lin, v, chunks)

    def quadratic_part(self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks) -> Tensor:
        """Inside chunks: [B, G, C, s], [B, G, C, s], [B, G, C, e] -> [B, G, C, e]."""
        return chunk_attention(
            q,
            k,
            v,
            chunks,
            causal=self.causal,
            bias=self.chunk_bias(),
            activation=self.activation,
            normalization=self.normalization,
        )

    def linear_part(self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks) -> Tensor:
        """Across chunks; shapes as for `quadratic_part`."""
        reach: Reach = "before" if self.causal else "all"
        return summary_attention(q, k, v, chunks, reach=reach, normalization=self.normalization)

    def quadratic_next(self, q: Tensor, k: Tensor, v: Tensor, state: MixedChunkState) -> tuple[Tensor, MixedChunkState]:
        """The quadratic part of N more tokens of streams, and the state after them."""
        no_map = v.new_zeros(*v.shape[:2], 0)  # a linear part of no features adds nothing
        return mixed_chunk_attention_extend(
            q, k, no_map, no_map, v, state, bias=self.chunk_bias(), activation=self.activation, normalization=self.normalization
        )

    def quadratic_state(self, batch_size: int) -> MixedChunkState:
        """The state of the quadratic part alone, before the first token; ValueError unless the layer is causal."""
        state = self.init_mixed_state(batch_size)
        return state._replace(summary=state.summary[:, :0], k_lin=state.k_lin[..., :0])

    def init_mixed_state(self, batch_size: int) -> MixedChunkState:
        """The state of both parts; ValueError unless the layer is causal."""
        state: MixedChunkState = FLASH.init_state(self, batch_size)
        return state


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, real: Tensor, bias: Tensor | None) -> Tensor:
    """Softmax attention to real keys: [B, G, Q, s], [B, G, K, s], [B, G, K, e], bool [B or 1, G, K] -> [B, G, Q, e]."""
    weights = attention_weights(
        q @ k.mT, d_qk=q.shape[-1], visible=real[:, :, None], bias=bias, activation="softmax", published_length=None
    )
    return weights.to(v.dtype) @ v
