"""Mixed chunk attention, the attention of FLASH: quadratic inside a chunk, linear across chunks.

    reference.py         the definition, one query at a time
    chunked.py           plain PyTorch, on any device
    tiled.py             a few chunks at a time, for processors; takes the projected tokens of a layer
    triton.py            kernels for GPUs
    stream.py            token by token, with a state of constant size
    context_parallel.py  over sequences that several processes hold together

All of them compute one function of (heads, bias, layout, options) or, with the gate of a FLASH layer around it, of (projected,
bias, layout, options). This file checks the arguments and chooses the form.

Shapes: B batch, T tokens, C chunk size, s query/key width, e value width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 3.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.activations import Activation, Normalization
from lineartime.ops.backends import Backend, choose_backend
from lineartime.ops.checks import check_bias, check_rotary_width
from lineartime.ops.layout import Layout, LayoutPlan, make_layout, rotated_by
from lineartime.ops.mixed_chunk import chunked, context_parallel, reference, tiled, triton
from lineartime.ops.mixed_chunk.inputs import Heads, MixedChunkOptions, Projected, check_heads, check_projected
from lineartime.ops.precision import acc_dtype, matmul_dtype
from lineartime.ops.prefix import check_prefix

Inputs = TypeVar("Inputs", Heads, Projected)
_Form = Callable[[Heads, Tensor | None, Layout, MixedChunkOptions], Tensor]


def _with_prefix(
    attend: Callable[[Inputs, Tensor | None, Layout, MixedChunkOptions], Tensor],
    inputs: Inputs,
    bias: Tensor | None,
    layout: Layout,
    options: MixedChunkOptions,
) -> Tensor:
    """A form that knows no prefixes, over everything and, both ways, over the prefixes of the layout."""
    causal = attend(inputs, bias, layout, options)
    return layout.with_prefix(causal, lambda prefix: attend(inputs, bias, prefix, options.both_ways))


_FORMS: dict[str, _Form] = {
    "oracle": reference.attend,
    "torch": partial(_with_prefix, chunked.attend),
    "triton": partial(_with_prefix, triton.attend),
}


def mixed_chunk_attention(
    q_quad: Tensor,
    k_quad: Tensor,
    q_lin: Tensor,
    k_lin: Tensor,
    v: Tensor,
    *,
    chunk_size: int,
    causal: bool = False,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    activation: Activation = "relu2",
    normalization: Normalization = "count",
    backend: Backend = "auto",
) -> Tensor:
    """Attend quadratically inside chunks of C tokens and linearly across them, in time linear in T.

    Args:
        q_quad, k_quad, q_lin, k_lin: [B, T, s] queries and keys of the quadratic and of the linear part.
        v: [B, T, e] values, shared by both parts.
        chunk_size: C; T need not be a multiple of it.
        causal: whether a token reads only itself and earlier tokens.
        bias: [C, C], added to the quadratic scores by position inside the chunk.
        mask: bool or 0 and 1, [B, T], True for real tokens: chunks count real tokens only; no token reads padding, and its
            outputs are zero.
        cu_seqlens: int [D + 1], the boundaries of D documents packed into a single row: each is chunked from its own
            start and reads nothing of the others.
        prefix_lengths: int [B], or [D] with `cu_seqlens`, for causal attention: so many of the first real tokens of each row,
            or document, read as a bidirectional attention over these tokens alone; later tokens read as ever.
        activation: of the quadratic part: "relu2", "softmax", "softmax_plus" or "laplace".
        normalization: "count", "paper" or "paper_sum": see `MixedChunkOptions`.
        backend: "torch", "triton" (kernels for GPUs), "oracle" (the definition, slow), or "auto", the fastest that can run.

    Returns:
        [B, T, e], zeros for rows with nothing to read. float16 is computed in float32; the sums over chunks always are
        (float64 for float64 inputs).

    Raises:
        ValueError: for shapes that do not fit together, an unknown activation or normalization, or a backend that is unknown
            or cannot run here.
    """
    options = MixedChunkOptions(chunk_size, causal, activation, normalization)
    heads = Heads(q_quad, k_quad, q_lin, k_lin, v)
    check_heads(heads)
    check_bias(bias, chunk_size, "C")
    check_prefix(prefix_lengths, causal)
    layout = make_layout(v.shape, mask, cu_seqlens, prefix_lengths, device=v.device, plan=LayoutPlan(chunk_size=chunk_size))

    def attend(q_quad: Tensor, k_quad: Tensor, q_lin: Tensor, k_lin: Tensor, v: Tensor, layout: Layout) -> Tensor:
        return attend_heads(Heads(q_quad, k_quad, q_lin, k_lin, v), _of_chunks(bias, layout), layout, options, backend)

    return layout.by_part(attend, *heads)


def gated_mixed_chunk_attention(
    projected: Tensor,
    gamma: Tensor,
    beta: Tensor,
    *,
    chunk_size: int,
    positions: Tensor | None,
    rotary_width: int | None = None,
    causal: bool = False,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    activation: Activation = "relu2",
    normalization: Normalization = "count",
    backend: Backend = "auto",
) -> Tensor:
    """Turn the projected tokens of a FLASH layer into what its output map reads: all of FLASH between its two dense maps.

        U, V, Z = split(silu(projected))                                 [B,T,e] [B,T,e] [B,T,s]
        q_quad, k_quad, q_lin, k_lin = rope(Z * gamma_i + beta_i)        i = 1 ... 4
        gated = U * mixed_chunk_attention(q_quad, k_quad, q_lin, k_lin, V)

    Args:
        projected: [B, T, 2 e + s], the gate, the values and what queries and keys are made of, all before SiLU.
        gamma, beta: [4, s], scale and offset of q_quad, k_quad, q_lin and k_lin.
        positions: int [T] or [B, T], by which queries and keys are rotated; None for no rotation.
        rotary_width: how many of their s features turn, half of them in each half; None for all.
        chunk_size, causal, bias, mask, cu_seqlens, prefix_lengths, activation, normalization: as for `mixed_chunk_attention`.
        backend: "tiled" (for processors), those of `mixed_chunk_attention`, or "auto", the fastest that can run.

    Returns:
        [B, T, e].

    Raises:
        ValueError: for shapes that do not fit together, an unknown activation or normalization, or a backend that is unknown
            or cannot run here.
    """
    options, tokens = MixedChunkOptions(chunk_size, causal, activation, normalization), Projected(projected, gamma, beta)
    check_projected(tokens)
    check_bias(bias, chunk_size, "C")
    check_prefix(prefix_lengths, causal)
    check_rotary_width(rotary_width, tokens.d_qk)
    plan = LayoutPlan(chunk_size=chunk_size)
    layout = make_layout(projected.shape, mask, cu_seqlens, prefix_lengths, device=projected.device, plan=plan)
    if positions is not None:
        layout = rotated_by(layout, positions, tokens.d_qk, acc_dtype(gamma), rotary_width)

    def attend(projected: Tensor, layout: Layout) -> Tensor:
        return attend_projected(Projected(projected, gamma, beta), _of_chunks(bias, layout), layout, options, backend)

    return layout.by_part(attend, projected)


def _of_chunks(bias: Tensor | None, layout: Layout) -> Tensor | None:
    """The part of a bias [C, C] that the chunks of a layout, which may have fewer slots, need."""
    size = layout.require_chunks().chunk_size
    return None if bias is None else bias[:size, :size]


def attend_heads(
    heads: Heads, bias: Tensor | None, layout: Layout, options: MixedChunkOptions, backend: Backend = "auto"
) -> Tensor:
    """`mixed_chunk_attention` inside a model; ValueError for a backend that is unknown or cannot run here."""
    form = choose_backend(backend, ("torch", "triton", "oracle"), heads.v, matmul_dtype(*heads), options.activation)
    return _FORMS[form](heads, bias, layout, options)


def attend_part(part: str, heads: Heads, bias: Tensor | None, layout: Layout, options: MixedChunkOptions) -> Tensor:
    """The quadratic ("local") or the linear ("global") part of `attend_heads`; values may have any width."""
    return _with_prefix(partial(chunked.attend, parts=(part,)), heads, bias, layout, options)


def attend_projected(
    projected: Projected,
    bias: Tensor | None,
    layout: Layout,
    options: MixedChunkOptions,
    backend: Backend = "auto",
    output: Tensor | None = None,
) -> Tensor:
    """`gated_mixed_chunk_attention` inside a model, where the arguments fit together and the layout is made.

    Args:
        projected, bias, layout, options: what every form takes; the tiled form takes tokens without their bias as they are.
        backend: see `gated_mixed_chunk_attention`.
        output: [d, e], by which the result is multiplied, to [B, T, d]; the tiled form then keeps less for the backward pass.

    Raises:
        ValueError: for a backend that is unknown or cannot run here, and for a batch that the processes of the layout's context
            cannot split.
    """
    compute = matmul_dtype(projected.tokens, projected.gamma)
    available: tuple[Backend, ...] = ("torch", "tiled", "triton", "oracle")
    form = choose_backend(backend, available, projected.tokens, compute, options.activation)
    if form == "tiled" and layout.context is None and layout.prefix is None:
        return tiled.attend(projected, bias, layout, options, output)
    projected = projected.with_bias()
    attend = partial(_with_prefix, tiled.attend) if form == "tiled" else partial(_gated, _FORMS[form])
    if layout.context is not None:
        gated = context_parallel.attend(attend, layout.context, projected, bias, layout, options)
    else:
        gated = attend(projected, bias, layout, options)
    return gated if output is None else F.linear(gated, output)


def _gated(form: _Form, projected: Projected, bias: Tensor | None, layout: Layout, options: MixedChunkOptions) -> Tensor:
    gate, heads = projected.heads(layout.rotations)
    return gate * form(heads, bias, layout, options)


mixed_chunk_attention_oracle = partial(mixed_chunk_attention, backend="oracle")
"""The definition of `mixed_chunk_attention`, with its arguments: slow, and only there to be believed."""
