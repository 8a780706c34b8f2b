"""Mixed chunk attention on the GPU: the chunks are the batch of a quadratic attention, and read a state of all they can see.

Shapes: B batch, D documents, G chunks of all documents, C chunk size, s query/key width, e value width.

    out[g, t] = sum over j of P[g, t, j] v[g, j] + q_lin[g, t] . M[g]               P, and dX below, as in quadratic.py
    M[g] = a[g] sum over h in R(g) of k_lin[h]^T v[h]                N[h] = sum over g with h in R(g) of a[g] q_lin[g]^T dout[g]

    dv[h, j] = sum over t of P[h, t, j] dout[h, t] + k_lin[h, j] . N[h]
    dq_lin[g, t] = M[g] dout[g, t]        dq_quad[g] = c dX[g] k_quad[g]        dbias = sum over the chunks of dX
    dk_lin[h, j] = N[h] v[h, j]           dk_quad[g] = c dX[g]^T q_quad[g]

with a = state_scale, c = score_scale, and R(g) the chunks of g's document: all of them or, where attention is causal, those
before g. M and N [B, G, s, e] and, backward, dX [B, G, C, C] are in memory, which keeps it linear in the number of tokens.
"""

# Triton may be absent, has no types, and writes the constants of a kernel in capitals.
# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"
# ruff: noqa: N803

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lineartime.ops.precision import without_autocast
from lineartime.ops.triton.common import (
    jit,
    load_tile,
    number_formats,
    on_device,
    state_dtype,
    store_tile,
    token_bucket,
    tuned,
    workspace,
)
from lineartime.ops.triton.quadratic import score_gradient, weigh

# 1. States: M and N ---------------------------------------------------------------------------------------------------


