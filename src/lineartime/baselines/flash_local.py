"""FLASH local-only: the quadratic part alone. No token attends beyond its own chunk.

Shapes: N tokens, C chunk size, s query/key width, e value width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), the ablation "local only".

    out[t] = o_quad[t]
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lineartime.baselines.flash_parts import FLASHVariant
from lineartime.ops.mixed_chunk import MixedChunkState, attend, mixed_chunk_state
from lineartime.ops.packing import Packing


class FLASHLocal(FLASHVariant):
    """FLASH whose tokens attend only within their chunk.

    `FLASH` without its linear part. The options are those of `FLASH`.
    """

    name = "flash-local"
    n_maps = 2

    def attend(self, maps: Sequence[Tensor], v: Tensor, packing: Packing, state: Any) -> tuple[Tensor, Any]:
        q, k = maps
        return attend(q, k, None, None, v, packing, self.options(packing), state)

    def init_own_state(self, batch_size: int) -> MixedChunkState:
        like = self.any_parameter
        return mixed_chunk_state(batch_size, self.chunk_size, self.d_qk, self.d_value, like, maps=1, linear=False)
