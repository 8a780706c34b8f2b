"""Mixed chunk attention by Triton kernels, for GPUs: see `lineartime.ops.triton.mixed_chunk`."""

from typing import Any

import torch
from torch import Tensor

from lineartime.ops.backends import Backend, takes_triton
from lineartime.ops.chunks import Chunks
from lineartime.ops.layout import Layout
from lineartime.ops.mixed_chunk.chunked import chunk_scales
from lineartime.ops.mixed_chunk.inputs import Heads, MixedChunkOptions, Projected
from lineartime.ops.precision import common_dtype, matmul_dtype, output_dtype, without_autocast


def attend(heads: Heads, bias: Tensor | None, layout: Layout, options: MixedChunkOptions) -> Tensor:
    """The same function as the chunked form, [B, T, e]; it keeps the states of chunks, and no scores."""
    from lineartime.ops.triton import mixed_chunk as kernels  # Triton may be absent

    chunks, dtype = layout.require_chunks(), common_dtype(*heads)
    with without_autocast(heads.v):
        out = kernels.attend(
            *(chunks.cut(x.to(dtype)) for x in heads),
            bias=bias,
            causal=options.causal,
            **_constants(layout, options, heads.q_quad.shape[-1], heads.v),
        )
        return chunks.join(out.to(output_dtype(heads.v, matmul_dtype(*heads))))


def attend_gated(projected: Projected, bias: Tensor | None, layout: Layout, options: MixedChunkOptions) -> Tensor:
    """All of a FLASH layer between its linear projections, [B, T, e]: the kernels also make queries, keys and values."""
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
            causal=options.causal,
            **_constants(layout, options, projected.d_qk, tokens),
        )
    return chunks.join(out.to(output_dtype(tokens, matmul_dtype(tokens, gamma))))


def can_extend(
    projected: Projected, bias: Tensor | None, options: MixedChunkOptions, summary: Tensor, backend: Backend
) -> bool:
    """Whether `extend_gated` takes streams: the backend chooses the kernels, they can run here, and no gradient is needed."""
    tokens, gamma, beta, _ = projected
    inputs = [x for x in (tokens, gamma, beta, bias, summary) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return False
    return takes_triton(backend, tokens, matmul_dtype(tokens, gamma), options.activation)


def extend_gated(
    projected: Projected,
    bias: Tensor | None,
    layout: Layout,
    options: MixedChunkOptions,
    summary: Tensor,
    position: int,
) -> tuple[Tensor, Tensor]:
    """Causal `attend_gated` for whole chunks of new tokens of streams, after others; it has no gradient.

    Args:
        projected: the new tokens, [B, N, 2 e + s]; N is a multiple of C.
        bias: [C, C], or None.
        layout: that of the new tokens, with their rotations.
        options: causal ones.
        summary: [B, s, e], the sum of k_lin v^T over the tokens before; it is not changed.
        position: their number, a multiple of C.

    Returns:
        [B, N, e], and the summary with the new tokens.
    """
    from lineartime.ops.triton import gated as kernels  # Triton may be absent

    tokens, gamma, beta, _ = projected.with_bias()
    chunks, dtype = layout.require_chunks(), common_dtype(tokens, gamma)
    with without_autocast(tokens):
        out, summary = kernels.extend(
            chunks.cut(tokens.to(dtype)),
            gamma,
            beta,
            summary,
            bias=bias,
            rotations=layout.chunk_rotations,
            **_constants(layout, options, projected.d_qk, tokens, position),
        )
    return chunks.join(out.to(output_dtype(tokens, matmul_dtype(tokens, gamma)))), summary


def _constants(layout: Layout, options: MixedChunkOptions, d_qk: int, like: Tensor, before: int = 0) -> dict[str, Any]:
    """The arguments of all kernels that autograd does not differentiate, for documents after `before` other tokens."""
    chunks, scales = layout.require_chunks(), chunk_scales(layout, options, d_qk, like, before)
    return {
        "row_scale": scales.row_scale.expand(-1, scales.state_scale.shape[1], chunks.chunk_size).contiguous(),
        "state_scale": scales.state_scale,
        "document_starts": _document_starts(chunks),
        "score_scale": scales.score_scale,
        "activation": options.activation,
    }


def _document_starts(chunks: Chunks) -> Tensor:
    """Where the chunks of each document begin, and the number of all chunks, so that the kernels write every state.

    Compiled code cuts a pack into as many chunks as there can be. Those that no document fills hold zeros.
    """
    starts = chunks.document_starts.int()
    return starts if chunks.document is None else torch.cat([starts[:-1], starts.new_full((1,), chunks.n_chunks)])
