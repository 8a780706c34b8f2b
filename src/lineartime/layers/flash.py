"""FLASH: the gated unit with mixed chunk attention, linear in the length of the sequence.

Shapes: B batch, T tokens, N new tokens of a stream, C chunk size, s query/key width, e value width.
The definition of its attention is in `lineartime.ops.mixed_chunk.reference`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from lineartime.errors import check_choice
from lineartime.layers.dense import factory, is_untouched
from lineartime.layers.gau import GatedOptions, GatedUnit
from lineartime.layers.positions import RelativeBias, build_relative_bias
from lineartime.ops.activations import CHUNK_NORMALIZATIONS
from lineartime.ops.backends import Backend
from lineartime.ops.batch import Batch, Needs
from lineartime.ops.checks import check_positive
from lineartime.ops.mixed_chunk import attend_projected, stream
from lineartime.ops.mixed_chunk.inputs import MixedChunkOptions, Projected
from lineartime.ops.mixed_chunk.memories import Memory, queries_and_keys
from lineartime.ops.mixed_chunk.stream import SlotBias, mixed_chunk_state
from lineartime.ops.modes import acc_dtype
from lineartime.ops.token_shift import shift_next, tokens_before


class FLASH(GatedUnit):
    """Gated unit with mixed chunk attention: quadratic inside chunks of C tokens, linear across them.

    The layer includes a pre-norm and a residual connection: `y = FLASH(256)(x)` maps [B, T, d] to [B, T, d]. A causal layer
    streams with constant memory. With normalization="paper", scores are divided by the constant C, as published, and the linear
    part is averaged over chunks. With "paper_sum", a causal layer sums over chunks without averaging: see `MixedChunkOptions`.

    Everything between the two projections is one operation.

    Args:
        chunk_size: C; the length of the input need not be a multiple of it.
        memory: what the linear part reads of the chunks before: their "sum", as published, or "mesa", which
            `lineartime.ops.mixed_chunk.memories` defines: its queries and keys have no positions, and its keys one length.
        relative_bias: whether to add a learned bias, which depends on the distance, to the scores of the quadratic part: a
            table for chunks of up to 512 tokens, and the rotary form for longer ones.
        **options: the options of `GatedUnit`; the activation applies to the quadratic part.

    Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 3.
    """

    name = "flash"
    n_maps = 4
    normalizations = CHUNK_NORMALIZATIONS
    splits_context = True
    reads_prefix = True
    any_positions = True
    constant_state = True
    backend: Backend | None = "auto"
    backends = ("auto", "torch", "tiled", "oracle")
    bias_chunks: ClassVar[int] = 1
    """The number of consecutive chunks that the relative bias spans."""

    def __init__(
        self,
        d_model: int,
        *,
        chunk_size: int = 256,
        relative_bias: bool = True,
        memory: Memory = "sum",
        **options: Unpack[GatedOptions],
    ) -> None:
        check_choice("memory", memory, get_args(Memory))
        self.memory: Memory = memory
        super().__init__(d_model, **options)
        check_positive(chunk_size=chunk_size)
        if memory != "sum":
            self.splits_context = self.constant_state = False
        self.chunk_size = chunk_size
        self.relative_bias = relative_bias
        self.bias: RelativeBias | None = None
        if relative_bias:
            self.bias = build_relative_bias(self.bias_chunks * chunk_size, self.d_qk, **factory(options))

    def init_own(self) -> None:
        """Begin as published; of mesa, queries begin as 4 Y, and keys as Y of the token before.

        Recall takes off with what the memory returns: queries that begin as Y learn it twice as late.
        """
        super().init_own()
        if self.memory != "sum":
            for parameter, start in ((self.gamma, (4.0, 0.0)), (self.beta, (0.0, 1.0))):
                with torch.no_grad():
                    parameter[2:].copy_(parameter.new_tensor(start)[:, None].expand(2, self.d_qk))

    @property
    def title(self) -> str:
        return super().title if self.memory == "sum" else f"{super().title} with the memory {self.memory}"

    @property
    def options(self) -> MixedChunkOptions:
        """The options of its attention."""
        return MixedChunkOptions(self.chunk_size, self.causal, self.activation, self.normalization, self.memory)

    def needs(self) -> Needs:
        return Needs(self.chunk_size, self.d_qk if self.rope else None, dtype=acc_dtype(self.gamma))

    def chunk_bias(self, batch: Batch) -> Tensor | None:
        """The relative bias of the quadratic part, [C, C], or None; C is the chunk size of the batch."""
        size = batch.chunk_size or self.chunk_size
        return None if self.bias is None else self.bias.consecutive(size, size, batch=batch)

    def slot_bias(self, batch: Batch) -> SlotBias | None:
        """The relative bias of queries in some slots of a chunk, int64 [...], for the keys of all its slots: [..., C]."""
        bias = self.bias
        if bias is None:
            return None
        keys = torch.arange(self.chunk_size, device=self.gamma.device)
        return lambda slots: bias(slots.flatten(), keys, batch).view(*slots.shape, self.chunk_size)

    def mix(self, normed: Tensor, batch: Batch) -> Tensor:
        projection, bias = self.to_gate_value_base, self.chunk_bias(batch)
        # On a CPU, fusing the output projection, too, keeps less for the backward pass.
        fused = torch.is_grad_enabled() and normed.device.type == "cpu" and is_untouched(self.to_output)
        if fused and batch.real is None and is_untouched(projection):
            tokens = Projected(F.linear(normed, projection.weight), self.gamma, self.beta, projection.bias)
        else:
            tokens = Projected(projection(normed), self.gamma, self.beta)
        if self.memory != "sum":
            tokens, y = tokens.with_base()
            tokens = tokens._replace(linear=self._linear_maps(y, batch))
        output = self.to_output.weight if fused else None
        attended = attend_projected(tokens, bias, batch, self.options, self.backend or "auto", output=output)
        return attended + self.to_output.bias.to(attended.dtype) if fused else self.to_output(attended)

    def _linear_maps(self, y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The queries and keys of mesa, [B, T, s], of whole sequences with the base Y."""
        before = tokens_before(y, None if batch.document is None else batch.positions)
        return queries_and_keys(y, before, self.gamma, self.beta)

    def init_own_state(self, batch_size: int) -> Any:
        like = self.any_parameter
        return mixed_chunk_state(batch_size, self.chunk_size, self.d_qk, self.d_value, like, memory=self.memory)

    def project(self, normed: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """The gate and the values, [B, T, e], and the queries and keys, [B, T, s] each, of whole sequences."""
        if self.memory == "sum":
            return super().project(normed, batch)
        tokens = Projected(self.to_gate_value_base(normed), self.gamma, self.beta)
        gate, v, maps = self.split(tokens.tokens, batch.rotations)
        return gate, v, (*maps[:2], *self._linear_maps(tokens.base(), batch))

    def mix_next(self, normed: Tensor, state: Any, batch: Batch) -> tuple[Tensor, Any]:
        tokens, backend = Projected(self.to_gate_value_base(normed), self.gamma, self.beta), self.backend or "auto"
        if self.memory != "sum":
            y = tokens.base()
            both, last = shift_next(torch.cat([y, y], -1), state.last, batch.counts)
            linear = queries_and_keys(y, both[..., : self.d_qk], self.gamma, self.beta)
            state, tokens = replace(state, last=last), tokens._replace(linear=linear)
        gated, state = stream.extend_projected(tokens, self.slot_bias(batch), batch, self.options, state, backend)
        return self.to_output(gated), state
