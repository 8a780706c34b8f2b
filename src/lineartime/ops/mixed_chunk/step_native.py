"""The step of streams between the two dense maps of a FLASH layer, by a function in C++: it reads what it needs and no more.

Shapes: B streams, C chunk size, e value width, s query/key width.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lineartime.native import native_functions
from lineartime.ops.mixed_chunk.inputs import MixedChunkOptions, Projected
from lineartime.ops.operator import is_plain
from lineartime.ops.precision import acc_dtype

if TYPE_CHECKING:
    from lineartime.ops.mixed_chunk.stream import MixedChunkStreams, OpenChunk

SOURCE = Path(__file__).with_name("step.cpp")


def step(
    projected: Projected,
    bias: Tensor | None,
    rotations: Tensor | None,
    options: MixedChunkOptions,
    streams: "MixedChunkStreams",
    chunk: "OpenChunk",
) -> Tensor | None:
    """`step_projected` of stream.py, or None where this form cannot run; `streams` is as it was then."""
    tokens, gamma, beta = projected.tokens.contiguous(), projected.gamma, projected.beta
    d_qk, dtype = projected.d_qk, tokens.dtype
    if tokens.device.type != "cpu" or options.activation != "relu2" or d_qk % 2 or not tokens.numel():
        return None
    if gamma.dtype != dtype or beta.dtype != dtype or streams.sums.dtype != acc_dtype(tokens):
        return None
    if not is_plain(tokens, gamma, beta, bias, rotations, *streams, chunk.slot):
        return None
    functions = native_functions(SOURCE)
    if functions is None:
        return None
    if rotations is None:  # by nothing: a cosine of 1 and a sine of 0
        rotations = torch.tensor([1.0, 0.0], dtype=streams.sums.dtype).repeat_interleave(d_qk // 2).view(2, 1, 1, -1)
    cosines, sines = rotations.contiguous().unbind(0)
    bias = None if bias is None else bias.to(dtype).contiguous()
    length = options.published_length
    gated = tokens.new_empty(*tokens.shape[:-1], projected.d_value)
    functions.call(
        "step", dtype, tokens, gamma, beta, cosines, sines, d_qk // 2 if len(cosines) > 1 else 0, bias, options.chunk_size,
        chunk.slot, chunk.share, chunk.summary_share, d_qk**-0.5 if length is None else 1 / length, streams.sums, streams.keys,
        streams.values, streams.position, gated, len(tokens), options.chunk_size, projected.d_value, d_qk,
    )  # fmt: skip
    return gated
