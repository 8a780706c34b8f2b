"""FLASH: the gated unit with mixed chunk attention, linear in the length of the sequence.

Shapes: B batch, T tokens, N new tokens of a stream, C chunk size, s query/key width, e value width.
The definition of its attention is in `lineartime.ops.mixed_chunk.reference`.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime.layers.checks import has_hooks
from lineartime.layers.chunked import ChunkedUnit
from lineartime.layers.dense import Dense
from lineartime.layers.gated import HasBackends
from lineartime.layers.opened import Part
from lineartime.layers.prefix import PrefixMixer
from lineartime.layers.stepping import SteppingMixer
from lineartime.ops import exported
from lineartime.ops.layout import Layout, LayoutPlan
from lineartime.ops.mixed_chunk import attend_heads, attend_part, attend_projected, stream
from lineartime.ops.mixed_chunk.inputs import Heads, Projected
from lineartime.ops.mixed_chunk.stream import MixedChunkState, MixedChunkStreams
from lineartime.ops.precision import acc_dtype


class FLASH(
    ChunkedUnit[MixedChunkState],
    PrefixMixer[MixedChunkState],
    SteppingMixer[MixedChunkState, MixedChunkStreams],
    HasBackends,
):
    """Gated unit with mixed chunk attention: quadratic inside chunks of C tokens, linear across them.

    Pre-norm and residual are inside: `y = FLASH(256)(x)` maps [B, T, d] to [B, T, d]. Causal, it streams with constant memory.
    With normalization="paper", scores are divided by the constant C, as published, and the linear part is averaged over chunks.
    With "paper_sum", a causal layer adds up chunks without averaging: see `MixedChunkOptions`.

    Options are those of `ChunkedUnit`.

    Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 3.
    """

    name = "flash"
    splits_context = True

    def plan(self) -> LayoutPlan:
        """As for all units with chunks; in an exported program, which reads any length, the operator cuts them."""
        plan = super().plan()._replace(normalization=self.normalization)
        return plan._replace(chunk_size=None) if torch.compiler.is_exporting() else plan

    def mix(self, normed: Tensor, layout: Layout) -> Tensor:
        """Whole sequences of normed tokens, [B, T, d] -> [B, T, d]."""
        if not self._keeps_less_with_its_output_map(normed):
            return super().mix(normed, layout)
        projection, bias = self.to_gate_value_base, self.chunk_bias(layout)
        if _is_untouched(projection) and layout.require_chunks().real is None:
            tokens = Projected(F.linear(normed, projection.weight), self.gamma, self.beta, projection.bias)
        else:
            tokens = Projected(projection(normed), self.gamma, self.beta)
        out = attend_projected(tokens, bias, layout, self.options, self.backend, output=self.to_output.weight)
        return out + self.to_output.bias.to(out.dtype)

    def _keeps_less_with_its_output_map(self, normed: Tensor) -> bool:
        """Whether attention applies the output map too: for a gradient on a CPU, if nobody has changed what is passed over."""
        is_own = _is_untouched(self.to_output) and type(self).attend_and_gate is FLASH.attend_and_gate
        return is_own and torch.is_grad_enabled() and normed.device.type == "cpu" and not torch.compiler.is_exporting()

    def attend_and_gate(self, projected: Tensor, layout: Layout) -> Tensor:
        """All between the two dense maps as one operation."""
        tokens, bias = Projected(projected, self.gamma, self.beta), self.chunk_bias(layout)
        if torch.compiler.is_exporting() and layout.context is None:
            attended = exported.mixed_chunk(tokens, bias, layout, self.options, self.backend)
            both_ways = self.options.both_ways
            return layout.with_prefix(
                attended, lambda prefix: exported.mixed_chunk(tokens, bias, prefix, both_ways, self.backend)
            )
        return attend_projected(tokens, bias, layout, self.options, self.backend)

    def attend_part(self, part: Part, maps: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """The quadratic or the linear part alone, in plain PyTorch: [B, 4, T, s] and [B, T, w] -> [B, T, w]."""
        return attend_part(part, Heads(*(*maps.unbind(1), v)), self.chunk_bias(layout), layout, self.options)

    def init_own_state(self, batch_size: int) -> MixedChunkState:
        """The state before the first token of `batch_size` streams."""
        return self.init_mixed_state(batch_size)

    def attend_next(self, maps: Tensor, v: Tensor, state: MixedChunkState, layout: Layout) -> tuple[Tensor, MixedChunkState]:
        """Attend with a state of constant size, and the state N tokens later."""
        return stream.extend(Heads(*(*maps.unbind(1), v)), self.chunk_bias(layout), self.options, state)

    def attend_both_ways(self, maps: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Every prefix by itself: [B, 4, T, s] and [B, T, e] -> [B, T, e]."""
        return attend_heads(Heads(*(*maps.unbind(1), v)), self.chunk_bias(layout), layout, self.options.both_ways)

    def join_own_streams(self, states: Sequence[MixedChunkState]) -> MixedChunkStreams:
        """Join streams at different positions."""
        return stream.mixed_chunk_streams(states, self.gamma.dtype)

    def step_layout(self, positions: Tensor) -> Layout:
        """The layout of a step, with what all layers would work out of the chunks that the new tokens stand in."""
        dtype = acc_dtype(self.to_output.weight)
        return super().step_layout(positions)._replace(open_chunk=stream.open_chunk(positions, self.options, dtype))

    def mix_step(self, normed: Tensor, streams: MixedChunkStreams, layout: Layout) -> Tensor:
        """One more normed token of every stream, [B, 1, d] -> [B, 1, d]; updates `streams` in place."""
        chunk = layout.open_chunk
        assert chunk is not None  # step_layout makes it
        row: Tensor | None = None
        if self.bias is not None:
            row = self.bias(chunk.slot, chunk.slots, layout.place_rotations)
        tokens = Projected(self.to_gate_value_base(normed), self.gamma, self.beta)
        out: Tensor = self.to_output(stream.step_projected(tokens, row, layout.rotations, self.options, streams, chunk))
        return out


def _is_untouched(layer: nn.Module) -> bool:
    """Whether a dense map is what this library made, so that attention can do what it does without calling it."""
    return type(layer) is Dense and type(layer.weight) is nn.Parameter and not has_hooks(layer)
