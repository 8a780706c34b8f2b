"""The fast forms of quadratic attention, in which a document is one chunk: tiles for CPUs, here, and kernels for GPUs.

Shapes: G documents, L slots of each, s query/key width, e value width; of a tile: b documents, Q queries, K keys.

    out[t] = row_scale[t] * sum over visible j of w[t, j] v[j]          w[t, j] = relu(score_scale * q[t].k[j] + bias[j - t])^2

The scores of a tile stay in the cache. None are kept for the backward pass, which recomputes them. What lies between the matrix
products is computed by the functions of tiles.cpp, in one pass over the scores.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lineartime.native import native_functions
from lineartime.ops.modes import acc_dtype, is_plain
from lineartime.ops.operator import Fused
from lineartime.ops.positions import sum_by_distance

SOURCE = Path(__file__).with_name("tiles.cpp")
"""What lies between the matrix products of both kinds of tiles."""
QUERIES = 256
"""The number of queries in a tile."""
SCORES = 2**19
"""The approximate number of scores in a tile, if there are enough documents."""


class Inputs(NamedTuple):
    """The inputs of a fused form.

    Attributes:
        q, k: [G, L, s].
        v: [G, L, e], zero in empty slots.
        bias: [2 L - 1], of the distances from 1 - L to L - 1, or None.
        row_scale: [G, L], float32 or better.
        score_scale: the factor of products.
        causal: whether a token attends only to itself and earlier tokens.
        activation: "relu2", which tiles have alone, or "laplace".
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    row_scale: Tensor
    score_scale: float
    causal: bool
    activation: str


def _tiles(inputs: Inputs) -> Iterator[tuple[slice, slice, int]]:
    """The documents and queries of each tile, and the number of keys that its queries see."""
    documents, length, _ = inputs.v.shape
    at_once = max(1, SCORES // (QUERIES * max(1, length)))
    for first in range(0, documents, at_once):
        for start in range(0, length, QUERIES):
            stop = min(start + QUERIES, length)
            yield slice(first, min(first + at_once, documents)), slice(start, stop), stop if inputs.causal else length


def _first(x: Tensor, documents: slice, n_keys: int) -> Tensor:
    """The keys or values that some queries see, [b, K, f], in a memory layout that matrix products take without a copy."""
    seen = x[documents, :n_keys]
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
    d_q, length = torch.empty_like(q), q.shape[1]
    d_k, d_v = (torch.zeros(x.shape, dtype=row_scale.dtype, device=x.device) for x in (k, v))
    d_bias = None if bias is None else torch.zeros_like(bias)
    for rows, queries, n_keys in _tiles(inputs):
        of_queries, of_keys, values = q[rows, queries], _first(k, rows, n_keys), _first(v, rows, n_keys)
        d_read = (d_out[rows, queries] * row_scale[rows, queries, None]).to(v.dtype)
        d_products = torch.bmm(d_read, values.mT)
        d_scores = None if d_bias is None else torch.zeros(d_products.shape[1:], dtype=d_bias.dtype, device=v.device)
        weights = _weigh(inputs, of_queries, of_keys, queries, d_products, d_scores)
        d_v[rows, :n_keys] += torch.bmm(weights.mT, d_read)
        d_q[rows, queries] = torch.bmm(d_products, of_keys)
        d_k[rows, :n_keys] += torch.bmm(d_products.mT, of_queries)
        if d_bias is not None and d_scores is not None:
            first = length - queries.stop
            d_bias[first : first + sum(d_scores.shape) - 1] += sum_by_distance(d_scores)
    return [d_q, d_k, d_v, d_bias]


def _prepared(inputs: Inputs) -> Inputs:
    """Contiguous, with the bias in the dtype of scores."""
    q, k, v = (x.contiguous() for x in inputs[:3])
    bias = None if inputs.bias is None else inputs.bias.to(inputs.row_scale.dtype).contiguous()
    return inputs._replace(q=q, k=k, v=v, bias=bias)


tiled = Fused(
    "tiled_quadratic", Inputs, _forward, lambda inputs, keep: (inputs.v.new_empty(inputs.v.shape),), _backward,
    wrt=("q", "k", "v", "bias"), what="backend 'tiled'",
)  # fmt: skip


def _weigh(
    inputs: Inputs, q: Tensor, k: Tensor, queries: slice, d_weights: Tensor | None = None, d_scores: Tensor | None = None
) -> Tensor:
    """The weights: [b, Q, s] and [b, K, s] -> [b, Q, K], in the dtype of q; `queries` are the places of the queries.

    The gradient of the weights, if given, becomes that of the products q.k. That of the scores, summed over documents, is
    added to `d_scores` [Q, K].
    """
    functions, length = native_functions(SOURCE, q.dtype), inputs.q.shape[1]
    assert functions is not None
    weights = torch.bmm(q, k.mT)
    # The bias of the first query for the first key, and that of the next one, which is one place before.
    options = (inputs.bias, length - 1 - queries.start, -1, None, 0, 0, float(inputs.score_scale), int(inputs.causal))
    if d_weights is None:
        functions.call("weigh", weights, *options, *weights.shape)
    else:
        functions.call("weigh_backward", weights, *options, d_weights, float(inputs.score_scale), d_scores, *weights.shape)
    return weights


def attend_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    last: Tensor,
    n: int,
    bias: Tensor | None,
    row: Callable[[Tensor], Tensor],
    score_scale: float,
) -> Tensor | None:
    """Attend from one token of each stream to a cache, [B, ..., 1, s] to [B, ..., room, s] and [B, ..., room, e], by relu^2.

    Args:
        q, k, v: of one dtype; those of the cache have room for more keys than are seen.
        last: int64 [1] or [B, 1], the last key that each token sees.
        n: the number of keys that are seen by any.
        bias: [2 n - 1]; None for none.
        row: the factor of a query that sees n keys.
        score_scale: the factor of products.

    Returns:
        [B, ..., 1, e]; None if C++ cannot read these tensors here.
    """
    bias = None if bias is None else bias.to(acc_dtype(q)).contiguous()
    functions = native_functions(SOURCE, k.dtype) if is_plain(q, k, v, bias) and q.dtype == k.dtype == v.dtype else None
    if functions is None:
        return None
    seen = (last.reshape(-1, *[1] * (q.dim() - 3)) + 1).expand(q.shape[:-2]).contiguous()
    out, scale = q.new_empty(*q.shape[:-1], v.shape[-1]), row(seen.to(acc_dtype(q))).contiguous()
    sizes = seen.numel(), k.shape[-2], k.shape[-1], v.shape[-1], n
    functions.call("attend_token", q, k, v, bias, seen, scale, out, score_scale, *sizes)
    return out
