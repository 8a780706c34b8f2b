"""FLASH local-only: the quadratic part alone. No token attends beyond its own chunk.

Shapes: B batch, N new tokens of a stream, G chunks, C chunk size, s query/key width, e value width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), the ablation "local only".

    out[t] = o_quad[t]
"""

from torch import Tensor

from lineartime.baselines.flash_parts import FLASHInParts
from lineartime.ops.layout import Layout
from lineartime.ops.mixed_chunk.stream import MixedChunkState


class FLASHLocal(FLASHInParts[MixedChunkState]):
    """FLASH whose tokens attend only within their chunk.

    `FLASH` without its linear part. The options are those of `FLASH`.
    """

    name = "flash-local"
    n_maps = 2
    parts = ("local",)

    def attend_next(self, maps: Tensor, v: Tensor, state: MixedChunkState, layout: Layout) -> tuple[Tensor, MixedChunkState]:
        """Attend to the open chunk; return the outputs and the new state."""
        q, k = maps.unbind(1)
        return self.quadratic_next(q, k, v, state, layout)

    def init_own_state(self, batch_size: int) -> MixedChunkState:
        """The state before the first token of `batch_size` streams."""
        return self.quadratic_state(batch_size)
