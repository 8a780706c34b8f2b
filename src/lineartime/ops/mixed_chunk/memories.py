"""The memory mesa of mixed chunk attention, which the linear part reads in place of the sum of the chunks before a token.

A key tells what the token before was, so that a query finds what followed it. Keys have one length, |k|^2 = s:

    q = Y[t] gamma_3 + Y[t - 1] beta_3        k = (Y[t] gamma_4 + Y[t - 1] beta_4) sqrt(s) / its length        Z = silu(Y)

A chunk has keys K [C, s] and values V [C, e]. With S [s, e] before the chunk and S' after it, and S = 0, P = 0 and n = 0 tokens
before the first:

    S' = (n' I + P')^-1 (sum of K^T V)           P' = P + K^T K        n' = n + C
    o_lin[t] = q[t] S                            with the S of the chunks before t's

It is the ridge regression over all chunks: it minimises n |S|^2 + |V - K S|^2. Its ridge is the mean of the eigenvalues of P;
without P, it is the published average.

q (n I + P)^-1 times the sum of K^T V is also the linear part of the published attention, without its divisor, of other queries:
any form of it computes mesa, once `solved_queries` has made them. Products of keys are made in float32: the inverse would
amplify what bf16 leaves out of them.

Shapes: B batch, T tokens, C chunk size, s query/key width, e value width.
Source: "Uncovering mesa-optimization algorithms in Transformers" (arXiv 2309.05858), by chunks.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.batch import Batch, sum_chunks
from lineartime.ops.modes import acc_dtype, is_traced, matmul_dtype, under_transform, without_autocast

Memory = Literal["sum", "mesa"]
"""sum: the published one. mesa: defined above."""


def queries_and_keys(y: Tensor, before: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of Y and that of the token before, [B, T, s]; gamma and beta, [4, s], are those of all maps."""
    q, k = (y * now + before * then for now, then in zip(gamma[2:], beta[2:], strict=True))
    return q, F.normalize(k, dim=-1, eps=1e-6) * k.shape[-1] ** 0.5


def fold(s: Tensor, p: Tensor, n: Tensor | float, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """S' and P' after keys [..., C, s] and values [..., C, e], from S [..., s, e], P [..., s, s] and n, or [..., 1, 1]."""
    k, v = k.to(acc_dtype(v)), v.to(acc_dtype(v))
    after = p + k.mT @ k
    return inverse(after, n + k.shape[-2]) @ (unsolved(s, p, n) + k.mT @ v), after


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
