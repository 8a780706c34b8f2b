"""Quadratic attention on the GPU as an operator, without a T x T matrix in memory, forward or backward.

Shapes: B batch, T tokens, s query/key width, e value width.

    out[t] = sum over j of P[t, j] v[j]                                                 P and dX as in score_kernels.py
    dv[j]  = sum over t of P[t, j] dout[t]      dbias = sum over b of dX
    dq[t]  = c sum over j of dX[t, j] k[j]         dk[j] = c sum over t of dX[t, j] q[t]

Forward, P is in memory for a part of the queries at a time; backward, P and dX for a part of the keys. A kernel computes them
once, and they enter matrix products of PyTorch. The parts follow each other in a fixed order, so that the same inputs always
give the same bits.
"""

# Triton may be absent, and has no types.
# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lineartime.ops.operator import refuse_second_derivative, register_operator
from lineartime.ops.precision import acc_dtype, without_autocast
from lineartime.ops.triton.common import state_dtype, workspace
from lineartime.ops.triton.score_kernels import Pairs, attention_weights, score_gradient

SCORES = 2**26
"""The largest number of pairs whose scores are in memory at a time, unless `TOKENS` tokens of each sequence have more."""
TOKENS = 256
"""The smallest number of queries or keys at a time: matrix products of fewer are slow."""


def _parts(batch: int, length: int, causal: bool) -> Iterator[tuple[int, int]]:
    """Parts of the sequences, first token and end. Of a causal sequence they are short: half of a part's own pairs are zero."""
    size = max(TOKENS, min(SCORES // (batch * length), length // 8 if causal else length) // TOKENS * TOKENS)
    for first in range(0, length, size):
        yield first, min(first + size, length)


def _triton_quadratic(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, row_scale: Tensor, score_scale: float, causal: bool,
    activation: str,
) -> Tensor:  # fmt: skip
    (batch, length, _), dtype = v.shape, state_dtype(v.dtype)
    if v.numel() == 0:
        return workspace(v.shape, v.dtype, v.device)
    q, k, row_scale = (x.contiguous() for x in (q, k, row_scale))
    bias = None if bias is None else bias.contiguous()
    options: dict[str, Any] = {"causal": causal, "activation": activation, "dtype": dtype}
    out, values = workspace(v.shape, dtype, v.device), v.to(dtype)
    with without_autocast(v):
        for first, last in _parts(batch, length, causal):
            seen = last if causal else length
            weights = attention_weights(q, k, bias, row_scale, score_scale, pairs=Pairs(first, last, 0, seen), **options)
            torch.bmm(weights, values[:, :seen], out=out[:, first:last])
            del weights  # before there is memory for the next ones
    return out.to(v.dtype)


def _fake(q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> Tensor:
    return v.new_empty(v.shape)


def _triton_quadratic_backward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, row_scale: Tensor, d_out: Tensor, score_scale: float, causal: bool,
    activation: str, with_d_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (batch, length, _), dtype = v.shape, state_dtype(v.dtype)
    d_bias = q.new_empty(0)
    if bias is not None and with_d_bias:
        d_bias = workspace(bias.shape, torch.promote_types(bias.dtype, acc_dtype(v)), v.device).zero_()
    d_bias_dtype = q.dtype if bias is None else bias.dtype
    if v.numel() == 0:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), d_bias.to(d_bias_dtype)
    q, k, v, row_scale, d_out = (x.contiguous() for x in (q, k, v, row_scale, d_out))
    bias = None if bias is None else bias.contiguous()
    options: dict[str, Any] = {"causal": causal, "activation": activation, "dtype": dtype}
    d_q = workspace(q.shape, acc_dtype(v), v.device).zero_()  # a sum over the parts, which bf16 would round each time
    d_k, d_v = (workspace(x.shape, dtype, v.device) for x in (k, v))
    of_queries, of_keys, d_read = q.to(dtype), k.to(dtype), d_out.to(dtype)
    nothing = d_k.new_zeros(1, 1, 1)  # baddbmm multiplies by score_scale before it rounds
    with without_autocast(v):
        for first, last in _parts(batch, length, causal):
            start = first if causal else 0
            pairs = Pairs(start, length, first, last)
            weights, d_scores = score_gradient(q, k, v, bias, row_scale, d_out, score_scale, pairs=pairs, **options)
            torch.bmm(weights.mT, d_read[:, start:], out=d_v[:, first:last])
            del weights
            d_q[:, start:] += torch.baddbmm(nothing, d_scores, of_keys[:, first:last], beta=0, alpha=score_scale)
            d_k[:, first:last] = torch.baddbmm(nothing, d_scores.mT, of_queries[:, start:], beta=0, alpha=score_scale)
            if bias is not None and with_d_bias:
                d_bias[start:, first:last] = d_scores.sum(0, dtype=d_bias.dtype)
            del d_scores
    return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), d_bias.to(d_bias_dtype)


def _fake_backward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with_d_bias = rest[-1]
    d_bias = bias.new_empty(bias.shape) if bias is not None and with_d_bias else q.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_bias


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.score_scale, ctx.causal, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_derivative(d_out, "backend 'triton'", "use backend 'torch'")
    with_d_bias = ctx.needs_input_grad[3]
    d_q, d_k, d_v, d_bias = _backward_operator(
        *ctx.saved_tensors, d_out, ctx.score_scale, ctx.causal, ctx.activation, with_d_bias
    )
    return d_q, d_k, d_v, d_bias if with_d_bias else None, None, None, None, None


_forward_operator = register_operator(
    _triton_quadratic, _fake, keep_for_backward=_keep_for_backward, differentiate=_differentiate
)
_backward_operator = register_operator(_triton_quadratic_backward, _fake_backward)


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None, row_scale: Tensor, score_scale: float, causal: bool,
    activation: str,
) -> Tensor:  # fmt: skip
    """row_scale[t] * sum over j of f(score_scale * q[t].k[j] + bias[t, j]) v[j].

    Args:
        q, k: [B, T, s].
        v: [B, T, e], zero at keys that must not be read.
        bias: [T, T].
        row_scale: float32 [B, T], a constant for autograd.
        score_scale: a constant too.
        causal: whether a row reads only itself and earlier rows.
        activation: f, "relu2" or "laplace".

    Returns:
        [B, T, e].
    """
    out: Tensor = _forward_operator(q, k, v, bias, row_scale, score_scale, causal, activation)
    return out
