"""Quadratic attention by the forms that keep no scores: tiles on processors, Triton kernels on GPUs.

Shapes: R rows, L slots of a row, s query/key width, e value width.

Both compute, with the divisors as factors and a factored bias as more features of queries and keys,

    out[t] = row_scale[t] * sum over visible j of f(score_scale * q[t].k[j] + bias[t, j]) v[j]
"""

import torch
from torch import Tensor

from lineartime.ops.positions import FactoredBias
from lineartime.ops.precision import acc_dtype, common_dtype, matmul_dtype, output_dtype, without_autocast
from lineartime.ops.quadratic import tiled
from lineartime.ops.quadratic.inputs import QuadraticOptions


def attend_tiled(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | FactoredBias | None, real: Tensor | None, options: QuadraticOptions
) -> Tensor:
    """By tiles, with activation "relu2"; arguments as for the other forms, padding holds zeros."""
    compute = matmul_dtype(q, k, v)
    dtype = output_dtype(v, compute)
    q, k, v = (x.to(compute) for x in (q, k, v))
    q, k, bias, row_scale, score_scale = _factors(q, k, bias, real, options)
    with without_autocast(q):
        out = tiled.attend(q, k, v, bias=bias, row_scale=row_scale, score_scale=score_scale, causal=options.causal)
    return out.to(dtype)


def attend_triton(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | FactoredBias | None, real: Tensor | None, options: QuadraticOptions
) -> Tensor:
    """By Triton kernels; arguments as for the other forms, padding holds zeros."""
    from lineartime.ops.triton import quadratic as kernels  # Triton may be absent

    dtype = output_dtype(v, matmul_dtype(q, k, v))
    common = common_dtype(q, k, v)
    if options.normalization == "paper" and real is not None and common == torch.float16:
        common = torch.float32  # queries divided by the length would vanish in float16
    q, k, v = (x.to(common) for x in (q, k, v))
    q, k, bias, row_scale, score_scale = _factors(q, k, bias, real, options)
    with without_autocast(q):
        out = kernels.attend(
            q,
            k,
            v,
            bias=bias,
            row_scale=row_scale.to(torch.float32),
            score_scale=score_scale,
            causal=options.causal,
            activation="laplace" if options.activation == "laplace" else "relu2",
        )
    return out.to(dtype)


def _factors(
    q: Tensor, k: Tensor, bias: Tensor | FactoredBias | None, real: Tensor | None, options: QuadraticOptions
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, float]:
    """Queries, keys, bias [L, L], row_scale [R, L] and score_scale of the formula above."""
    rows, length, d_qk = q.shape
    row_scale = torch.ones(rows, length, dtype=acc_dtype(q), device=q.device)
    score_scale = d_qk**-0.5
    published_length = options.published_length(length, real)
    if isinstance(published_length, Tensor):  # another scale for each row
        q, score_scale = (q / published_length).to(q.dtype), 1.0
    elif published_length is not None:
        score_scale = 1 / published_length
    else:
        counts = row_scale if real is None else real.to(row_scale.dtype)
        counts = counts.cumsum(1) if options.causal else counts.sum(1, keepdim=True).expand(rows, length)
        row_scale = 1 / counts.clamp(min=1)
    if isinstance(bias, FactoredBias):  # products add up: s more features of queries and keys
        of_queries, of_keys = (x.expand(rows, -1, -1) for x in bias)
        q, k = torch.cat([q, (of_queries / score_scale).to(q.dtype)], -1), torch.cat([k, of_keys.to(k.dtype)], -1)
        bias = None
    return q, k, bias, row_scale, score_scale
