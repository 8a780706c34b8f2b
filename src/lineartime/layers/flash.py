"""FLASH: the gated unit with mixed chunk attention, linear in the length of the sequence.

Shapes: B batch, T tokens, N new tokens of a stream, C chunk size, s query/key width, e value width.
The definition of its attention is in `lineartime.ops.mixed_chunk.reference`.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.layers.chunked import ChunkedUnit
from lineartime.layers.dense import is_untouched
from lineartime.layers.gated import HasBackends
from lineartime.layers.opened import Part
from lineartime.layers.prefix import PrefixMixer
from lineartime.layers.stepping import SteppingMixer
from lineartime.ops import exported
from lineartime.ops.backends import Backend
from lineartime.ops.layout import Layout, LayoutPlan
from lineartime.ops.mixed_chunk import attend_heads, attend_part, attend_projected, stream
from lineartime.ops.mixed_chunk.inputs import Heads, MixedChunkOptions, MixedChunkStreams, Projected
from lineartime.ops.mixed_chunk.step import (
    check_streams,
    mixed_chunk_states,
    mixed_chunk_streams,
    open_chunk,
    step,
    step_projected,
)
from lineartime.ops.mixed_chunk.stream import MixedChunkState
from lineartime.ops.precision import acc_dtype

STEPS = ("split", "queries_and_keys", "apply_gate", "attend", "attend_next", "attend_step")
"""The methods of FLASH that its fused operations compute without calling them."""


class FLASH(
    ChunkedUnit[MixedChunkState],
    PrefixMixer[MixedChunkState],
    SteppingMixer[MixedChunkState, MixedChunkStreams],
    HasBackends,
):
    """Gated unit with mixed chunk attention: quadratic inside chunks of C tokens, linear across them.

    The layer includes a pre-norm and a residual connection: `y = FLASH(256)(x)` maps [B, T, d] to [B, T, d]. A causal layer
    streams with constant memory. With normalization="paper", scores are divided by the constant C, as published, and the linear
    part is averaged over chunks. With "paper_sum", a causal layer sums over chunks without averaging: see `MixedChunkOptions`.

    Everything between the two projections is one fused operation. In a subclass or an instance that replaces one of its steps,
    the methods in `STEPS`, all forms call these methods instead.

    The options are those of `ChunkedUnit`.

    Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 3.
    """

    name = "flash"
    splits_context = True
    steps_in_place = True

    def plan(self) -> LayoutPlan:
        """Request chunks, except in an exported program: it accepts any length, so its operator cuts the chunks."""
        plan = super().plan()._replace(normalization=self.normalization)
        return plan._replace(chunk_size=None) if torch.compiler.is_exporting() and self.is_fused() else plan

    def mix(self, normed: Tensor, layout: Layout) -> Tensor:
        """Compute whole sequences of normed tokens: [B, T, d] -> [B, T, d]."""
        if not self.is_fused():
            return super().mix(normed, layout)
        if not self._fuses_output_projection(normed):
            out: Tensor = self.to_output(self._attend_and_gate(self.to_gate_value_base(normed), layout))
            return out
        projection, bias = self.to_gate_value_base, self.chunk_bias(layout)
        if is_untouched(projection) and layout.require_chunks().real is None:
            tokens = Projected(F.linear(normed, projection.weight), self.gamma, self.beta, projection.bias)
        else:
            tokens = Projected(projection(normed), self.gamma, self.beta)
        out = attend_projected(tokens, bias, layout, self.options, self.backend, output=self.to_output.weight)
        return out + self.to_output.bias.to(out.dtype)

    def _fuses_output_projection(self, normed: Tensor) -> bool:
        """Whether the attention also applies the output projection, which keeps less for a backward pass on a CPU."""
        return (
            is_untouched(self.to_output)
            and torch.is_grad_enabled()
            and normed.device.type == "cpu"
            and not torch.compiler.is_exporting()
        )

    def is_fused(self) -> bool:
        """Whether every step between the projections is FLASH's own, so that one operation may compute all of them."""
        own = self.__dict__
        return all(getattr(type(self), step) is getattr(FLASH, step) and step not in own for step in STEPS)

    def _attend_and_gate(self, projected: Tensor, layout: Layout) -> Tensor:
        """All `STEPS` of whole sequences as one operation: [B, T, 2 e + s] -> [B, T, e]."""
        tokens, bias = Projected(projected, self.gamma, self.beta), self.chunk_bias(layout)
        if torch.compiler.is_exporting() and layout.context is None:
            attended = exported.mixed_chunk(tokens, bias, layout, self.options, self.backend)
            bidirectional = self.options.bidirectional
            return layout.with_prefix(
                attended, lambda prefix: exported.mixed_chunk(tokens, bias, prefix, bidirectional, self.backend)
            )
        return attend_projected(tokens, bias, layout, self.options, self.backend)

    def attend(self, maps: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """The attention alone: [B, 4, T, s] and [B, T, e] -> [B, T, e]."""
        if layout.context is not None:
            raise ArgumentError(
                "context", f"is given, but {type(self).__name__} replaces a step of FLASH: only FLASH can split sequences."
            )
        return self._attend_heads(maps, v, layout, self.options)

    def _attend_heads(self, maps: Tensor, v: Tensor, layout: Layout, options: MixedChunkOptions) -> Tensor:
        backend: Backend = "torch" if self.backend == "tiled" else self.backend  # tiles begin with the projected tokens
        return attend_heads(Heads(*(*maps.unbind(1), v)), self.chunk_bias(layout), layout, options, backend)

    def attend_part(self, part: Part, maps: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """The quadratic or the linear part alone, in plain PyTorch: [B, 4, T, s] and [B, T, w] -> [B, T, w]."""
        return attend_part(part, Heads(*(*maps.unbind(1), v)), self.chunk_bias(layout), layout, self.options)

    def init_own_state(self, batch_size: int) -> MixedChunkState:
        """The state before the first token of `batch_size` streams."""
        return self.init_mixed_state(batch_size)

    def mix_next(self, normed: Tensor, state: MixedChunkState, layout: Layout) -> tuple[Tensor, MixedChunkState]:
        """Compute N more normed tokens of streams: [B, N, d] -> [B, N, d] and the new state."""
        if layout.prefix is not None or not self.is_fused():
            return super().mix_next(normed, state, layout)
        tokens = Projected(self.to_gate_value_base(normed), self.gamma, self.beta)
        bias = self.chunk_bias(layout)
        gated, state = stream.extend_projected(tokens, bias, layout.rotations, self.options, state, self.backend)
        return self.to_output(gated), state

    def attend_next(self, maps: Tensor, v: Tensor, state: MixedChunkState, layout: Layout) -> tuple[Tensor, MixedChunkState]:
        """Attend with a state of constant size; return the outputs and the new state."""
        return stream.extend(Heads(*(*maps.unbind(1), v)), self.chunk_bias(layout), self.options, state)

    def attend_bidirectional(self, maps: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Bidirectional attention within each prefix: [B, 4, T, s] and [B, T, e] -> [B, T, e]."""
        return self._attend_heads(maps, v, layout, self.options.bidirectional)

    def join_own_streams(self, states: Sequence[MixedChunkState]) -> MixedChunkStreams:
        """Join streams at different positions."""
        return mixed_chunk_streams(states, self.gamma.dtype)

    def separate_own_streams(self, streams: MixedChunkStreams, positions: Sequence[int]) -> list[MixedChunkState]:
        """The state of each stream."""
        return mixed_chunk_states(streams, positions)

    def step_layout(self, positions: Tensor) -> Layout:
        """The layout of a step, with the open chunk of each stream, which is the same for all layers."""
        dtype = acc_dtype(self.any_parameter)
        return super().step_layout(positions)._replace(open_chunk=open_chunk(positions, self.options, dtype))

    def mix_step(self, normed: Tensor, streams: MixedChunkStreams, layout: Layout) -> Tensor:
        """Compute one more normed token of every stream, [B, 1, d] -> [B, 1, d]; updates `streams` in place."""
        if not self.is_fused():
            return super().mix_step(normed, streams, layout)
        tokens, row = Projected(self.to_gate_value_base(normed), self.gamma, self.beta), self._bias_row(layout)
        gated = step_projected(tokens, row, layout.rotations, self.options, streams, layout.require_open_chunk())
        out: Tensor = self.to_output(gated)
        return out

    def attend_step(self, maps: Tensor, v: Tensor, streams: MixedChunkStreams, layout: Layout) -> Tensor:
        """Attend from one token of every stream, [B, 4, 1, s] and [B, 1, e] -> [B, 1, e]; updates `streams` in place."""
        check_streams(streams, self.chunk_size, self.d_qk, self.d_value)
        return step(maps, v, self._bias_row(layout), self.options, streams, layout.require_open_chunk())

    def _bias_row(self, layout: Layout) -> Tensor | None:
        """The relative bias of one token of every stream, [B, C], or None."""
        chunk = layout.require_open_chunk()
        return None if self.bias is None else self.bias(chunk.slot, chunk.slots, layout.place_rotations)
