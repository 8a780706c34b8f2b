"""Quadratic attention on the GPU as an operator, without a T x T matrix in memory, forward or backward.

The mathematics and the kernels are in `quadratic_kernels`. Shapes: B batch, T tokens, s query/key width, e value width.
"""

# Triton may be absent, and has no types.
# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

from typing import Any

import torch
from torch import Tensor

from lineartime.ops.operator import refuse_second_derivative, register_operator
from lineartime.ops.triton.common import workspace
from lineartime.ops.triton.quadratic_kernels import score_gradient, score_input_gradient, weigh


def _triton_quadratic(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, row_scale: Tensor, score_scale: float, causal: bool,
    activation: str,
) -> Tensor:  # fmt: skip
    if v.numel() == 0:
        return workspace(v.shape, v.dtype, v.device)
    q, k, v, row_scale = (x.contiguous() for x in (q, k, v, row_scale))
    bias = None if bias is None else bias.contiguous()
    return weigh(q, k, v, bias, row_scale, score_scale, causal=causal, activation=activation)


def _fake(q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> Tensor:
    return v.new_empty(v.shape)


def _triton_quadratic_backward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, row_scale: Tensor, d_out: Tensor, score_scale: float, causal: bool,
    activation: str, with_d_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    d_bias = q.new_empty(0)
    if v.numel() == 0:
        if bias is not None and with_d_bias:
            d_bias = bias.new_zeros(bias.shape)
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), d_bias
    q, k, v, row_scale, d_out = (x.contiguous() for x in (q, k, v, row_scale, d_out))
    bias = None if bias is None else bias.contiguous()
    options: dict[str, Any] = {"causal": causal, "activation": activation}
    bias_of_keys = None if bias is None else bias.mT.contiguous()
    d_v = weigh(q, k, d_out, bias_of_keys, row_scale, score_scale, transposed=True, **options)
    d_k = score_input_gradient(q, k, v, bias_of_keys, row_scale, d_out, score_scale, transposed=True, **options)
    inputs = (q, k, v, bias, row_scale, d_out, score_scale)
    d_q = score_input_gradient(*inputs, transposed=False, **options)
    if bias is not None and with_d_bias:
        parts = _parts_of_sum(bias.shape[0], bias.shape[1], len(q))
        sums = score_gradient(
            *inputs, n_summed=len(q) // parts, dtype=torch.promote_types(bias.dtype, torch.float32), **options
        )
        d_bias = sums.sum(0).to(bias.dtype)
    return d_q, d_k, d_v, d_bias


def _parts_of_sum(rows: int, columns: int, batch: int) -> int:
    """Into how many equal parts the batch is divided, of which each sums its gradients of the bias: more keep a GPU busy.

    All parts together take at most 256 MiB, or as much as the bias. Their sum does not depend on what runs first.
    """
    most = max(1, min(batch, 64, 2**26 // (rows * columns)))
    return next(parts for parts in range(most, 0, -1) if batch % parts == 0)


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
