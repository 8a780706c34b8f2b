"""Quadratic attention in plain PyTorch on any device: all scores of a block of queries at a time.

Shapes: R rows, L slots of a row, Q queries of a block, K keys, s query/key width, e value width.
The definition is in reference.py.
"""

import torch
from torch import Tensor

from lineartime.ops.activations import Activation, attention_weights
from lineartime.ops.modes import is_exporting, matmul_dtype, output_dtype, without_autocast
from lineartime.ops.positions import FactoredBias
from lineartime.ops.quadratic.inputs import QuadraticOptions


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | FactoredBias | None, real: Tensor | None, options: QuadraticOptions
) -> Tensor:
    """Attend within each row: [R, L, s], [R, L, s], [R, L, e] -> [R, L, e]; `real`, bool [R, L], marks real tokens."""
    length, causal = q.shape[1], options.causal
    published_length = options.published_length(length, real)
    outputs = []
    for start, stop in _blocks(length, causal):
        keys = stop if causal else length
        visible = torch.ones(stop - start, keys, dtype=torch.bool, device=q.device).tril(start) if causal else None
        if real is not None:
            visible = real[:, None, :keys] if visible is None else visible & real[:, None, :keys]
        outputs.append(
            attend_visible(
                q[:, start:stop],
                k[:, :keys],
                v[:, :keys],
                visible=visible,
                bias=_part(bias, start, stop, keys),
                activation=options.activation,
                published_length=published_length,
            )
        )
    return torch.cat(outputs, 1)


def _blocks(length: int, causal: bool) -> list[tuple[int, int]]:
    """Where the blocks of queries begin and end."""
    if not causal or is_exporting():  # an exported program accepts any length, so it cannot count blocks
        return [(0, length)]
    # A causal block can skip the keys after it: with 8 blocks, this saves 7/16 of the work.
    size = max(256, -(-length // 8))
    return [(start, min(start + size, length)) for start in range(0, max(length, 1), size)]


def _part(bias: Tensor | FactoredBias | None, start: int, stop: int, keys: int) -> Tensor | None:
    """The bias of some queries and the first keys, [Q, K] or [R, Q, K]."""
    if isinstance(bias, FactoredBias):
        return FactoredBias(bias.of_queries[start:stop], bias.of_keys[:keys]).dense()
    return None if bias is None else bias[..., start:stop, :keys]


def attend_visible(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor | None,
    bias: Tensor | None = None,
    activation: Activation,
    published_length: float | Tensor | None,
) -> Tensor:
    """Compute all scores at once: [..., Q, s], [..., K, s], [..., K, e] -> [..., Q, e]; arguments as in `attention_weights`."""
    compute = matmul_dtype(q, k, v)
    with without_autocast(q):
        weights = attention_weights(
            q.to(compute) @ k.to(compute).mT,
            d_qk=q.shape[-1],
            visible=visible,
            bias=bias,
            activation=activation,
            published_length=published_length,
        )
        out = weights.to(compute) @ v.to(compute)
    return out.to(output_dtype(v, compute))
