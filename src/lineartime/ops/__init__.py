"""Attention as pure functions of tensors: each with its definition, its parallel forms and its streaming form."""

from lineartime.ops.cross import cross_attention, cross_attention_oracle
from lineartime.ops.linear import LinearState, linear_attention, linear_attention_extend, linear_attention_oracle
from lineartime.ops.mixed_chunk import gated_mixed_chunk_attention, mixed_chunk_attention, mixed_chunk_attention_oracle
from lineartime.ops.mixed_chunk.stream import MixedChunkState, mixed_chunk_attention_extend, mixed_chunk_state
from lineartime.ops.positions import FactoredBias, rope, rotary_bias, sinusoid, table_bias
from lineartime.ops.quadratic import quadratic_attention, quadratic_attention_extend, quadratic_attention_oracle
from lineartime.ops.state import KVCache

__all__ = [
    "FactoredBias",
    "KVCache",
    "LinearState",
    "MixedChunkState",
    "cross_attention",
    "cross_attention_oracle",
    "gated_mixed_chunk_attention",
    "linear_attention",
    "linear_attention_extend",
    "linear_attention_oracle",
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
