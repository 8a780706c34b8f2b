"""Attention as pure functions of tensors; each file holds the definition, the parallel form and the streaming form."""

from lineartime.ops.mixed_chunk import (
    MixedChunkState,
    mixed_chunk_attention,
    mixed_chunk_attention_extend,
    mixed_chunk_attention_oracle,
    mixed_chunk_state,
)
from lineartime.ops.positions import rope, rotary_bias, sinusoid, table_bias
from lineartime.ops.quadratic import (
    QuadraticState,
    quadratic_attention,
    quadratic_attention_extend,
    quadratic_attention_oracle,
)

__all__ = [
    "MixedChunkState",
    "QuadraticState",
    "mixed_chunk_attention",
    "mixed_chunk_attention_extend",
    "mixed_chunk_attention_oracle",
    "mixed_chunk_state",
    "quadratic_attention",
    "quadratic_attention_extend",
    "quadratic_attention_oracle",
    "rope",
    "rotary_bias",
    "sinusoid",
    "table_bias",
]
