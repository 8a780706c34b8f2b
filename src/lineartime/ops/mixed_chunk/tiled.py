"""Mixed chunk attention of a FLASH layer on CPUs, a few chunks at a time: everything between its two projections.

Shapes: B batch, D documents, G chunks of all documents, C chunk size, d model width, e value width, s query/key width.

    U, V, Z = split(silu(projected))                                                       [e] [e] [s]
    q_quad, k_quad, q_lin, k_lin = rope(Z * gamma_i + beta_i)                               i = 1 ... 4
    gated = U * (weight_scale * relu(score_scale * q_quad.k_quad + bias)^2 V  +  state_scale * q_lin (sum of k_lin^T V))

If each step covered whole sequences, the steps between two matrix products would go through main memory, which takes as long as
the products. A tile stays in the cache. Only `projected`, the attention's output and the sums that the chunks use are kept for
the backward pass, which recomputes queries, keys and scores. The output projection of a layer can be applied too. Its gradient
needs `gated`, which is recomputed in the memory of its own gradient.

    tiles.py          how a batch is cut into tiles
    tiled_passes.py   the forward and the backward pass over the tiles, with the matrix products
    tile_work.py      the work between the products, in plain PyTorch
    tile_native.py    the same by the functions of tiles.cpp, which are built at first use if there is a compiler
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.backends import Backend, why_not_tiled
from lineartime.ops.layout import Layout
from lineartime.ops.mixed_chunk.chunked import chunk_scales
from lineartime.ops.mixed_chunk.inputs import MixedChunkOptions, Projected
from lineartime.ops.mixed_chunk.tile_native import functions_for, tile_work
from lineartime.ops.mixed_chunk.tile_work import TileInputs
from lineartime.ops.mixed_chunk.tiled_passes import backward, forward
from lineartime.ops.mixed_chunk.tiles import Documents
from lineartime.ops.operator import refuse_second_derivative, register_operator
from lineartime.ops.precision import acc_dtype, matmul_dtype, output_dtype, without_autocast
from lineartime.ops.tracing import is_plain, is_traced


def attend(
    projected: Projected, bias: Tensor | None, layout: Layout, options: MixedChunkOptions, output: Tensor | None = None
) -> Tensor:
    """Gated attention of the projected tokens of a layer, with activation "relu2": [B, T, e], or [B, T, d] with `output`."""
    chunks = layout.require_chunks()
    if chunks.real is not None:
        projected = projected.with_bias()  # slots without a token must stay zero
    tokens, gamma, beta, projection_bias = projected
    compute = matmul_dtype(tokens, gamma)
    with without_autocast(tokens):
        scales = chunk_scales(layout, options, projected.d_qk, tokens)
        weight_scale = (
            _visible_weight_scale(scales.row_scale, chunks.chunk_size) if options.causal else scales.row_scale[..., None]
        )
        cut = chunks.cut(tokens.to(compute))
        keep = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in (cut, projection_bias, gamma, beta, bias, output)
        )
        out: Tensor = _forward_operator(
            cut, projection_bias, gamma, beta, bias, layout.chunk_rotations, weight_scale, scales.state_scale, chunks.document,
            output, len(chunks.document_starts) - 1, scales.score_scale, options.causal, keep,
        )[0]  # fmt: skip
        return chunks.join(out.to(output_dtype(tokens, compute)))


def can_extend(
    projected: Projected, bias: Tensor | None, options: MixedChunkOptions, summary: Tensor, backend: Backend
) -> bool:
    """Whether `extend_gated` takes streams: the backend chooses tiles, they run in C++ here, and nothing needs a gradient.

    In plain PyTorch, tiles gain nothing, and they sum keys in another order of features than the summary has.
    """
    tokens, gamma, beta, _ = projected
    compute = matmul_dtype(tokens, gamma)
    if is_traced():  # the compiler cannot trace the search for a C++ compiler
        return False
    if backend not in ("auto", "tiled") or why_not_tiled(tokens.device, compute, options.activation) is not None:
        return False
    if functions_for(projected.d_qk, compute) is None:
        return False
    with without_autocast(tokens):
        return is_plain(tokens, gamma, beta, bias, summary)


def extend_gated(
    projected: Projected,
    bias: Tensor | None,
    layout: Layout,
    options: MixedChunkOptions,
    summary: Tensor,
    position: int,
) -> tuple[Tensor, Tensor]:
    """`triton.extend_gated` by tiles: whole chunks of new tokens of causal streams, [B, N, e], and the new summary."""
    tokens, gamma, beta, projection_bias = projected
    chunks, compute = layout.require_chunks(), matmul_dtype(tokens, gamma)
    total = summary.to(acc_dtype(tokens), copy=True)
    with without_autocast(tokens):
        scales = chunk_scales(layout, options, projected.d_qk, tokens, position)
        inputs = TileInputs(
            chunks.cut(tokens.to(compute)).contiguous(), projection_bias, gamma, beta, bias,
            layout.chunk_rotations, _visible_weight_scale(scales.row_scale, options.chunk_size), scales.state_scale,
            scales.score_scale,
        )  # fmt: skip
        work = tile_work(inputs)
        gated, *_ = forward(work, Documents(None, 1), causal=True, keep=False, summary=total)
        return chunks.join(gated.to(output_dtype(tokens, compute))), total.to(summary.dtype)


def _visible_weight_scale(row_scale: Tensor, chunk_size: int) -> Tensor:
    """The factors [B or 1, G or 1, C, C] of squared scores in causal chunks: zero for keys that come later."""
    return row_scale[..., None] * row_scale.new_ones(chunk_size, chunk_size).tril()


# As an operator of PyTorch --------------------------------------------------------------------------------------------
# projected: [B, G, C, 2 e + s], zeros in slots without a token. projection_bias: [2 e + s], to be added to it, or None.
# gamma, beta: [4, s]. bias: [C, C], or None.
# rotations: [2, B or 1, G, C, s / 2], or None. state_scale: [B or 1, G], the factor of the sums that a chunk uses.
# weight_scale: [B or 1, G or 1, C or 1, C or 1], the factor of the squared scores; zero where a key is not visible.
# document: int64 [G], the document of each chunk, or None for a single one. output: [d, e], or None.
# keep: whether a backward pass will follow.


def _tiled_mixed_chunk(
    projected: Tensor, projection_bias: Tensor | None, gamma: Tensor, beta: Tensor, bias: Tensor | None,
    rotations: Tensor | None, weight_scale: Tensor, state_scale: Tensor, document: Tensor | None, output: Tensor | None,
    n_documents: int, score_scale: float, causal: bool, keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The result [B, G, C, e or d] and, for the backward pass, the attention's output and the sums that chunks use."""
    with without_autocast(projected):
        inputs = TileInputs(
            projected.contiguous(), projection_bias, gamma, beta, bias, rotations, weight_scale, state_scale, score_scale
        )
        gated, attended, read = forward(tile_work(inputs), Documents(document, n_documents), causal, keep)
        return gated if output is None else F.linear(gated, output.to(gated.dtype)), attended, read


