"""Mixed chunk attention on the GPU: the chunks are the batch of a quadratic attention, and read a state of all they can see.

Shapes: B batch, D documents, G chunks of all documents, C chunk size, s query/key width, e value width.

    out[g, t] = sum over j of P[g, t, j] v[g, j] + q_lin[g, t] . M[g]               P, and dX below, as in score_kernels.py
    M[g] = a[g] sum over h in R(g) of k_lin[h]^T v[h]                N[h] = sum over g with h in R(g) of a[g] q_lin[g]^T dout[g]

    dv[h, j] = sum over t of P[h, t, j] dout[h, t] + k_lin[h, j] . N[h]
    dq_lin[g, t] = M[g] dout[g, t]        dq_quad[g] = c dX[g] k_quad[g]        dbias = sum over the chunks of dX
    dk_lin[h, j] = N[h] v[h, j]           dk_quad[g] = c dX[g]^T q_quad[g]

with a = state_scale, c = score_scale, and R(g) the chunks of g's document: all of them or, where attention is causal, those
before g. M and N [B, G, s, e], P and, backward, dX [B, G, C, C] are in memory, which keeps it linear in the number of tokens;
M is kept for the backward pass, which computes P and dX from the same scores.
"""

# Triton may be absent, has no types, and writes the constants of a kernel in capitals.
# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"
# ruff: noqa: N803, N806

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lineartime.ops.operator import refuse_second_derivative, register_operator
from lineartime.ops.precision import without_autocast
from lineartime.ops.triton.chunk_kernels import Gate, read_chunks
from lineartime.ops.triton.common import (
    jit,
    number_formats,
    on_device,
    state_dtype,
    tuned,
    workspace,
)
from lineartime.ops.triton.score_kernels import attention_weights, score_gradient

# 1. States: M and N ---------------------------------------------------------------------------------------------------


@jit
def chunk_at(order, first, n_chunks, BACKWARDS: tl.constexpr):
    """The chunks of these numbers in a document, counted from its end if BACKWARDS, and whether they exist."""
    there = (order >= 0) & (order < n_chunks)
    if BACKWARDS:
        order = n_chunks - 1 - order
    return first + order, there


