"""The divisors of quadratic attention as factors, and a factored bias as features: the inputs of the tiled and the Triton form.

Shapes: R rows, L slots of a row, s query/key width, e value width.

    out[t] = row_scale[t] * sum over visible j of f(score_scale * q[t].k[j] + bias[t, j]) v[j]
"""

import torch
from torch import Tensor

from lineartime.ops.positions import FactoredBias
from lineartime.ops.precision import acc_dtype
from lineartime.ops.quadratic.inputs import QuadraticOptions


def scaled_inputs(
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
    if isinstance(bias, FactoredBias):  # a sum of two products is one product of concatenated features
        of_queries, of_keys = (x.expand(rows, -1, -1) for x in bias)
        q, k = torch.cat([q, (of_queries / score_scale).to(q.dtype)], -1), torch.cat([k, of_keys.to(k.dtype)], -1)
        bias = None
    return q, k, bias, row_scale, score_scale
