"""FLASH global-only: the linear part alone. A causal token does not attend to its own chunk, so chunks are small.

Shapes: N tokens, C chunk size, s query/key width, e value width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), the ablation "global only", with chunks of 64.

    out[t] = o_lin[t]
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from lineartime.baselines.flash_parts import FLASHVariant
from lineartime.layers.mixer import MixerOptions
from lineartime.ops.activations import Normalization
from lineartime.ops.mixed_chunk import MixedChunkState, attend, mixed_chunk_state
from lineartime.ops.packing import Packing


class FLASHGlobalOptions(MixerOptions, total=False):
    """The options of `FLASH` that are not those of its quadratic part."""

    d_qk: int
    expansion: int
    normalization: Normalization
    rope: bool


class FLASHGlobal(FLASHVariant):
    """FLASH with linear attention across chunks of 64 alone.

    Args:
        chunk_size: C; the length of the input need not be a multiple of it.
        **options: the options of `FLASH`, except those of the quadratic part: activation, relative_bias and initial_scores.
    """

    name = "flash-global"
    n_maps = 2

    def __init__(self, d_model: int, *, chunk_size: int = 64, **options: Unpack[FLASHGlobalOptions]) -> None:
        # Passed explicitly, so that a caller who passes them gets a TypeError.
        super().__init__(
            d_model, chunk_size=chunk_size, activation="relu2", relative_bias=False, initial_scores="small", **options
        )

    def attend(self, maps: Sequence[Tensor], v: Tensor, packing: Packing, state: Any) -> tuple[Tensor, Any]:
        q, k = maps
        return attend(None, None, q, k, v, packing, self.options(packing), state)

    def init_own_state(self, batch_size: int) -> MixedChunkState:
        return mixed_chunk_state(batch_size, self.chunk_size, self.d_qk, self.d_value, self.any_parameter, maps=1)
