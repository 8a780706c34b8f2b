"""FLASH local-only: the quadratic part alone. No token attends beyond its own chunk.

Shapes: B batch, N new tokens of a stream, G chunks, C chunk size, s query/key width, e value width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), the ablation "local only".

    out[t] = o_quad[t]
"""

from collections.abc import Sequence

from torch import Tensor

from lineartime.baselines.flash_parts import FLASHInParts
from lineartime.ops.batch import Batch
from lineartime.ops.mixed_chunk import stream
from lineartime.ops.mixed_chunk.stream import MixedChunkState, mixed_chunk_state


class FLASHLocal(FLASHInParts):
    """FLASH whose tokens attend only within their chunk.

    `FLASH` without its linear part. The options are those of `FLASH`.
    """

    name = "flash-local"
    n_maps = 2

    def attend_chunks(self, maps: Sequence[Tensor], v: Tensor, chunks: Batch, bias: Tensor | None) -> Tensor:
        q, k = maps
        return self.quadratic_part(q, k, v, chunks, bias)

    def attend_next(
        self, maps: Sequence[Tensor], v: Tensor, state: MixedChunkState, batch: Batch
    ) -> tuple[Tensor, MixedChunkState]:
        q, k = maps
        return stream.extend(q, None, [k], v, self.slot_bias(batch), self.options, state, batch)

    def init_own_state(self, batch_size: int) -> MixedChunkState:
        like = self.any_parameter
        return mixed_chunk_state(batch_size, self.chunk_size, self.d_qk, self.d_value, like, maps=1, linear=False)
