"""Memories of mixed chunk attention: what the chunks before a token leave for its linear part, in place of their sum.

A key tells what the token before was, so that a query finds what followed it. Keys have unit length, those of mesa |k|^2 = s:

    q = Y[t] gamma_3 + Y[t - 1] beta_3        k = (Y[t] gamma_4 + Y[t - 1] beta_4) / its length        Z = silu(Y)

A chunk has keys K [C, s], values V [C, e], and, except of mesa, weights W = diag(w), one for each token, or factors a [s] of
what was there before. With S [s, e] before the chunk and S' after it, and S = 0, P = 0 and n = 0 tokens before the first:

    decay       S' = diag(a) S + K^T V
    delta       S' = S + K^T W (V - K S) / C
    proximal    S' = (I + K^T W K)^-1 (S + K^T W V)
    mesa        S' = (n' I + P')^-1 (sum of K^T V)           P' = P + K^T K        n' = n + C

    o_lin[t] = q[t] S                                        with the S of the chunks before t's

Proximal is the smallest change of S that stores the chunk as far as W asks: it minimises |S' - S|^2 + |W^1/2 (V - K S')|^2.
Mesa is the ridge regression over all chunks: it minimises n |S|^2 + |V - K S|^2. Its ridge is the mean of the eigenvalues of P;
without P, it is the published average. The transition from S to S' has eigenvalues in [0, 1]: of delta, because w <= 1 and
|k| = 1 bound those of K^T W K by C.

q (n I + P)^-1 times the sum of K^T V is also the linear part of the published attention, without its divisor, of other queries:
any form of it computes mesa, once `solved_queries` has made them.

Keys come with their weights, as x = w^1/2 k, of which |x| = w^1/2. Then K^T W K = x^T x has no negative eigenvalue, however x
is rounded. These products are made in float32: the inverses would amplify what bf16 leaves out of them.

Shapes: B batch, T tokens, D documents, G chunks, L chunks of the longest document, C chunk size, s query/key width, e value
width. `x` are [..., C, s]; for decay, [..., C, 2 s]: the keys, and the logarithms of factors, of which a chunk has the mean.
Sources: proximal is Longhorn (arXiv 2407.14207) by chunks, delta is DeltaNet (2406.06484) by chunks, and mesa is the layer of
"Uncovering mesa-optimization algorithms in Transformers" (2309.05858) by chunks.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.batch import Batch
from lineartime.ops.chunks import join_documents, split_documents, sum_chunks
from lineartime.ops.precision import acc_dtype, matmul_dtype, without_autocast
from lineartime.ops.tracing import is_traced, under_transform

Memory = Literal["sum", "decay", "delta", "proximal", "mesa"]
"""sum: the published one. The others are defined above."""
FOLDED: tuple[Memory, ...] = ("decay", "delta", "proximal")
"""The memories that depend on the order of chunks, which are folded one after the other; only causal attention has them."""


class Terms(NamedTuple):
    """What a chunk adds: K^T W K [..., s, s], or the factors a [..., s, 1] of decay; and K^T W V, or K^T V, [..., s, e]."""

    gram: Tensor
    product: Tensor


def queries_and_keys(memory: Memory, y: Tensor, before: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of Y and that of the token before, [B, T, s]; gamma and beta, [4, s], are those of all maps."""
    q, k = (y * now + before * then for now, then in zip(gamma[2:], beta[2:], strict=True))
    k = F.normalize(k, dim=-1, eps=1e-6)
    return q, k * k.shape[-1] ** 0.5 if memory == "mesa" else k


