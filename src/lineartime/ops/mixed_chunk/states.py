"""What mixed chunk attention remembers of streams, of constant size.

Shapes: B streams, C chunk size, s query/key width, e value width, M maps of keys (1 if both parts share one, or there is one
part).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lineartime.ops.mixed_chunk.memories import Memory
from lineartime.ops.precision import acc_dtype
from lineartime.ops.state import State


@dataclass(eq=False)
class MixedChunkState(State):
    """What causal streams remember; its size does not depend on the number of tokens read.

    Attributes:
        position: int64 [B], the number of tokens that each stream has read; position % C of them are in the open chunk.
        summary: [B, s, e], the sum of k_lin v^T over all complete chunks, in float32 or better.
        keys: [B, M, C, s], the keys of the open chunk: of the quadratic and of the linear part.
        values: [B, C, e], its values. The slots after its tokens hold any numbers.
    """

    position: Tensor
    summary: Tensor
    keys: Tensor
    values: Tensor


@dataclass(eq=False)
class MemoryState(MixedChunkState):
    """The state of the memory mesa; `summary` is its S.

    Attributes:
        last: [B, s], the Y of the last token, of which the next key tells.
        gram: [B, s, s], its P.
    """

    last: Tensor
    gram: Tensor


def mixed_chunk_state(
    batch_size: int,
    chunk_size: int,
    d_qk: int,
    d_value: int,
    like: Tensor,
    *,
    maps: int = 2,
    linear: bool = True,
    memory: Memory = "sum",
) -> MixedChunkState:
    """The state before the first token, with keys and values in the dtype of `like`, on its device."""

    def zeros(*shape: int, dtype: torch.dtype = like.dtype) -> Tensor:
        return torch.zeros(batch_size, *shape, dtype=dtype, device=like.device)

    parts = (
        zeros(dtype=torch.long),
        zeros(d_qk if linear else 0, d_value, dtype=acc_dtype(like)),
        zeros(maps, chunk_size, d_qk),
        zeros(chunk_size, d_value),
    )
    if memory == "sum":
        return MixedChunkState(*parts)
    return MemoryState(*parts, zeros(d_qk), zeros(d_qk, d_qk, dtype=acc_dtype(like)))