def _tiled_mixed_chunk_backward(
    d_out: Tensor, attended: Tensor, read: Tensor,
    projected: Tensor, projection_bias: Tensor | None, gamma: Tensor, beta: Tensor, bias: Tensor | None,
    rotations: Tensor | None, weight_scale: Tensor, state_scale: Tensor, document: Tensor | None, output: Tensor | None,
    n_documents: int, score_scale: float, causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    with without_autocast(projected):
        inputs = TileInputs(
            projected.contiguous(), projection_bias, gamma, beta, bias, rotations, weight_scale, state_scale, score_scale
        )
        documents = Documents(document, n_documents)
        d_out = d_out.contiguous()
        d_gated = d_out if output is None else d_out @ output.to(d_out.dtype)
        work = tile_work(inputs)
        d_projected, *rest = backward(work, d_gated, attended.contiguous(), read, documents, causal, output is not None)
        given = (gamma if projection_bias is None else projection_bias, gamma, beta, gamma if bias is None else bias)
        d_projection_bias, d_gamma, d_beta, d_bias = (x.to(like.dtype) for x, like in zip(rest, given, strict=True))
        if output is None:
            d_output = gamma.new_empty(0)
        else:
            gated = d_gated  # `backward` has overwritten it
            d_output = (d_out.flatten(0, -2).mT @ gated.flatten(0, -2)).to(output.dtype)
        return d_projected, d_projection_bias, d_gamma, d_beta, d_bias, d_output


def _fake(projected: Tensor, _: Tensor | None, gamma: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_constants, output, n_documents, _score_scale, causal, keep = rest
    batch, n_chunks, chunk_size, width = projected.shape
    d_qk = gamma.shape[1]
    d_value = (width - d_qk) // 2
    out = projected.new_empty(batch, n_chunks, chunk_size, d_value if output is None else output.shape[0])
    if not keep:
        return out, projected.new_empty(0), projected.new_empty(0)
    attended = projected.new_empty(batch, n_chunks, chunk_size, d_value)
    return out, attended, projected.new_empty(batch, n_chunks if causal else n_documents, d_qk, d_value)


def _fake_backward(
    d_out: Tensor,
    attended: Tensor,
    read: Tensor,
    projected: Tensor,
    projection_bias: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    bias: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    *_, output, _, _, _ = rest
    d_projection_bias = (gamma if projection_bias is None else projection_bias).new_empty(projected.shape[-1])
    d_bias = gamma.new_empty(0, projected.shape[2]) if bias is None else bias.new_empty(bias.shape)
    d_output = gamma.new_empty(0) if output is None else output.new_empty(output.shape)
    d_projected, d_gamma, d_beta = (x.new_empty(x.shape) for x in (projected, gamma, beta))
    return d_projected, d_projection_bias, d_gamma, d_beta, d_bias, d_output


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, n_documents, score_scale, causal, _ = inputs
    _, attended, read = output
    ctx.save_for_backward(attended, read, *tensors)
    ctx.mark_non_differentiable(attended, read)
    ctx.set_materialize_grads(False)  # no zeros are needed for these two
    ctx.rest = (n_documents, score_scale, causal)


def _differentiate(ctx: Any, d_out: Tensor, *_not_differentiable: None) -> tuple[Tensor | None, ...]:
    refuse_second_derivative(d_out, "backend 'tiled'")
    saved = ctx.saved_tensors  # Unpack once: checkpointing forbids a second read.
    _, _, projected, projection_bias, gamma, beta, bias, *_, output = saved
    gradients = _backward_operator(d_out, *saved, *ctx.rest)
    inputs = (projected, projection_bias, gamma, beta, bias, output)
    *first, d_output = (None if x is None else gradient for x, gradient in zip(inputs, gradients, strict=True))
    return (*first, *(None,) * 4, d_output, *(None,) * 4)


_forward_operator = register_operator(
    _tiled_mixed_chunk, _fake, keep_for_backward=_keep_for_backward, differentiate=_differentiate
)
_backward_operator = register_operator(_tiled_mixed_chunk_backward, _fake_backward)
