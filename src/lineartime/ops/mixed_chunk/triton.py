"""Mixed chunk attention by Triton kernels, for GPUs: see `lineartime.ops.triton.mixed_chunk`."""

from typing import Any

from torch import Tensor

from lineartime.ops.layout import Layout
from lineartime.ops.mixed_chunk.chunked import chunk_scales
from lineartime.ops.mixed_chunk.inputs import Heads, MixedChunkOptions, Projected
from lineartime.ops.precision import common_dtype, matmul_dtype, output_dtype, without_autocast


def attend(heads: Heads, bias: Tensor | None, layout: Layout, options: MixedChunkOptions) -> Tensor:
    """The same function as the chunked form, [B, T, e], without scores in memory; keeps the states of chunks."""
    from lineartime.ops.triton import mixed_chunk as kernels  # Triton may be absent

    chunks, dtype = layout.require_chunks(), common_dtype(*heads)
    with without_autocast(heads.v):
        out = kernels.attend(
            *(chunks.cut(x.to(dtype)) for x in heads),
            bias=bias,
            **_constants(layout, options, heads.q_quad.shape[-1], heads.v),
        )
        return chunks.join(out.to(output_dtype(heads.v, matmul_dtype(*heads))))


def attend_gated(projected: Projected, bias: Tensor | None, layout: Layout, options: MixedChunkOptions) -> Tensor:
    """All of a FLASH layer between its dense maps, [B, T, e]: the kernels make queries, keys and values, and apply the gate."""
    from lineartime.ops.triton import gated as kernels  # Triton may be absent

    tokens, gamma, beta, _ = projected.with_bias()
    chunks, dtype = layout.require_chunks(), common_dtype(tokens, gamma)
    with without_autocast(tokens):
        out = kernels.attend(
            chunks.cut(tokens.to(dtype)),
            gamma,
            beta,
            bias=bias,
            rotations=layout.chunk_rotations,
            real=chunks.real,
            **_constants(layout, options, projected.d_qk, tokens),
        )
    return chunks.join(out.to(output_dtype(tokens, matmul_dtype(tokens, gamma))))


def _constants(layout: Layout, options: MixedChunkOptions, d_qk: int, like: Tensor) -> dict[str, Any]:
    """The arguments of both kinds of kernels that autograd does not differentiate."""
    chunks, scales = layout.require_chunks(), chunk_scales(layout, options, d_qk, like)
    return {
        "row_scale": scales.row.expand(-1, scales.state.shape[1], chunks.chunk_size).contiguous(),
        "state_scale": scales.state,
        "document_starts": chunks.document_starts.int(),
        "score_scale": scales.score,
        "causal": options.causal,
        "activation": "laplace" if options.activation == "laplace" else "relu2",
    }
