"""Quadratic attention on CPUs, some queries at a time.

Shapes: B batch, T tokens, s query/key width, e value width; of a tile: b rows of the batch, Q queries, K keys.

    out[t] = row_scale[t] * sum over visible j of relu(score_scale * q[t].k[j] + bias[t, j])^2 v[j]

The scores of a tile stay in the cache. None are kept for the backward pass, which recomputes them. The work between the matrix
products is in tile_work.py.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lineartime.ops.operator import refuse_second_derivative, register_operator
from lineartime.ops.positions import FactoredBias
from lineartime.ops.precision import matmul_dtype, output_dtype, without_autocast
from lineartime.ops.quadratic.inputs import QuadraticOptions
from lineartime.ops.quadratic.scales import scaled_inputs
from lineartime.ops.quadratic.tile_work import tile_work

QUERIES = 256
"""The number of queries in a tile."""
SCORES = 2**19
"""The approximate number of scores in a tile, if the batch is large enough."""


def _tiles(batch: int, length: int, causal: bool) -> Iterator[tuple[slice, slice, int]]:
    """The rows and queries of each tile, and the number of keys that its queries see."""
    n_rows = max(1, SCORES // (QUERIES * max(1, length)))
    for row in range(0, batch, n_rows):
        for start in range(0, length, QUERIES):
            stop = min(start + QUERIES, length)
            yield slice(row, min(row + n_rows, batch)), slice(start, stop), stop if causal else length


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | FactoredBias | None, real: Tensor | None, options: QuadraticOptions
) -> Tensor:
    """Attend within each row, like the other forms, with activation "relu2". Padding must be zero. Keeps no scores."""
    compute = matmul_dtype(q, k, v)
    dtype = output_dtype(v, compute)
    q, k, v = (x.to(compute) for x in (q, k, v))
    q, k, bias, row_scale, score_scale = scaled_inputs(q, k, bias, real, options)
    with without_autocast(q):
        out: Tensor = _forward_operator(q, k, v, bias, row_scale, score_scale, options.causal)
    return out.to(dtype)


def _tiled_quadratic(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, row_scale: Tensor, score_scale: float, causal: bool
) -> Tensor:
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(v)
    work = tile_work(v.dtype, bias, score_scale, causal, row_scale.dtype)
    with without_autocast(q):
        for rows, queries, n_keys in _tiles(v.shape[0], v.shape[1], causal):
            weights = work.weights(q[rows, queries], _first(k, rows, n_keys), queries)
            out[rows, queries] = torch.bmm(weights, _first(v, rows, n_keys)).mul_(row_scale[rows, queries, None])
    return out


def _first(x: Tensor, rows: slice, n_keys: int) -> Tensor:
    """The keys or values that some queries see, [b, K, f], in a memory layout that matrix products take without a copy."""
    seen = x[rows, :n_keys]
    return seen[0][None] if len(seen) == 1 else seen.contiguous()  # [None] gives one row the stride of a row of K keys


def _tiled_quadratic_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, row_scale: Tensor, score_scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    acc_dtype = row_scale.dtype
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    d_q = torch.empty_like(q)
    d_k, d_v = (torch.zeros(x.shape, dtype=acc_dtype, device=x.device) for x in (k, v))
    work = tile_work(v.dtype, bias, score_scale, causal, acc_dtype)
    work.start_backward()
    with without_autocast(q):
        for rows, queries, n_keys in _tiles(v.shape[0], v.shape[1], causal):
            of_queries, of_keys, values = q[rows, queries], _first(k, rows, n_keys), _first(v, rows, n_keys)
            d_read = (d_out[rows, queries] * row_scale[rows, queries, None]).to(v.dtype)
            weights, d_products = work.weights_backward(of_queries, of_keys, torch.bmm(d_read, values.mT), queries)
            d_v[rows, :n_keys] += torch.bmm(weights.mT, d_read)
            d_q[rows, queries] = torch.bmm(d_products, of_keys)
            d_k[rows, :n_keys] += torch.bmm(d_products.mT, of_queries)
    return d_q, d_k.to(k.dtype), d_v.to(v.dtype), work.d_bias if bias is None else work.d_bias.to(bias.dtype)


def _fake(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, row_scale: Tensor, score_scale: float, causal: bool) -> Tensor:
    return v.new_empty(v.shape)


def _fake_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, row_scale: Tensor, score_scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_q, d_k, d_v = (x.new_empty(x.shape) for x in (q, k, v))
    return d_q, d_k, d_v, row_scale.new_empty(0, 0) if bias is None else bias.new_empty(bias.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, score_scale, causal = inputs
    ctx.save_for_backward(*tensors)
    ctx.rest = (score_scale, causal)


def _differentiate(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_derivative(d_out, "backend 'tiled'")
    saved = ctx.saved_tensors  # Unpack once: checkpointing forbids a second read.
    bias = saved[3]
    *gradients, d_bias = _backward_operator(d_out, *saved, *ctx.rest)
    return (*gradients, None if bias is None else d_bias, None, None, None)


_forward_operator = register_operator(
    _tiled_quadratic, _fake, keep_for_backward=_keep_for_backward, differentiate=_differentiate
)
_backward_operator = register_operator(_tiled_quadratic_backward, _fake_backward)
