"""MC-TFM++: the heads of a Transformer with mixed chunk attention, softmax inside a chunk and linear across chunks.

Shapes: N tokens, D documents, G chunks, C chunk size, Q queries of a chunk, H heads, h head width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), its comparison of approximation costs.

    out[t] = sum over j in L(t) of softmax(q[t].k[j] / sqrt(h)) v[j]  +  q[t] / sqrt(h) . mean over j in R(t) of k[j] v[j]^T

    L(t) = tokens of t's own chunk; causal: those with j <= t
    R(t) = tokens of all other chunks; causal: of the chunks before t's
"""

from typing import Any

import torch
from torch import Tensor

from lineartime.baselines.blocks import ChunkedHeads
from lineartime.ops.mixed_chunk import MixedChunkState, Scales, attend_visible, reciprocal
from lineartime.ops.modes import acc_dtype, output_dtype, without_autocast
from lineartime.ops.packing import Packing


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

    def attend_heads(self, maps: tuple[Tensor, Tensor, Tensor], packing: Packing, state: Any) -> tuple[Tensor, Any]:
        compute, scale, outputs = self.compute_dtype(*maps), self.head_dim**-0.5, []
        scales = Scales(scale, reciprocal, reciprocal)
        opened = (None, None) if state is None else (state.keys[:, :, 0].transpose(1, 2), state.values.transpose(1, 2))
        with without_autocast(maps[-1]):
            for grid, q, k, v in packing.by_grid(self.chunk_size, self.causal, *(x.to(compute) for x in maps)):
                # [G, H, Q, h], [G, H, C, h] and [G, H, C, h]
                q, k, v = (x.transpose(1, 2) for x in (grid.queries(q), grid.keys(k, opened[0]), grid.keys(v, opened[1])))
                local = attend_visible(q, k, v, grid.last[:, None], None, "softmax", scales)
                sums = (k.mT @ v).to(acc_dtype(v))  # [G, H, h, h]
                if self.causal:
                    others, count = grid.sum_before(sums), grid.begin
                    others = others if state is None else others + grid.of_documents(state.summary)
                else:
                    others, count = grid.of_documents(grid.sum_of(sums)) - sums, grid.end[grid.of] - grid.sizes
                mean = (others * scales.sum(count.to(sums.dtype))[:, None, None, None]).to(compute)
                outputs.append(grid.tokens((local + scale * q @ mean).transpose(1, 2)))
                if state is not None:
                    summary = state.summary + grid.sum_of(torch.where(grid.full[:, None, None, None], sums, 0))
                    keys, values = (x.index_select(0, grid.final).to(state.keys.dtype) for x in (k, v))
                    state = MixedChunkState(state.position + packing.new, summary, keys[:, :, None], values)
        return torch.cat(outputs).flatten(1).to(output_dtype(maps[-1], compute)), state

    def init_own_state(self, batch_size: int) -> MixedChunkState:
        chunk = self.empty_chunk(batch_size)
        summary = chunk.new_zeros(batch_size, self.n_heads, self.head_dim, self.head_dim)
        return MixedChunkState(self.first_position(batch_size), summary, chunk[:, :, None], chunk)
