"""Memories of mixed chunk attention: what the chunks before a token leave for its linear part, in place of their sum.

A chunk has keys K [C, s] of unit length, values V [C, e], and either weights W = diag(w), one for each token, or factors a [s]
of what was there before. With S [s, e] before the chunk and S' after it, and S = 0, P = 0 before the first:

    decay       S' = diag(a) S + K^T V
    delta       S' = S + K^T W (V - K S) / C
    proximal    S' = (I + K^T W K)^-1 (S + K^T W V)
    mesa        S' = (r I + P')^-1 ((r I + P) S + K^T W V)        P' = P + K^T W K

    o_lin[t] = q[t] S                                                      with the S of the chunks before t's
    mesa        o_lin[t] = q[t] (S + (r I + P)^-1 K^T W V)                 with the tokens of t's chunk up to t

The second term of mesa reads what the chunk itself holds by the solution of those before, as linear attention does: recall that
begins with nearby tokens teaches the maps what they need for far ones.

Proximal is the smallest change of S that stores the chunk as far as W asks: it minimises |S' - S|^2 + |W^1/2 (V - K S')|^2.
Mesa is the ridge regression over all chunks, with the ridge r. The transition from S to S' has eigenvalues in [0, 1]: of delta,
because w <= 1 and |k| = 1 bound those of K^T W K by C.

Keys come with their weights, as x = w^1/2 k, of which |x| = w^1/2. Then K^T W K = x^T x has no negative eigenvalue, however x
is rounded. These products are made in float32: the inverses would amplify what bf16 leaves out of them.

Shapes: B batch, D documents, G chunks, L chunks of the longest document, C chunk size, s query/key width, e value width.
`x` are [..., C, s]; for decay, [..., C, 2 s]: the keys, and the logarithms of factors, of which a chunk has the mean.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.batch import Batch
from lineartime.ops.chunks import exclusive_cumsum, join_documents, split_documents
from lineartime.ops.precision import acc_dtype

Memory = Literal["decay", "delta", "proximal", "mesa"]


class Terms(NamedTuple):
    """What a chunk adds: K^T W K [..., s, s], or the factors a [..., s, 1] of decay; and K^T W V, or K^T V, [..., s, e]."""

    gram: Tensor
    product: Tensor


def weighted_keys(memory: Memory, k: Tensor, strength: Tensor) -> Tensor:
    """Weight keys [..., s] of unit length by the logits [..., 1] of b; decay has [..., s], a factor for each feature.

    w is b for delta and mesa, and b / (1 - b + b / 100) for proximal, so that nearly 100 stores a token as it is.
    """
    if memory == "decay":
        return torch.cat([k, F.logsigmoid(strength)], -1)
    b = strength.sigmoid()
    return k * (b / (1 - b + b / 100) if memory == "proximal" else b).sqrt()


def chunk_terms(memory: Memory, x: Tensor, v: Tensor) -> Terms:
    """The terms of chunks, in float32 or better: keys as `weighted_keys` makes them, and values [..., C, e]."""
    x, v = x.to(acc_dtype(v)), v.to(acc_dtype(v))
    if memory == "decay":
        k, logarithms = x.chunk(2, -1)
        return Terms(logarithms.mean(-2)[..., None].exp(), k.mT @ v)
    return Terms(x.mT @ x, x.mT @ (x.norm(dim=-1, keepdim=True) * v))


def weights_inside(solved: Tensor, x: Tensor) -> Tensor:
    """The weights of a chunk's own values in mesa, of any order: (r I + P)^-1 q [..., N, s], [..., C, s] -> [..., N, C]."""
    x = x.to(solved.dtype)
    strengths: Tensor = x.norm(dim=-1)[..., None, :]
    return (solved @ x.mT) * strengths


def fold(memory: Memory, s: Tensor, p: Tensor, terms: Terms, size: int, ridge: Tensor | float) -> tuple[Tensor, Tensor]:
    """S' and P' after a chunk of `size` tokens, from S [..., s, e] and P [..., s, s]; P and the ridge are those of mesa."""
    gram, product = terms
    if memory == "decay":
        return gram * s + product, p
    if memory == "delta":
        return s + (product - gram @ s) / size, p
    if memory == "proximal":
        return solve(gram, s + product, 1.0), p
    return solve(p + gram, p @ s + ridge * s + product, ridge), p + gram


def solve(gram: Tensor, right: Tensor, ridge: Tensor | float) -> Tensor:
    """(r I + gram)^-1 right: [..., s, s] and [..., s, e] -> [..., s, e]."""
    unit = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    root = torch.linalg.cholesky_ex(gram + ridge * unit).L  # unchecked: a NaN in one document shall not stop the others
    return torch.cholesky_solve(right, root)


def read(
    memory: Memory, q: Tensor, x: Tensor, v: Tensor, chunks: Batch, *, causal: bool, ridge: Tensor | float = 1.0
) -> Tensor:
    """The linear part: queries [B, G, C, s], and keys and values as for `chunk_terms` -> [B, G, C, e]."""
    gram, product = (split_documents(each, chunks) for each in chunk_terms(memory, x, v))  # [B, D, L, ...]
    if memory == "mesa":  # which needs no loop
        gram, product = (
            exclusive_cumsum(each, 2) if causal else each.sum(2, keepdim=True).expand_as(each) for each in (gram, product)
        )
        gram, product = (join_documents(each, chunks) for each in (gram, product))
        solved = solve(gram, q.mT.to(gram.dtype), ridge).mT  # a chunk has fewer queries than values have features
        out = (solved @ product).to(q.dtype)
        return out + weights_inside(solved, x).tril().to(v.dtype) @ v if causal else out
    states = [torch.zeros_like(product[:, :, 0])]
    for each in zip(gram.unbind(2)[:-1], product.unbind(2)[:-1], strict=True):
        states.append(fold(memory, states[-1], states[-1], Terms(*each), chunks.chunk_size, ridge)[0])
    return q @ join_documents(torch.stack(states, 2), chunks).to(q.dtype)
