"""FLASH: the gated unit with mixed chunk attention, linear in the length of the sequence.

Shapes: B batch, T tokens, N new tokens of a stream, C chunk size, s query/key width, e value width.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import Unpack

from lineartime.layers.checks import check_positive
from lineartime.layers.gated import GatedOptions, GatedUnit
from lineartime.layers.positions import build_relative_bias
from lineartime.layers.residual import new_positions
from lineartime.ops.context_parallel import context_parallel_attention
from lineartime.ops.gated_mixed_chunk import gated_mixed_chunk_attention
from lineartime.ops.mixed_chunk_stream import (
    MixedChunkState,
    MixedChunkStreams,
    mixed_chunk_attention_extend,
    mixed_chunk_attention_step,
    mixed_chunk_state,
    mixed_chunk_streams,
)


class FLASH(GatedUnit):
    """Gated unit with mixed chunk attention: quadratic inside chunks of C tokens, linear across them.

    Pre-norm and residual are inside: `y = FLASH(256)(x)` maps [B, T, d] to [B, T, d]. Causal, it streams with constant memory.
    With normalization="paper", the quadratic part is divided by the constant C, as published.

    Args:
        chunk_size: C; the length of the input need not be a multiple of it.
        relative_bias: whether a learned bias by distance is added to the scores of the quadratic part: a table for chunks of
            up to 512 tokens, the rotary form beyond.
        **options: those of `GatedUnit`; the activation is that of the quadratic part.

    Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 3.
    """

    name = "flash"
    n_maps = 4
    splits_context = True
    bias_chunks: ClassVar[int] = 1
    """How many chunks in a row the relative bias spans."""

    def __init__(
        self,
        d_model: int,
        *,
        chunk_size: int = 256,
        relative_bias: bool = True,
        **options: Unpack[GatedOptions],
    ) -> None:
        super().__init__(d_model, **options)
        check_positive(chunk_size=chunk_size)
        self.chunk_size = chunk_size
        self.bias = build_relative_bias(self.bias_chunks * chunk_size, self.d_qk) if relative_bias else None

    def attend_and_gate(self, projected: Tensor, positions: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        """All between the two dense maps as one operation."""
        attend: Callable[..., Tensor] = gated_mixed_chunk_attention
        if self.context is not None:
            attend = partial(context_parallel_attention, group=self.context)
            positions = positions + self.context.rank * projected.shape[1]
        return attend(
            projected,
            self.gamma,
            self.beta,
            chunk_size=self.chunk_size,
            positions=positions if self.rope else None,
            causal=self.causal,
            bias=self.chunk_bias(),
            mask=mask,
            cu_seqlens=cu_seqlens,
            activation=self.activation,
            normalization=self.normalization,
            backend=self.backend,
        )

    def chunk_bias(self) -> Tensor | None:
        """The relative bias of the quadratic part, [C, C], if there is one."""
        if self.bias is None:
            return None
        positions = new_positions(0, self.chunk_size, self.gamma.device)
        bias: Tensor = self.bias(positions, positions)
        return bias

    def init_state(self, batch_size: int) -> Any:
        """The state before the first token of `batch_size` streams; ValueError unless the layer is causal."""
        self.check_causal()
        return mixed_chunk_state(batch_size, self.chunk_size, self.d_qk, self.d_value, like=self.to_output.weight)

    def attend_next(self, maps: Tensor, v: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Attend with a state of constant size, and the state N tokens later."""
        q_quad, k_quad, q_lin, k_lin = maps.unbind(1)
        return mixed_chunk_attention_extend(
            q_quad,
            k_quad,
            q_lin,
            k_lin,
            v,
            state,
            bias=self.chunk_bias(),
            activation=self.activation,
            normalization=self.normalization,
        )

    def join_streams(self, states: Sequence[MixedChunkState]) -> MixedChunkStreams:
        """Bring streams at different positions together; their size stays the same for ever."""
        self.check_causal()
        return mixed_chunk_streams(states)

    def step(self, x: Tensor, streams: MixedChunkStreams) -> Tensor:
        """Continue joined streams by one token, [B, 1, d] -> [B, 1, d]; `streams` is brought up to date in place.

        Raises:
            ValueError: unless x is one token for each stream.
        """
        self.check_input(x)
        if x.shape[:2] != (len(streams.position), 1):
            raise ValueError(
                f"x has shape {list(x.shape)}, but must be [B, 1, d_model] for B = {len(streams.position)} streams."
            )
        gate, v, maps = self.split(self.to_gate_value_base(self.norm(x)), streams.position[:, None])
        q_quad, k_quad, q_lin, k_lin = maps.unbind(1)
        attended = mixed_chunk_attention_step(
            q_quad,
            k_quad,
            q_lin,
            k_lin,
            v,
            streams,
            bias=None
            if self.bias is None
            else self.bias(streams.position % self.chunk_size, new_positions(0, self.chunk_size, x.device)),
            activation=self.activation,
            normalization=self.normalization,
        )
        return self.add_output(x, self.gate(gate, attended))