@jit
def chunk_product(
    x, values, chunk, rows, columns, C,
    S: tl.constexpr, E: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """x^T values of a chunk, at [rows, columns] of s x e."""
    product = tl.full((BLOCK_S, BLOCK_E), 0.0, ACC)
    for start in range(0, C, BLOCK_C):
        tokens = start + tl.arange(0, BLOCK_C)
        x_tile = load_tile(x + chunk * C * S, tokens, rows, C, S, COMPUTE)
        value_tile = load_tile(values + chunk * C * E, tokens, columns, C, E, COMPUTE)
        product = tl.dot(tl.trans(x_tile), value_tile, product, input_precision=PRECISION)
    return product


@tuned(
    [
        triton.Config({"BLOCK_S": 128, "BLOCK_E": 64, "BLOCK_C": 64}, num_warps=4, num_stages=3),
        triton.Config({"BLOCK_S": 64, "BLOCK_E": 128, "BLOCK_C": 64}, num_warps=4, num_stages=3),
        triton.Config({"BLOCK_S": 64, "BLOCK_E": 64, "BLOCK_C": 128}, num_warps=4, num_stages=2),
        triton.Config({"BLOCK_S": 64, "BLOCK_E": 64, "BLOCK_C": 64}, num_warps=4, num_stages=3),
        triton.Config({"BLOCK_S": 64, "BLOCK_E": 32, "BLOCK_C": 64}, num_warps=4, num_stages=2),
        triton.Config({"BLOCK_S": 32, "BLOCK_E": 32, "BLOCK_C": 32}, num_warps=4, num_stages=2),
    ],
    key=["tokens", "C", "S", "E", "CAUSAL", "TRANSPOSED", "PRECISION"],
    interpreted={"BLOCK_S": 32, "BLOCK_E": 32, "BLOCK_C": 32},
)
@jit
def states_kernel(
    x, values, state_scale, document_starts, out, n_documents, G, C, tokens,
    S: tl.constexpr, E: tl.constexpr, CAUSAL: tl.constexpr, TRANSPOSED: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """M, or, TRANSPOSED, N; a program walks over the chunks of one document, with one tile of s x e."""
    batch = (tl.program_id(0) // n_documents).to(tl.int64)
    document = tl.program_id(0) % n_documents
    first = tl.load(document_starts + document)
    n_chunks = tl.load(document_starts + document + 1) - first
    rows = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    columns = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    acc = tl.full((BLOCK_S, BLOCK_E), 0.0, ACC)

    for step in range(0, n_chunks):
        if CAUSAL and TRANSPOSED:  # what a chunk's values are read by comes after it: backwards
            chunk = batch * G + first + n_chunks - 1 - step
        else:
            chunk = batch * G + first + step
        scale = tl.load(state_scale + chunk)
        product = chunk_product(x, values, chunk, rows, columns, C, S, E, COMPUTE, PRECISION, ACC, BLOCK_S, BLOCK_E, BLOCK_C)
        if CAUSAL:
            if TRANSPOSED:
                store_tile(out + chunk * S * E, acc, rows, columns, S, E)
            else:
                store_tile(out + chunk * S * E, acc * scale, rows, columns, S, E)
        if TRANSPOSED:
            product *= scale
        acc += product

    if not CAUSAL:
        for step in range(0, n_chunks):
            chunk = batch * G + first + step
            if TRANSPOSED:
                store_tile(out + chunk * S * E, acc, rows, columns, S, E)
            else:
                store_tile(out + chunk * S * E, acc * tl.load(state_scale + chunk), rows, columns, S, E)


def chunk_states(
    x: Tensor, values: Tensor, state_scale: Tensor, document_starts: Tensor, *, causal: bool, transposed: bool
) -> Tensor:
    """M of k_lin and v or, transposed, N of q_lin and dout: [B, G, C, s], [B, G, C, e] -> [B, G, s, e]."""
    (batch, n_chunks, chunk_size, width), n_columns = x.shape, values.shape[-1]
    out = workspace((batch, n_chunks, width, n_columns), state_dtype(values.dtype), values.device)
    n_documents = len(document_starts) - 1

    def grid(config: dict[str, Any]) -> tuple[int, int, int]:
        return batch * n_documents, triton.cdiv(width, config["BLOCK_S"]), triton.cdiv(n_columns, config["BLOCK_E"])

    with on_device(values):
        states_kernel[grid](
            x, values, state_scale, document_starts, out, n_documents, n_chunks, chunk_size,
            token_bucket(batch * n_chunks * chunk_size),
            S=width, E=n_columns, CAUSAL=causal, TRANSPOSED=transposed, **number_formats(values.dtype),
        )  # fmt: skip
    return out


# 2. Forward and backward ----------------------------------------------------------------------------------------------


def attend(
    q_quad: Tensor, k_quad: Tensor, q_lin: Tensor, k_lin: Tensor, v: Tensor, *, bias: Tensor | None = None,
    row_scale: Tensor, state_scale: Tensor, document_starts: Tensor, score_scale: float, causal: bool, activation: str,
) -> Tensor:  # fmt: skip
    """Quadratic attention inside every chunk, plus q_lin[t] . M_g of the chunks that chunk g can see.

    Args:
        q_quad, k_quad, q_lin, k_lin: [B, G, C, s].
        v: [B, G, C, e]; it and k_lin are zero in slots that must not be read.
        bias: [C, C].
        row_scale: float32 [B or 1, G, C], of the quadratic part; a constant for autograd, as is all that follows.
        state_scale: float32 [B or 1, G], of the linear part.
        document_starts: int32 [D + 1], rising from 0 to G: the first chunk of every document, and the end.
        score_scale: the scores are score_scale * q.k + bias.
        causal: whether a token reads only itself and earlier tokens of its chunk, and the chunks before.
        activation: "relu2" or "laplace".

    Returns:
        [B, G, C, e].
    """
    out: Tensor = _attend(
        q_quad, k_quad, q_lin, k_lin, v, bias, row_scale, state_scale, document_starts, score_scale, causal, activation
    )
    return out


@torch.library.custom_op("lineartime::mixed_chunk_attention", mutates_args=())
def _attend(
    q_quad: Tensor, k_quad: Tensor, q_lin: Tensor, k_lin: Tensor, v: Tensor, bias: Tensor | None, row_scale: Tensor,
    state_scale: Tensor, document_starts: Tensor, score_scale: float, causal: bool, activation: str,
) -> Tensor:  # fmt: skip
    if v.numel() == 0:
        return workspace(v.shape, v.dtype, v.device)
    row_scale, state_scale = row_scale.expand(v.shape[:3]), state_scale.expand(v.shape[:2])
    q_quad, k_quad, q_lin, k_lin, v, row_scale, state_scale = (
        x.contiguous() for x in (q_quad, k_quad, q_lin, k_lin, v, row_scale, state_scale)
    )
    states = chunk_states(k_lin, v, state_scale, document_starts, causal=causal, transposed=False)
    out = weigh(
        q_quad.flatten(0, 1),
        k_quad.flatten(0, 1),
        v.flatten(0, 1),
        None if bias is None else bias.contiguous(),
        row_scale,
        score_scale,
        causal=causal,
        activation=activation,
        readers=q_lin,
        states=states,
    )
    return out.view(v.shape)


@torch.library.custom_op("lineartime::mixed_chunk_attention_backward", mutates_args=())
def _attend_backward(
    q_quad: Tensor, k_quad: Tensor, q_lin: Tensor, k_lin: Tensor, v: Tensor, bias: Tensor | None, row_scale: Tensor,
    state_scale: Tensor, document_starts: Tensor, d_out: Tensor, score_scale: float, causal: bool, activation: str,
    with_d_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    d_bias = v.new_empty(0)
    if v.numel() == 0:
        if bias is not None and with_d_bias:
            d_bias = bias.new_zeros(bias.shape)
        d_q_quad, d_k_quad, d_q_lin, d_k_lin, d_v = (x.new_zeros(x.shape) for x in (q_quad, k_quad, q_lin, k_lin, v))
        return d_q_quad, d_k_quad, d_q_lin, d_k_lin, d_v, d_bias
    row_scale, state_scale = row_scale.expand(v.shape[:3]), state_scale.expand(v.shape[:2])
    q_quad, k_quad, q_lin, k_lin, v, row_scale, state_scale, d_out = (
        x.contiguous() for x in (q_quad, k_quad, q_lin, k_lin, v, row_scale, state_scale, d_out)
    )
    bias, bias_of_keys = (None, None) if bias is None else (bias.contiguous(), bias.mT.contiguous())
    dtype = state_dtype(v.dtype)
    options: dict[str, Any] = {"causal": causal, "activation": activation}

    with without_autocast(v):
        states = chunk_states(k_lin, v, state_scale, document_starts, causal=causal, transposed=False)
        d_q_lin = (d_out.to(dtype) @ states.mT).to(v.dtype)
        del states
        states = chunk_states(q_lin, d_out, state_scale, document_starts, causal=causal, transposed=True)
        d_k_lin = (v.to(dtype) @ states.mT).to(v.dtype)

        q, k, values, d_values = (x.flatten(0, 1) for x in (q_quad, k_quad, v, d_out))
        d_v = weigh(
            q, k, d_values, bias_of_keys, row_scale, score_scale, transposed=True, readers=k_lin, states=states, **options
        )  # fmt: skip
        del states
        d_scores = score_gradient(
            q, k, values, bias, row_scale, d_values, score_scale, n_summed=1, dtype=dtype, **options
        )  # fmt: skip
        nothing = d_scores.new_zeros(1, 1, 1)  # baddbmm multiplies by score_scale before it rounds
        d_q_quad = torch.baddbmm(nothing, d_scores, k.to(dtype), beta=0, alpha=score_scale).to(v.dtype)
        d_k_quad = torch.baddbmm(nothing, d_scores.mT, q.to(dtype), beta=0, alpha=score_scale).to(v.dtype)
        if bias is not None and with_d_bias:
            d_bias = d_scores.sum(0, dtype=torch.promote_types(dtype, torch.float32)).to(bias.dtype)
    return d_q_quad.view(q_quad.shape), d_k_quad.view(k_quad.shape), d_q_lin, d_k_lin, d_v.view(v.shape), d_bias


# 3. For autograd and the compiler -------------------------------------------------------------------------------------


@_attend.register_fake
def _(q_quad: Tensor, k_quad: Tensor, q_lin: Tensor, k_lin: Tensor, v: Tensor, *_rest: Any) -> Tensor:
    return v.new_empty(v.shape)


@_attend_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    *inputs, bias = arguments[:6]
    with_d_bias = arguments[-1]
    d_bias = bias.new_empty(bias.shape) if bias is not None and with_d_bias else inputs[0].new_empty(0)
    return *(x.new_empty(x.shape) for x in inputs), d_bias


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.score_scale, ctx.causal, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    with_d_bias = ctx.needs_input_grad[5]
    *d_inputs, d_bias = _attend_backward(*ctx.saved_tensors, d_out, ctx.score_scale, ctx.causal, ctx.activation, with_d_bias)
    return *d_inputs, d_bias if with_d_bias else None, None, None, None, None, None, None


_attend.register_autograd(_backward, setup_context=_setup_context)
