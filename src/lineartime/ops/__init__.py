"""Attention as pure functions of tensors: each with its definition, its parallel forms and its streaming form."""

from lineartime.ops.mixed_chunk import MixedChunkOptions, MixedChunkState, Scales, attend, step
from lineartime.ops.packing import Packing, describe
from lineartime.ops.positions import rope, sinusoid
from lineartime.ops.state import KVCache

__all__ = [
    "KVCache",
    "MixedChunkOptions",
    "MixedChunkState",
    "Packing",
    "Scales",
    "attend",
    "describe",
    "rope",
    "sinusoid",
    "step",
]