def weighted_keys(memory: Memory, k: Tensor, strength: Tensor) -> Tensor:
    """Weight keys [..., s] of unit length by the logits [..., 1] of b; decay has [..., s], a factor for each feature.

    w is b for delta, and b / (1 - b + b / 100) for proximal, so that nearly 100 stores a token as it is.
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
    return Terms(x.mT @ x, x.mT @ (v if memory == "mesa" else x.norm(dim=-1, keepdim=True) * v))


def fold(memory: Memory, s: Tensor, terms: Terms, size: int) -> Tensor:
    """S' after a chunk of `size` tokens, from S [..., s, e], of the memories in `FOLDED`."""
    gram, product = terms
    if memory == "decay":
        return gram * s + product
    if memory == "delta":
        return s + (product - gram @ s) / size
    return inverse(gram, 1.0) @ (s + product)


def fold_mesa(s: Tensor, p: Tensor, n: Tensor | float, terms: Terms, size: int) -> tuple[Tensor, Tensor]:
    """S' and P' of mesa after `size` tokens, from S [..., s, e], P [..., s, s] and n, a number or [..., 1, 1]."""
    after = p + terms.gram
    return inverse(after, n + size) @ (unsolved(s, p, n) + terms.product), after


def unsolved(s: Tensor, p: Tensor, n: Tensor | float) -> Tensor:
    """The sum of K^T V over the n tokens before, of which S is (n I + P)^-1 times."""
    return n * s + p @ s


def inverse(gram: Tensor, n: Tensor | float) -> Tensor:
    """(n I + gram)^-1, [..., s, s], of a symmetric gram without negative eigenvalues; n is at least 1."""
    matrix = gram + n * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    if matrix.device.type == "cpu" and not is_traced() and not under_transform():
        by_cholesky: Tensor = _Inverse.apply(matrix)  # type: ignore[no-untyped-call]
        return by_cholesky
    inverted: Tensor = torch.linalg.inv_ex(matrix).inverse  # unchecked: NaN in a document shall not stop others
    return inverted


class _Inverse(torch.autograd.Function):
    """The inverse of positive definite matrices, in a third of the time of `torch.linalg.inv` on a CPU."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        factor, failed = torch.linalg.cholesky_ex(matrix)
        # What is not a number, in one document, shall not stop the others.
        inverted = torch.cholesky_inverse(factor).masked_fill((failed != 0)[..., None, None], torch.nan)
        ctx.save_for_backward(inverted)
        return inverted

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (inverted,) = ctx.saved_tensors
        product: Tensor = inverted @ gradient @ inverted
        return -product


def read(memory: Memory, q: Tensor, x: Tensor, v: Tensor, chunks: Batch) -> Tensor:
    """The causal linear part: queries [B, G, C, s], and keys and values as for `chunk_terms` -> [B, G, C, e]."""
    gram, product = (split_documents(each, chunks) for each in chunk_terms(memory, x, v))  # [B, D, L, ...]
    states = [torch.zeros_like(product[:, :, 0])]
    for each in zip(gram.unbind(2)[:-1], product.unbind(2)[:-1], strict=True):
        states.append(fold(memory, states[-1], Terms(*each), chunks.chunk_size))
    return q @ join_documents(torch.stack(states, 2), chunks).to(q.dtype)


def solved_queries(
    q: Tensor, k: Tensor, batch: Batch, *, causal: bool, before: Tensor | None = None, n_before: int = 0
) -> Tensor:
    """Solve queries: q (n I + P)^-1, [B, T, s], with the P of the chunks before or, if not causal, of all chunks.

    `before` is the P of streams before these chunks, [B, s, s], and `n_before` the number of their tokens.
    """
    if causal and before is None and batch.n_chunks == 1:
        return q  # P is zero, and no chunk is read
    wide, compute = acc_dtype(q), matmul_dtype(q)
    with without_autocast(q):
        keys, queries = batch.cut(k.to(wide)), batch.cut(q.to(compute))
        size = batch.sizes(keys.new_empty(0))[..., None, None]
        p, n = (sum_chunks(x, batch, "before" if causal else "all") for x in (keys.mT @ keys, size))
        if before is not None:
            p = p + before[:, None].to(wide)
        return batch.join(queries @ inverse(p, (n + n_before).clamp(min=1)).to(compute))
