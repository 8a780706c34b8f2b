"""MC-TFM++: the heads of a Transformer with mixed chunk attention, softmax inside a chunk and linear across chunks.

Shapes: B batch, T tokens, N new tokens of a stream, R rows, H heads, L tokens of a row, h head width, C chunk size.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), its comparison of approximation costs.

    out[t] = sum over j in L(t) of softmax(q[t].k[j] / sqrt(h)) v[j]  +  q[t] / sqrt(h) . mean over j in R(t) of k[j] v[j]^T

    L(t) = tokens of t's own chunk; causal: those with j <= t
    R(t) = tokens of all other chunks; causal: of the chunks before t's
"""

from dataclasses import replace

import torch
from torch import Tensor

from lineartime.baselines.blocks import ChunkedHeads
from lineartime.layers.attention import fold_heads
from lineartime.ops.batch import Batch, Reach, cut_chunks
from lineartime.ops.mixed_chunk.chunked import chunk_attention, summary_attention
from lineartime.ops.mixed_chunk.inputs import MixedChunkOptions
from lineartime.ops.mixed_chunk.stream import MixedChunkState, extend, mixed_chunk_state
from lineartime.ops.modes import acc_dtype


def mc_tfm_attention_oracle(q: Tensor, k: Tensor, v: Tensor, *, chunk_size: int, causal: bool = False) -> Tensor:
    """The definition for one head and one document, one query at a time: q, k, v [T, h] -> [T, h]."""
    scale = q.shape[-1] ** -0.5
    rows = []
    for t in range(len(v)):
        chunk = t // chunk_size
        near = [j for j in range(len(v)) if j // chunk_size == chunk and (j <= t or not causal)]
        far = [j for j in range(len(v)) if j // chunk_size < chunk or (j // chunk_size > chunk and not causal)]
        local = (k[near] @ q[t] * scale).softmax(0) @ v[near]
        rows.append(local + scale * q[t] @ (k[far].mT @ v[far]) / max(1, len(far)))
    return torch.stack(rows)


class MCTFM(ChunkedHeads):
    """Multi-head mixed chunk attention: softmax inside chunks, linear across them.

    A causal layer streams with constant memory. The options are those of `ChunkedHeads`.
    """

    name = "mc-tfm"
    any_positions = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        shape, dtype, size = v.shape, v.dtype, max(1, min(self.chunk_size, v.shape[2]))  # a larger chunk would only be padded
        q, k, v = (fold_heads(x) for x in (q, k, v))
        chunks = cut_chunks(v, size, None if real is None else real.repeat_interleave(self.n_heads, 0))
        q, k, v = (chunks.cut(x) for x in (q, k, v))
        options = MixedChunkOptions(size, self.causal, activation="softmax")
        reach: Reach = "before" if self.causal else "others"
        local = chunk_attention(q, k, v, chunks, None, options)
        across = summary_attention(q * q.shape[-1] ** -0.5, k, v, chunks, options, reach=reach)
        return chunks.join((local + across).to(dtype)).view(shape)

    def attend_next(
        self, q: Tensor, k: Tensor, v: Tensor, state: MixedChunkState, batch: Batch
    ) -> tuple[Tensor, MixedChunkState]:
        heads = v.shape[:2]

        def of_heads(x: Tensor) -> Tensor:
            return x.repeat_interleave(self.n_heads)

        q, k, v, *parts = (fold_heads(x) for x in (q, k, v, state.summary, state.keys, state.values))
        folded = MixedChunkState(of_heads(state.position), *parts)
        batch = replace(batch, counts=None if batch.counts is None else of_heads(batch.counts))
        options = MixedChunkOptions(self.chunk_size, causal=True, activation="softmax")
        out, new = extend(q, q * q.shape[-1] ** -0.5, [k], v, None, options, folded, batch)  # both parts share their keys
        out, *parts = (x.unflatten(0, heads) for x in (out, new.summary, new.keys, new.values))
        return out, MixedChunkState(new.position[:: self.n_heads], *parts)

    def init_own_state(self, batch_size: int) -> MixedChunkState:
        like = self.empty_cache(0, acc_dtype(self.any_parameter))
        folded = mixed_chunk_state(batch_size * self.n_heads, self.chunk_size, self.head_dim, self.head_dim, like, maps=1)
        parts = (x.unflatten(0, (batch_size, self.n_heads)) for x in (folded.summary, folded.keys, folded.values))
        return MixedChunkState(self.first_position(batch_size), *parts)
