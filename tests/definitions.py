"""The definition of attention in ops/oracle.py, for rows of tokens, [B, T, s] and [B, T, e], with the divisors "count"."""

import torch
from torch import Tensor

from lineartime.ops import MixedChunkOptions, Scales, oracle
from lineartime.ops.activations import Activation
from lineartime.ops.mixed_chunk import reciprocal


def quadratic(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, bias: Tensor | None = None) -> Tensor:
    """GAU; the bias is that of all distances, [2 T - 1]."""
    return mixed_chunk(q, k, None, None, v, chunk_size=None, causal=causal, bias=bias)


def mixed_chunk(*maps: Tensor | None, chunk_size: int | None, causal: bool = False, bias: Tensor | None = None) -> Tensor:
    """FLASH, of queries, keys, linear queries, linear keys and values; the bias is that of all distances, [2 C - 1]."""
    *_, v = maps
    assert v is not None
    width = next(x.shape[-1] for x in maps if x is not None)
    scales = Scales(width**-0.5, reciprocal, reciprocal)
    options = MixedChunkOptions(chunk_size, causal, scales, bias=None if bias is None else lambda _: bias)
    rows = ([None if x is None else x[row] for x in maps] for row in range(len(v)))
    return torch.stack([oracle.of_document(*row, options) for row in rows])


def cross_attention_oracle(
    q: Tensor, k: Tensor, v: Tensor, *, source_mask: Tensor | None = None, activation: Activation = "relu2"
) -> Tensor:
    """The definition of `cross_attention`, one query at a time: slow, a reference for tests."""
    if q.dim() > 3:
        heads = [
            cross_attention_oracle(q[:, h], k[:, h], v[:, h], source_mask=source_mask, activation=activation)
            for h in range(q.shape[1])
        ]
        return torch.stack(heads, 1)
    out = v.new_zeros(*q.shape[:2], v.shape[-1])
    for b in range(q.shape[0]):
        real = [j for j in range(k.shape[1]) if source_mask is None or source_mask[b, j]]
        for t in range(q.shape[1] if real else 0):
            scores = k[b, real] @ q[b, t] / q.shape[-1] ** 0.5
            weights = scores.softmax(0) if activation == "softmax" else scores.relu().square() / len(real)
            out = out.index_put((torch.tensor(b), torch.tensor(t)), weights @ v[b, real])
    return out
