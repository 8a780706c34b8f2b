"""Quadratic attention on CPUs, some queries at a time.

Shapes: B batch, T tokens, s query/key width, e value width; of a tile: b rows of the batch, Q queries, K keys.

    out[t] = row_scale[t] * sum over visible j of w[t, j] v[j]          w[t, j] = relu(score_scale * q[t].k[j] + bias[t, j])^2

The scores of a tile stay in the cache. None are kept for the backward pass, which recomputes them. What lies between the matrix
products is computed by the functions of cpu.cpp, in one pass over the scores, or in plain PyTorch.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lineartime.native import native_functions
from lineartime.ops.modes import matmul_dtype, output_dtype, without_autocast
from lineartime.ops.operator import Fused
from lineartime.ops.positions import FactoredBias
from lineartime.ops.quadratic.inputs import Inputs, QuadraticOptions, fused_inputs

SOURCE = Path(__file__).with_name("cpu.cpp")
QUERIES = 256
"""The number of queries in a tile."""
SCORES = 2**19
"""The approximate number of scores in a tile, if the batch is large enough."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | FactoredBias | None, real: Tensor | None, options: QuadraticOptions
) -> Tensor:
    """Attend within each row, like the other forms, with activation "relu2". Padding must be zero. Keeps no scores."""
    compute = matmul_dtype(q, k, v)
    dtype = output_dtype(v, compute)
    inputs = fused_inputs(q.to(compute), k.to(compute), v.to(compute), bias, real, options)
    with without_autocast(v):
        return _fused(inputs).to(dtype)


def _tiles(inputs: Inputs) -> Iterator[tuple[slice, slice, int]]:
    """The rows and queries of each tile, and the number of keys that its queries see."""
    batch, length, _ = inputs.v.shape
    n_rows = max(1, SCORES // (QUERIES * max(1, length)))
    for row in range(0, batch, n_rows):
        for start in range(0, length, QUERIES):
            stop = min(start + QUERIES, length)
            yield slice(row, min(row + n_rows, batch)), slice(start, stop), stop if inputs.causal else length


def _first(x: Tensor, rows: slice, n_keys: int) -> Tensor:
    """The keys or values that some queries see, [b, K, f], in a memory layout that matrix products take without a copy."""
    seen = x[rows, :n_keys]
    return seen[0][None] if len(seen) == 1 else seen.contiguous()  # [None] gives one row the stride of a row of K keys


def _forward(inputs: Inputs, keep: bool) -> tuple[Tensor]:
    inputs = _prepared(inputs)
    q, k, v, _, row_scale, *_ = inputs
    out = torch.empty_like(v)
    for rows, queries, n_keys in _tiles(inputs):
        weights = _weigh(inputs, q[rows, queries], _first(k, rows, n_keys), queries)
        out[rows, queries] = torch.bmm(weights, _first(v, rows, n_keys)).mul_(row_scale[rows, queries, None])
    return (out,)


def _backward(inputs: Inputs, kept: tuple[Tensor, ...], d_out: Tensor, wanted: list[bool]) -> list[Tensor | None]:
    inputs = _prepared(inputs)
    q, k, v, bias, row_scale, *_ = inputs
    d_q = torch.empty_like(q)
    d_k, d_v = (torch.zeros(x.shape, dtype=row_scale.dtype, device=x.device) for x in (k, v))
    d_bias = None if bias is None else torch.zeros_like(bias)
    for rows, queries, n_keys in _tiles(inputs):
        of_queries, of_keys, values = q[rows, queries], _first(k, rows, n_keys), _first(v, rows, n_keys)
        d_read = (d_out[rows, queries] * row_scale[rows, queries, None]).to(v.dtype)
        d_products = torch.bmm(d_read, values.mT)
        weights = _weigh(inputs, of_queries, of_keys, queries, d_products, d_bias)
        d_v[rows, :n_keys] += torch.bmm(weights.mT, d_read)
        d_q[rows, queries] = torch.bmm(d_products, of_keys)
        d_k[rows, :n_keys] += torch.bmm(d_products.mT, of_queries)
    return [d_q, d_k, d_v, d_bias]


def _prepared(inputs: Inputs) -> Inputs:
    """Contiguous, with the bias in the dtype of scores."""
    q, k, v = (x.contiguous() for x in inputs[:3])
    bias = None if inputs.bias is None else inputs.bias.to(inputs.row_scale.dtype).contiguous()
    return inputs._replace(q=q, k=k, v=v, bias=bias)


_fused = Fused(
    "tiled_quadratic", Inputs, _forward, lambda inputs, keep: (inputs.v.new_empty(inputs.v.shape),), _backward,
    wrt=("q", "k", "v", "bias"), what="backend 'tiled'",
)  # fmt: skip


def _weigh(
    inputs: Inputs, q: Tensor, k: Tensor, queries: slice, d_weights: Tensor | None = None, d_bias: Tensor | None = None
) -> Tensor:
    """The weights: [b, Q, s] and [b, K, s] -> [b, Q, K], in the dtype of q; `queries` are the places of the queries.

    The gradient of the weights, if given, becomes that of the products q.k. That of the scores is added to `d_bias`.
    """
    functions, by = native_functions(SOURCE), float(inputs.score_scale)
    if functions is not None:
        weights, row = torch.bmm(q, k.mT), 0 if inputs.bias is None else inputs.bias.shape[1]
        options = (queries.start * row, row, by, int(inputs.causal), *weights.shape)
        if d_weights is None:
            functions.call("weigh", q.dtype, weights, inputs.bias, *options)
        else:
            functions.call("weigh_backward", q.dtype, weights, d_weights, inputs.bias, d_bias, *options)
        return weights
    bias, exact = None if inputs.bias is None else inputs.bias[queries, : k.shape[1]], inputs.row_scale.dtype
    if bias is not None and q.dtype == exact:
        scores = torch.baddbmm(bias, q, k.mT, alpha=by)
    else:
        scores = torch.bmm(q, k.mT).to(exact).mul_(by)
        scores = scores if bias is None else scores.add_(bias)
    if inputs.causal:  # the last query sees all keys, and each query before it one key less
        n_queries = q.shape[1]
        scores[..., -n_queries:].mul_(torch.ones(n_queries, n_queries, dtype=exact).tril())
    scores.relu_()
    if d_weights is not None:
        d_scores = d_weights.to(exact).mul_(scores).mul_(2)
        if d_bias is not None:
            d_bias[queries, : k.shape[1]] += d_scores.sum(0)
        d_weights.copy_(d_scores.mul_(by))
    return scores.mul_(scores).to(q.dtype)
