"""FLASH with overlapping local attention: a chunk also attends to its neighbours or, if causal, to the previous chunk.

Shapes: B batch, T tokens, N new tokens of a stream, G chunks, C chunk size, s query/key width, e value width,
M = 2 (causal) or 3 chunks in reach.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), which mentions this variant as better but slower.

    L(t) = tokens of t's own chunk and of the chunks beside it; causal: those with j <= t
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lineartime.baselines.flash_parts import FLASHInParts
from lineartime.ops.activations import Activation, attention_weights, attention_weights_oracle
from lineartime.ops.chunks import Chunks, fill, open_chunk_pieces, shift_chunks
from lineartime.ops.layout import Layout, LayoutPlan
from lineartime.ops.precision import matmul_dtype, output_dtype, without_autocast

# 1. The definition ----------------------------------------------------------------------------------------------------


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


# 2. The chunked form --------------------------------------------------------------------------------------------------


def with_neighbours(x: Tensor, chunks: Chunks, causal: bool) -> Tensor:
    """Concatenate every chunk with its neighbours, or zeros where there is none: [B, G, C, f] -> [B, G, M C, f]."""
    before, after = shift_chunks(x, chunks, 1), shift_chunks(x, chunks, -1)
    return torch.cat([before, x] if causal else [before, x, after], 2)


def visible_neighbours(chunks: Chunks, causal: bool, like: Tensor) -> Tensor:
    """Which keys in reach are visible to the queries of a chunk: bool [B or 1, G, C or 1, M C]."""
    visible = with_neighbours(chunks.holds_token(like.device)[..., None], chunks, causal).mT
    if not causal:
        return visible
    earlier = torch.ones(chunks.chunk_size, 2 * chunks.chunk_size, dtype=torch.bool, device=like.device).tril(chunks.chunk_size)
    return visible & earlier


# 3. The streaming form, and the layer ---------------------------------------------------------------------------------


class FLASHOverlappingState(NamedTuple):
    """The state of causal streams, of constant size.

    Attributes:
        summary: [B, s, e], the sum of k_lin v^T over all complete chunks.
        k_quad, v: [B, 2 C, s] and [B, 2 C, e] of the previous chunk and the open one, zero where there is no token.
        k_lin: [B, C, s] of the open chunk.
        position: the number of tokens read so far.
    """

    summary: Tensor
    k_quad: Tensor
    v: Tensor
    k_lin: Tensor
    position: int


class FLASHOverlapping(FLASHInParts[FLASHOverlappingState]):
    """FLASH whose chunks also read their neighbours.

    A causal chunk attends to itself and to the previous chunk. The options are those of `FLASH`. With bias_form="auto", the
    relative bias is a table for chunks of up to 256 tokens.
    """

    name = "flash-overlapping"
    bias_chunks = 2

    def plan(self) -> LayoutPlan:
        """Request what `FLASH` needs, with places for all chunks in reach."""
        return super().plan()._replace(bias_places=3 * self.chunk_size)

    def chunk_bias(self, layout: Layout) -> Tensor | None:
        """The relative bias, [C, M C], or None; C is the chunk size of the layout."""
        if self.bias is None:
            return None
        size = self.layout_chunk_size(layout)
        return self.bias.consecutive(size, (2 if self.causal else 3) * size, size, layout.place_rotations)

    def quadratic_part(self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, bias: Tensor | None) -> Tensor:
        """Attend inside chunks and to their neighbours."""
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
        self, maps: Tensor, v: Tensor, state: FLASHOverlappingState, layout: Layout
    ) -> tuple[Tensor, FLASHOverlappingState]:
        """Attend to the open chunk, the previous one and the summary; return the outputs and the new state."""
        size, compute = self.chunk_size, matmul_dtype(maps, v)
        q_quad, k_quad, q_lin, k_lin = maps.unbind(1)
        bias = self.chunk_bias(layout)
        places = torch.arange(2 * size, device=v.device)
        outputs = [v[:, :0].to(output_dtype(v, compute))]
        with without_autocast(v):
            for new, first, last in open_chunk_pieces(state.position, v.shape[1], size):
                complete = state.position - first
                state = FLASHOverlappingState(
                    state.summary,
                    fill(state.k_quad, size + first, k_quad[:, new]),
                    fill(state.v, size + first, v[:, new]),
                    fill(state.k_lin, first, k_lin[:, new]),
                    complete + last,
                )
                visible = places[: size + last] <= places[size + first : size + last, None]
                if not complete:  # the first chunk has no previous one
                    visible = visible & (places[: size + last] >= size)
                weights = self._weights(
                    q_quad[:, new].to(compute) @ state.k_quad[:, : size + last].to(compute).mT,
                    visible,
                    None if bias is None else bias[first:last, : size + last],
                )
                mean = (state.summary / self.options.linear_divisor(complete)).to(compute)
                out = weights.to(compute) @ state.v[:, : size + last].to(compute) + q_lin[:, new].to(compute) @ mean
                outputs.append(out.to(outputs[0].dtype))
                if last == size:
                    state = self._fold(state)
        return torch.cat(outputs, 1), state

    def _fold(self, state: FLASHOverlappingState) -> FLASHOverlappingState:
        """Add the open chunk, which is full, to the summary; it becomes the previous chunk."""
        size = self.chunk_size
        return FLASHOverlappingState(
            state.summary + state.k_lin.mT @ state.v[:, size:],
            torch.cat([state.k_quad[:, size:], torch.zeros_like(state.k_quad[:, size:])], 1),
            torch.cat([state.v[:, size:], torch.zeros_like(state.v[:, size:])], 1),
            torch.zeros_like(state.k_lin),
            state.position,
        )

    def init_own_state(self, batch_size: int) -> FLASHOverlappingState:
        """The state before the first token of `batch_size` streams."""
        mixed = self.init_mixed_state(batch_size)
        twice = (1, 2, 1)
        return FLASHOverlappingState(mixed.summary, mixed.k_quad.repeat(twice), mixed.v.repeat(twice), mixed.k_lin, 0)
