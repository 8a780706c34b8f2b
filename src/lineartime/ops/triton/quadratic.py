"""Quadratic attention by Triton kernels, without a T x T matrix in memory, forward or backward.

Shapes: B batch, T tokens, s query/key width, e value width.

    out[t] = sum over j of P[t, j] v[j]                                                 P and dX as in kernels.py
    dv[j]  = sum over t of P[t, j] dout[t]      dbias[j - t] = sum over b and the diagonal of dX
    dq[t]  = c sum over j of dX[t, j] k[j]         dk[j] = c sum over t of dX[t, j] q[t]

Forward, P is in memory for a part of the queries at a time; backward, P and dX for a part of the keys. A kernel computes them
once, and they enter matrix products of PyTorch. The parts follow each other in a fixed order, so that the same inputs always
give the same bits.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lineartime.ops.modes import acc_dtype
from lineartime.ops.operator import Fused
from lineartime.ops.positions import sum_by_distance
from lineartime.ops.quadratic import Inputs


def workspace(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory; every result and every intermediate of the kernels is allocated here."""
    return torch.empty(shape, dtype=dtype, device=device)


SCORES = 2**26
"""The largest number of pairs whose scores are in memory at a time, unless `TOKENS` tokens of each sequence have more."""
TOKENS = 256
"""The smallest number of queries or keys at a time: matrix products of fewer are slow."""


def _parts(batch: int, length: int, causal: bool) -> Iterator[tuple[int, int]]:
    """Parts of the sequences, first token and end. Of a causal sequence they are short: half of a part's own pairs are zero."""
    size = max(TOKENS, min(SCORES // (batch * length), length // 8 if causal else length) // TOKENS * TOKENS)
    for first in range(0, length, size):
        yield first, min(first + size, length)


def _forward(inputs: Inputs, keep: bool) -> tuple[Tensor]:
    from lineartime.ops.triton.kernels import Pairs, attention_weights  # Triton may be absent

    q, k, v, bias, row_scale, score_scale, causal, activation = inputs
    row_scale = row_scale.float()
    (batch, length, _), dtype = v.shape, torch.float32 if v.dtype == torch.float16 else v.dtype  # for its range
    if v.numel() == 0:
        return (workspace(v.shape, v.dtype, v.device),)
    q, k, row_scale = (x.contiguous() for x in (q, k, row_scale))
    bias = None if bias is None else bias.contiguous()
    out, values = workspace(v.shape, dtype, v.device), v.to(dtype)
    for first, last in _parts(batch, length, causal):
        pairs = Pairs(first, last, 0, last if causal else length)
        weights = attention_weights(
            q, k, bias, row_scale, score_scale, pairs=pairs, causal=causal, activation=activation, dtype=dtype
        )
        torch.bmm(weights, values[:, : pairs.last_key], out=out[:, first:last])
        del weights  # before there is memory for the next ones
    return (out.to(v.dtype),)


def _backward(inputs: Inputs, kept: tuple[Tensor, ...], d_out: Tensor, wanted: list[bool]) -> list[Tensor | None]:
    from lineartime.ops.triton.kernels import Pairs, score_gradient  # Triton may be absent

    if inputs.v.numel() == 0:
        return [None if x is None else x.new_zeros(x.shape) for x in inputs[:4]]
    bias, _, score_scale, causal, activation = inputs[3:]
    q, k, v, row_scale, d_out = (x.contiguous() for x in (*inputs[:3], inputs.row_scale.float(), d_out))
    (batch, length, _), dtype = v.shape, torch.float32 if v.dtype == torch.float16 else v.dtype  # for its range
    d_bias = None
    if bias is not None:
        bias = bias.contiguous()
        if wanted[3]:
            d_bias = workspace(bias.shape, torch.promote_types(bias.dtype, acc_dtype(v)), v.device).zero_()
    d_q = workspace(q.shape, acc_dtype(v), v.device).zero_()  # a sum over the parts, which bf16 would round each time
    d_k, d_v = (workspace(x.shape, dtype, v.device) for x in (k, v))
    of_queries, of_keys, d_read = q.to(dtype), k.to(dtype), d_out.to(dtype)
    nothing = d_k.new_zeros(1, 1, 1)  # baddbmm multiplies by score_scale before it rounds
    for first, last in _parts(batch, length, causal):
        start = first if causal else 0
        weights, d_scores = score_gradient(
            q, k, v, bias, row_scale, d_out, score_scale, pairs=Pairs(start, length, first, last), causal=causal,
            activation=activation, dtype=dtype,
        )  # fmt: skip
        torch.bmm(weights.mT, d_read[:, start:], out=d_v[:, first:last])
        del weights
        d_q[:, start:] += torch.baddbmm(nothing, d_scores, of_keys[:, first:last], beta=0, alpha=score_scale)
        d_k[:, first:last] = torch.baddbmm(nothing, d_scores.mT, of_queries[:, start:], beta=0, alpha=score_scale)
        if d_bias is not None:
            d_bias[first : last + length - start - 1] += sum_by_distance(d_scores.sum(0, dtype=d_bias.dtype))
        del d_scores
    return [d_q, d_k, d_v, d_bias]


kernels = Fused(
    "triton_quadratic", Inputs, _forward, lambda inputs, keep: (inputs.v.new_empty(inputs.v.shape),), _backward,
    wrt=("q", "k", "v", "bias"), what="backend 'triton'",
)  # fmt: skip
