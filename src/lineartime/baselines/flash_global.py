"""FLASH global-only: the linear part alone. A causal token does not attend to its own chunk, so chunks are small.

Shapes: B batch, N new tokens of a stream, C chunk size, s query/key width, e value width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), the ablation "global only", with chunks of 64.

    out[t] = o_lin[t]
"""

from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from lineartime.baselines.flash_parts import FLASHInParts
from lineartime.layers.mixer import MixerOptions
from lineartime.ops.activations import Normalization
from lineartime.ops.chunks import fill, open_chunk_pieces
from lineartime.ops.layout import Layout
from lineartime.ops.precision import matmul_dtype, output_dtype, without_autocast


class FLASHGlobalState(NamedTuple):
    """The state of causal streams, of constant size.

    Attributes:
        summary: [B, s, e], the sum of k v^T over all complete chunks.
        k, v: [B, C, s] and [B, C, e] of the open chunk, zero beyond its tokens.
        position: the number of tokens read so far.
    """

    summary: Tensor
    k: Tensor
    v: Tensor
    position: int


class FLASHGlobalOptions(MixerOptions, total=False):
    """The options of `FLASH` that are not those of its quadratic part."""

    d_qk: int
    expansion: int
    normalization: Normalization
    rope: bool


class FLASHGlobal(FLASHInParts[FLASHGlobalState]):
    """FLASH with linear attention across chunks of 64 alone.

    Args:
        chunk_size: C; the length of the input need not be a multiple of it.
        **options: the options of `FLASH`, except rotary_width and those of the quadratic part: activation, relative_bias,
            bias_form and initial_scores.
    """

    name = "flash-global"
    n_maps = 2
    parts = ("global",)

    def __init__(self, d_model: int, *, chunk_size: int = 64, **options: Unpack[FLASHGlobalOptions]) -> None:
        # Passed explicitly, so that a caller who passes them gets a TypeError.
        super().__init__(
            d_model,
            chunk_size=chunk_size,
            activation="relu2",
            relative_bias=False,
            bias_form="auto",
            rotary_width=None,
            initial_scores="small",
            **options,
        )

    def attend_next(self, maps: Tensor, v: Tensor, state: FLASHGlobalState, layout: Layout) -> tuple[Tensor, FLASHGlobalState]:
        """Attend to the summary of all complete chunks; return the outputs and the new state."""
        compute = matmul_dtype(maps, v)
        q, k = maps.unbind(1)
        outputs = [v[:, :0].to(output_dtype(v, compute))]
        with without_autocast(v):
            for new, first, last in open_chunk_pieces(state.position, v.shape[1], self.chunk_size):
                context = state.summary / self.options.linear_divisor(state.position - first)
                outputs.append((q[:, new].to(compute) @ context.to(compute)).to(outputs[0].dtype))
                k_open, v_open = fill(state.k, first, k[:, new]), fill(state.v, first, v[:, new])
                position = state.position + last - first
                if last == self.chunk_size:
                    summary = state.summary + k_open.mT @ v_open
                    state = FLASHGlobalState(summary, torch.zeros_like(k_open), torch.zeros_like(v_open), position)
                else:
                    state = FLASHGlobalState(state.summary, k_open, v_open, position)
        return torch.cat(outputs, 1), state

    def init_own_state(self, batch_size: int) -> FLASHGlobalState:
        """The state before the first token of `batch_size` streams."""
        mixed = self.init_mixed_state(batch_size)
        return FLASHGlobalState(mixed.summary, mixed.k_lin, mixed.v, 0)