@tuned(
    [triton.Config({"CHUNKS": 8, "BLOCK": 512}, num_warps=4, num_stages=1)],
    key=[],
    interpreted={"CHUNKS": 2, "BLOCK": 256},
)
@jit
def add_up_kernel(
    sums, state_scale, document_starts, before, after, out, n_documents, G, SIZE,
    CAUSAL: tl.constexpr, TRANSPOSED: tl.constexpr, HAS_SUMMARY: tl.constexpr, ACC: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """M, or, TRANSPOSED, N of the sums of every chunk. One program computes BLOCK elements of the states of one document.

    If it HAS_SUMMARY, every row of the batch is one document, whose sum starts from `before` and ends as `after`.
    """
    BACKWARDS: tl.constexpr = CAUSAL and TRANSPOSED  # the chunks that read a chunk come after it
    document = tl.program_id(0) % n_documents
    start_chunk = tl.load(document_starts + document)
    n_chunks = tl.load(document_starts + document + 1) - start_chunk
    row = (tl.program_id(0) // n_documents).to(tl.int64)
    first = row * G + start_chunk
    numbers = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (numbers < SIZE)[None, :]
    total = tl.full((BLOCK,), 0.0, ACC)
    stop = n_chunks
    if HAS_SUMMARY:
        total += tl.load(before + row * SIZE + numbers, mask=numbers < SIZE, other=0.0)
        stop += 1  # no chunk reads the last one, but the summary contains it

    for start in range(0, stop, CHUNKS):
        order = start + tl.arange(0, CHUNKS)
        if CAUSAL:
            # Sum only the chunks before: subtracting a chunk's own sum from a total would give infinity - infinity = NaN.
            chunks, there = chunk_at(order - 1, first, n_chunks, BACKWARDS)
        else:
            chunks, there = chunk_at(order, first, n_chunks, BACKWARDS)
        tile = tl.load(sums + chunks[:, None] * SIZE + numbers[None, :], mask=there[:, None] & inside, other=0.0).to(ACC)
        if TRANSPOSED:
            tile *= tl.load(state_scale + chunks, mask=there, other=0.0)[:, None]
        if CAUSAL:
            chunks, there = chunk_at(order, first, n_chunks, BACKWARDS)
            state = total[None, :] + tl.cumsum(tile, 0)
            if not TRANSPOSED:
                state *= tl.load(state_scale + chunks, mask=there, other=0.0)[:, None]
            tl.store(
                out + chunks[:, None] * SIZE + numbers[None, :], state.to(out.dtype.element_ty), mask=there[:, None] & inside
            )
        total += tl.sum(tile, 0)
    if HAS_SUMMARY:
        tl.store(after + row * SIZE + numbers, total, mask=numbers < SIZE)

    if not CAUSAL:
        for start in range(0, n_chunks, CHUNKS):
            chunks, there = chunk_at(start + tl.arange(0, CHUNKS), first, n_chunks, BACKWARDS)
            state = total[None, :] + tl.full((CHUNKS, BLOCK), 0.0, ACC)
            if not TRANSPOSED:
                state *= tl.load(state_scale + chunks, mask=there, other=0.0)[:, None]
            tl.store(
                out + chunks[:, None] * SIZE + numbers[None, :], state.to(out.dtype.element_ty), mask=there[:, None] & inside
            )


class Summary(NamedTuple):
    """The sum of k_lin^T v over the chunks of a stream, in float32 or better.

    Attributes:
        before: [B, s, e], over the chunks before the first one here.
        after: [B, s, e], memory for the sum up to the last one.
    """

    before: Tensor
    after: Tensor


def chunk_states(
    x: Tensor, values: Tensor, state_scale: Tensor, document_starts: Tensor, *, causal: bool, transposed: bool,
    summary: Summary | None = None,
) -> Tensor:  # fmt: skip
    """M of k_lin and v or, transposed, N of q_lin and dout: [B, G, C, s], [B, G, C, e] -> [B, G, s, e].

    With a summary, every row is one causal document, and its chunks also read the sum over those before it.
    In two phases, so that one long sequence, too, keeps all of a GPU busy: the products of all chunks, and their sums.
    """
    dtype = state_dtype(values.dtype)
    sums = x.mT.to(dtype) @ values.to(dtype)
    batch, n_chunks, size = *sums.shape[:2], sums.shape[2] * sums.shape[3]
    out, n_documents = workspace(sums.shape, dtype, values.device), len(document_starts) - 1

    def grid(config: dict[str, Any]) -> tuple[int, int]:
        return batch * n_documents, triton.cdiv(size, config["BLOCK"])

    with on_device(values):
        add_up_kernel[grid](
            sums, state_scale, document_starts, *(summary or (None, None)), out, n_documents, n_chunks, size,
            CAUSAL=causal, TRANSPOSED=transposed, HAS_SUMMARY=summary is not None, ACC=number_formats(values.dtype)["ACC"],
        )  # fmt: skip
    return out


# 2. Forward and backward ----------------------------------------------------------------------------------------------

Heads = tuple[Tensor, ...]
"""q_quad, k_quad, q_lin, k_lin and v: see `attend`."""


class Constants(NamedTuple):
    """The arguments of `attend` that autograd does not differentiate."""

    row_scale: Tensor
    state_scale: Tensor
    document_starts: Tensor
    score_scale: float
    causal: bool
    activation: str

    def expanded(self, v: Tensor) -> "Constants":
        """The same, with a contiguous factor for every row and every chunk of v."""
        row_scale, state_scale = self.row_scale.expand(v.shape[:3]), self.state_scale.expand(v.shape[:2])
        return self._replace(row_scale=row_scale.contiguous(), state_scale=state_scale.contiguous())


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
    out: Tensor = _forward_operator(
        q_quad, k_quad, q_lin, k_lin, v, bias, row_scale, state_scale, document_starts, score_scale, causal, activation
    )[0]
    return out


def _triton_mixed_chunk(
    q_quad: Tensor, k_quad: Tensor, q_lin: Tensor, k_lin: Tensor, v: Tensor, bias: Tensor | None, row_scale: Tensor,
    state_scale: Tensor, document_starts: Tensor, score_scale: float, causal: bool, activation: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    constants = Constants(row_scale, state_scale, document_starts, score_scale, causal, activation)
    return forward((q_quad, k_quad, q_lin, k_lin, v), bias, constants)


def forward(
    heads: Heads, bias: Tensor | None, constants: Constants, gate: Gate | None = None, summary: Summary | None = None
) -> tuple[Tensor, Tensor]:
    """The output, times the gate where given, and M, which the backward pass reads; a summary as for `chunk_states`."""
    q_quad, k_quad, q_lin, k_lin, v = (x.contiguous() for x in heads)
    if v.numel() == 0:
        return workspace(v.shape, v.dtype, v.device), workspace(_shape_of_states(k_lin, v), state_dtype(v.dtype), v.device)
    row_scale, state_scale, document_starts, score_scale, causal, activation = constants.expanded(v)
    with without_autocast(v):
        states = chunk_states(k_lin, v, state_scale, document_starts, causal=causal, transposed=False, summary=summary)
    q, k, values, readers, of_chunks = (x.flatten(0, 1) for x in (q_quad, k_quad, v, q_lin, states))
    bias = None if bias is None else bias.contiguous()
    options: dict[str, Any] = {"causal": causal, "activation": activation}
    weights = attention_weights(q, k, bias, row_scale, score_scale, dtype=states.dtype, **options)
    out = read_chunks(weights, values, readers, of_chunks, causal=causal, gate=gate)
    return out.view(v.shape), states


def _shape_of_states(x: Tensor, values: Tensor) -> tuple[int, ...]:
    return (*values.shape[:2], x.shape[-1], values.shape[-1])


def _triton_mixed_chunk_backward(
    q_quad: Tensor, k_quad: Tensor, q_lin: Tensor, k_lin: Tensor, v: Tensor, bias: Tensor | None, row_scale: Tensor,
    state_scale: Tensor, document_starts: Tensor, states: Tensor, d_out: Tensor, score_scale: float, causal: bool,
    activation: str, with_d_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    constants = Constants(row_scale, state_scale, document_starts, score_scale, causal, activation)
    return backward((q_quad, k_quad, q_lin, k_lin, v), bias, constants, states, d_out, with_d_bias)


def backward(
    heads: Heads, bias: Tensor | None, constants: Constants, states: Tensor, d_out: Tensor, with_d_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q_quad, k_quad, q_lin, k_lin, v and, if asked for, of the bias; `d_out` is that of the output."""
    q_quad, k_quad, q_lin, k_lin, v = (x.contiguous() for x in heads)
    d_out, d_bias = d_out.contiguous(), v.new_empty(0)
    if v.numel() == 0:
        if bias is not None and with_d_bias:
            d_bias = bias.new_zeros(bias.shape)
        d_q_quad, d_k_quad, d_q_lin, d_k_lin, d_v = (x.new_zeros(x.shape) for x in (q_quad, k_quad, q_lin, k_lin, v))
        return d_q_quad, d_k_quad, d_q_lin, d_k_lin, d_v, d_bias
    row_scale, state_scale, document_starts, score_scale, causal, activation = constants.expanded(v)
    bias = None if bias is None else bias.contiguous()
    dtype = state_dtype(v.dtype)
    options: dict[str, Any] = {"causal": causal, "activation": activation}

    with without_autocast(v):
        d_q_lin = (d_out.to(dtype) @ states.mT).to(v.dtype)
        states = chunk_states(q_lin, d_out, state_scale, document_starts, causal=causal, transposed=True)
        d_k_lin = (v.to(dtype) @ states.mT).to(v.dtype)

        q, k, values, d_values = (x.flatten(0, 1) for x in (q_quad, k_quad, v, d_out))
        weights, d_scores = score_gradient(q, k, values, bias, row_scale, d_values, score_scale, dtype=dtype, **options)
        d_v = read_chunks(weights, d_values, k_lin.flatten(0, 1), states.flatten(0, 1), causal=causal, transposed=True)
        del weights, states
        nothing = d_scores.new_zeros(1, 1, 1)  # baddbmm multiplies by score_scale before it rounds
        d_q_quad = torch.baddbmm(nothing, d_scores, k.to(dtype), beta=0, alpha=score_scale).to(v.dtype)
        d_k_quad = torch.baddbmm(nothing, d_scores.mT, q.to(dtype), beta=0, alpha=score_scale).to(v.dtype)
        if bias is not None and with_d_bias:
            d_bias = d_scores.sum(0, dtype=torch.promote_types(dtype, torch.float32)).to(bias.dtype)
    return d_q_quad.view(q_quad.shape), d_k_quad.view(k_quad.shape), d_q_lin, d_k_lin, d_v.view(v.shape), d_bias


# 3. For autograd and the compiler -------------------------------------------------------------------------------------


def _fake(q_quad: Tensor, k_quad: Tensor, q_lin: Tensor, k_lin: Tensor, v: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), v.new_empty(_shape_of_states(k_lin, v), dtype=state_dtype(v.dtype))


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    *inputs, bias = arguments[:6]
    with_d_bias = arguments[-1]
    d_bias = bias.new_empty(bias.shape) if bias is not None and with_d_bias else inputs[0].new_empty(0)
    return *(x.new_empty(x.shape) for x in inputs), d_bias


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.score_scale, ctx.causal, ctx.activation = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # the gradient of the states is not used


def _differentiate(ctx: Any, d_out: Tensor, _of_states: None) -> tuple[Tensor | None, ...]:
    refuse_second_derivative(d_out, "backend 'triton'")
    with_d_bias = ctx.needs_input_grad[5]
    *d_inputs, d_bias = _backward_operator(*ctx.saved_tensors, d_out, ctx.score_scale, ctx.causal, ctx.activation, with_d_bias)
    return *d_inputs, d_bias if with_d_bias else None, None, None, None, None, None, None


_forward_operator = register_operator(
    _triton_mixed_chunk, _fake, keep_for_backward=_keep_for_backward, differentiate=_differentiate
)
_backward_operator = register_operator(_triton_mixed_chunk_backward, _fake_backward)
