"""FLASH with overlapping local attention: a chunk also attends to its neighbours or, if causal, to the previous chunk.

Shapes: B batch, T tokens, N new tokens of a stream, G chunks, C chunk size, s query/key width, e value width,
M = 2 (causal) or 3 chunks in reach.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), which mentions this variant as better but slower.

    L(t) = tokens of t's own chunk and of the chunks beside it; causal: those with j <= t
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lineartime.baselines.flash_parts import FLASHInParts
from lineartime.ops.activations import Activation, attention_weights, attention_weights_oracle
from lineartime.ops.batch import Batch, fill, open_chunk_pieces, shift_chunks
from lineartime.ops.modes import acc_dtype, matmul_dtype, output_dtype, without_autocast
from lineartime.ops.state import State


def flash_overlapping_oracle(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, chunk_size: int, causal: bool = False, activation: Activation = "relu2"
) -> Tensor:
    """The definition of the quadratic part for one document, one query at a time: [T, s], [T, s], [T, e] -> [T, e].

    bias: [C, M C]; the row is the place of t in its chunk, and column C + j is the key at place j from the start of that chunk.
    """
    rows = []
    for t in range(len(v)):
        chunk = t // chunk_size
        near = [j for j in range(len(v)) if abs(j // chunk_size - chunk) <= 1 and (j <= t or not causal)]
        weights = attention_weights_oracle(
            k[near] @ q[t],
            bias[t % chunk_size, [j - (chunk - 1) * chunk_size for j in near]],
            d_qk=q.shape[-1],
            activation=activation,
            published_length=None,
        )
        rows.append(weights @ v[near])
    return torch.stack(rows)


def with_neighbours(x: Tensor, chunks: Batch, causal: bool) -> Tensor:
    """Concatenate every chunk with its neighbours, or zeros where there is none: [B, G, C, f] -> [B, G, M C, f]."""
    before, after = shift_chunks(x, chunks, 1), shift_chunks(x, chunks, -1)
    return torch.cat([before, x] if causal else [before, x, after], 2)


def visible_neighbours(chunks: Batch, causal: bool, like: Tensor) -> Tensor:
    """Which keys in reach are visible to the queries of a chunk: bool [B or 1, G, C or 1, M C]."""
    visible = with_neighbours(chunks.holds_token(like.device)[..., None], chunks, causal).mT
    if not causal:
        return visible
    earlier = torch.ones(chunks.chunk_size, 2 * chunks.chunk_size, dtype=torch.bool, device=like.device).tril(chunks.chunk_size)
    return visible & earlier


@dataclass(eq=False)
class FLASHOverlappingState(State):
    """The state of causal streams, of constant size; slots that hold no token hold any numbers.

    Attributes:
        position: int64 [B], the number of tokens that each stream has read.
        summary: [B, s, e], the sum of k_lin v^T over all complete chunks.
        k_quad, v: [B, 2 C, s] and [B, 2 C, e] of the previous chunk and the open one.
        k_lin: [B, C, s] of the open chunk.
    """

    position: Tensor
    summary: Tensor
    k_quad: Tensor
    v: Tensor
    k_lin: Tensor


class FLASHOverlapping(FLASHInParts):
    """FLASH whose chunks also read their neighbours.

    A causal chunk attends to itself and to the previous chunk. The options are those of `FLASH`. The relative bias is a table
    for chunks of up to 256 tokens.
    """

    name = "flash-overlapping"
    bias_chunks = 2
    any_positions = False
    constant_state = False

    def chunk_bias(self, batch: Batch) -> Tensor | None:
        """The relative bias, [C, M C], or None; C is the chunk size of the batch."""
        if self.bias is None:
            return None
        size = batch.chunk_size or self.chunk_size
        return self.bias.consecutive(size, (2 if self.causal else 3) * size, size, batch)

    def quadratic_part(self, q: Tensor, k: Tensor, v: Tensor, chunks: Batch, bias: Tensor | None) -> Tensor:
        weights = self._weights(
            q @ with_neighbours(k, chunks, self.causal).mT, visible_neighbours(chunks, self.causal, v), bias
        )
        return weights.to(v.dtype) @ with_neighbours(v, chunks, self.causal)

    def _weights(self, products: Tensor, visible: Tensor, bias: Tensor | None) -> Tensor:
        return attention_weights(
            products,
            d_qk=self.d_qk,
            visible=visible,
            bias=bias,
            activation=self.activation,
            published_length=self.options.published_length,
        )

    def attend_next(
        self, maps: Sequence[Tensor], v: Tensor, state: FLASHOverlappingState, batch: Batch
    ) -> tuple[Tensor, FLASHOverlappingState]:
        size, compute = self.chunk_size, matmul_dtype(*maps, v)
        q_quad, new_keys, q_lin, new_lin = maps
        summary, k_quad, values, k_lin = state.summary, state.k_quad, state.v, state.k_lin
        bias = self.chunk_bias(batch)
        places = torch.arange(2 * size, device=v.device)
        outputs = [v[:, :0].to(output_dtype(v, compute))]
        with without_autocast(v):
            for new, first, last in open_chunk_pieces(batch.first_position, v.shape[1], size):
                complete = batch.first_position + new.start - first
                if not first:  # the last chunk, which is full, becomes the previous one
                    k_quad, values = (x.roll(-size, 1) for x in (k_quad, values))
                k_quad, values = fill(k_quad, size + first, new_keys[:, new]), fill(values, size + first, v[:, new])
                k_lin = fill(k_lin, first, new_lin[:, new])
                visible = places[: size + last] <= places[size + first : size + last, None]
                if not complete:  # the first chunk has no previous one
                    visible = visible & (places[: size + last] >= size)
                weights = self._weights(
                    q_quad[:, new].to(compute) @ k_quad[:, : size + last].to(compute).mT,
                    visible,
                    None if bias is None else bias[first:last, : size + last],
                )
                mean = (summary / self.options.linear_divisor(torch.tensor(complete))).to(compute)
                out = weights.to(compute) @ values[:, : size + last].to(compute) + q_lin[:, new].to(compute) @ mean
                outputs.append(out.to(outputs[0].dtype))
                if last == size:
                    summary = summary + k_lin.mT @ values[:, size:]
        return torch.cat(outputs, 1), FLASHOverlappingState(batch.after(state.position), summary, k_quad, values, k_lin)

    def init_own_state(self, batch_size: int) -> FLASHOverlappingState:
        size, like = self.chunk_size, self.any_parameter
        shapes = (self.d_qk, self.d_value), (2 * size, self.d_qk), (2 * size, self.d_value), (size, self.d_qk)
        sums = (torch.zeros(batch_size, *shape, dtype=acc_dtype(like), device=like.device) for shape in shapes)
        return FLASHOverlappingState(self.first_position(batch_size), *sums)
