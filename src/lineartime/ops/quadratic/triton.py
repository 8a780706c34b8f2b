"""Quadratic attention by Triton kernels, for GPUs: see `lineartime.ops.triton.quadratic`."""

import torch
from torch import Tensor

from lineartime.ops.positions import FactoredBias
from lineartime.ops.precision import common_dtype, matmul_dtype, output_dtype, without_autocast
from lineartime.ops.quadratic.inputs import QuadraticOptions
from lineartime.ops.quadratic.scales import scaled_inputs


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | FactoredBias | None, real: Tensor | None, options: QuadraticOptions
) -> Tensor:
    """Attend within each row, like the other forms, without keeping scores; padding holds zeros."""
    from lineartime.ops.triton import quadratic as kernels  # Triton may be absent

    dtype = output_dtype(v, matmul_dtype(q, k, v))
    common = common_dtype(q, k, v)
    if options.normalization == "paper" and real is not None and common == torch.float16:
        common = torch.float32  # queries divided by the length would vanish in float16
    q, k, v = (x.to(common) for x in (q, k, v))
    q, k, bias, row_scale, score_scale = scaled_inputs(q, k, bias, real, options)
    with without_autocast(q):
        out = kernels.attend(
            q,
            k,
            v,
            bias=bias,
            row_scale=row_scale.to(torch.float32),
            score_scale=score_scale,
            causal=options.causal,
            activation=options.activation,
        )
    return out.to(dtype)
