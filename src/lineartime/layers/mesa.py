"""FLASH whose linear part recalls: ridge regression over the chunks before. Queries are solved; all else is FLASH.

A key tells what the token before was, so that a query finds what followed it. Keys have one length, |k|^2 = s:

    q = y[t] gamma_3 + y[t - 1] beta_3        k = (y[t] gamma_4 + y[t - 1] beta_4) sqrt(s) / its length        Z = silu(y)

A chunk has keys K [C, s] and values V [C, e]. With S [s, e] before the chunk and S' after it, and S = 0, P = 0 and n = 0 tokens
before the first:

    S' = (n' I + P')^-1 (sum of K^T V)           P' = P + K^T K        n' = n + C
    o_lin[t] = q[t] S                            with the S of the chunks before t's; of a prefix, of all the prefix

It is the ridge regression over these chunks: it minimises n |S|^2 + |V - K S|^2. Its ridge is the mean of the eigenvalues of P;
without P, it is the published average. As q S = (q (n I + P)^-1) (sum of K^T V), `solve` makes other queries, and the published
linear part reads them, without its divisor. Products of keys are made in float32: the inverse would amplify what bf16 leaves
out.

Shapes: N tokens, D documents, G chunks, C chunk size, e value width, s query/key width.
Source: "Uncovering mesa-optimization algorithms in Transformers" (arXiv 2309.05858), by chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.layers.flash import FLASH
from lineartime.ops import tiles
from lineartime.ops.mixed_chunk import MixedChunkState, Scales, attend
from lineartime.ops.modes import acc_dtype, is_traced, matmul_dtype, under_transform, without_autocast
from lineartime.ops.packing import Grid, Packing
from lineartime.ops.state import in_place, renewed, writable

Memory = Literal["sum", "mesa"]
"""What the linear part of FLASH reads of the chunks before, in configs: their sum, as published, or what is defined above."""


@dataclass(eq=False)
class MemoryState(MixedChunkState):
    """The state of streams; `summary` is S.

    Attributes:
        last: [D, s], the y of the last token, of which the next key tells.
        gram: [D, s, s], P.
    """

    last: Tensor
    gram: Tensor


class FLASHMesa(FLASH):
    """FLASH with ridge regression in place of the sum over chunks, whose queries and keys have no positions.

    Args:
        **options: the options of `FLASH`.
    """

    name = "flash-mesa"
    splits_context = False
    constant_state = False  # it has a constant size, but a recorded step would invert a matrix at every token

    @property
    def title(self) -> str:
        return "FLASH with the memory mesa"

    def init_own(self) -> None:
        """Begin as FLASH, but with queries 4 y, and keys the y of the token before.

        Recall takes off with what the memory returns: queries that begin as y learn it twice as late.
        """
        super().init_own()
        for parameter, start in ((self.gamma, (4.0, 0.0)), (self.beta, (0.0, 1.0))):
            with torch.no_grad():
                parameter[2:].copy_(parameter.new_tensor(start)[:, None].expand(2, self.d_qk))

    def scales(self) -> Scales:
        return super().scales()._replace(sum=torch.ones_like, prefix=None)

    def queries_and_keys(self, y: Tensor, packing: Packing, state: Any) -> tuple[Sequence[Tensor], Any]:
        (before,), last = packing.earlier(y, 1, None if state is None else state.last[:, None])
        q, k = (y * now + before * then for now, then in zip(self.gamma[2:], self.beta[2:], strict=True))
        k = F.normalize(k, dim=-1, eps=1e-6) * self.d_qk**0.5
        if state is not None and last is not None:
            state = replace(state, last=renewed(state.last, last[:, 0], packing))
        return (*self.rotated(F.silu(y), packing, 2), q, k), state

    def attend(self, maps: Sequence[Tensor], v: Tensor, packing: Packing, state: Any) -> tuple[Tensor, Any]:
        q_quad, k_quad, q, k = maps
        if state is not None and packing.longest == 1 and packing.even and in_place(*maps, v, *state.tensors()):
            out, state = attend(q_quad, k_quad, None, k, v, packing, self.options(packing), state)
            with without_autocast(v):
                recalled = (q[:, None].to(state.summary.dtype) @ state.summary)[:, 0].to(out.dtype)
                return out + recalled, replace(state, **folded(state))
        with without_autocast(v):
            solved, gram = self.solve(q, k, packing, state)
            if state is None or gram is None:
                return attend(q_quad, k_quad, solved, k, v, packing, self.options(packing))
            state = self.summing(state, gram)
        out, state = attend(q_quad, k_quad, solved, k, v, packing, self.options(packing), state)
        return out, self.recalling(state)

    def attend_tiles(self, projected: tiles.Projected, packing: Packing, state: Any) -> tuple[Tensor, Any]:
        tokens, bias = projected.tokens, projected.projection_bias
        y = tokens[:, -self.d_qk :]
        (_, _, q, k), state = self.queries_and_keys(y if bias is None else y + bias[-self.d_qk :].to(y.dtype), packing, state)
        with without_autocast(tokens):
            solved, gram = self.solve(q, k, packing, state)
            if state is not None and gram is not None:
                state = self.summing(state, gram)
        out, state = super().attend_tiles(projected._replace(linear=(solved, k)), packing, state)
        return out, None if state is None else self.recalling(state)

    def summing(self, state: MemoryState, gram: Tensor) -> MemoryState:
        """The state with the sum of K^T V, which `attend` reads, in place of S, and the P after more tokens."""
        n = state.position - state.position % self.chunk_size
        return replace(state, summary=unsolved(state.summary, state.gram, n), gram=gram)

    def recalling(self, state: MemoryState) -> MemoryState:
        """The inverse of `summing`, with the P that the state has."""
        n = state.position - state.position % self.chunk_size
        with without_autocast(state.summary):
            return replace(state, summary=inverse(state.gram, n.clamp(min=1)) @ state.summary)

    def solve(self, q: Tensor, k: Tensor, packing: Packing, state: MemoryState | None) -> tuple[Tensor, Tensor | None]:
        """The queries q (n I + P)^-1, [N, s], and the P of streams after these tokens, [D, s, s]."""
        wide, compute, solved, gram = acc_dtype(q), matmul_dtype(q), [], None
        for grid, queries, keys in packing.by_grid(self.chunk_size, self.causal, q.to(compute), k.to(wide)):
            keys = grid.keys(keys, None if state is None else state.keys[:, 1])
            earlier = None if state is None else state.gram
            solved.append(grid.tokens(self.solve_grid(grid.queries(queries), keys, grid, earlier)))
            if state is not None:
                gram = state.gram + grid.sum_of(torch.where(grid.full[:, None, None], keys.mT @ keys, 0))
        return torch.cat(solved), gram

    def solve_grid(self, q: Tensor, k: Tensor, grid: Grid, earlier: Tensor | None) -> Tensor:
        """`solve` for the chunks of a grid, [G, Q, s] and [G, C, s]; `earlier`, [D, s, s], is the P of streams before."""
        out = None
        if grid.causal:
            p = grid.sum_before(k.mT @ k)
            p = p if earlier is None else p + grid.of_documents(earlier)
            out = q @ inverse(p, grid.begin.clamp(min=1)).to(q.dtype)
        if grid.prefix is not None:
            k = torch.where(grid.slots_before(grid.prefix)[..., None], k, 0)
            whole = inverse(grid.sum_of(k.mT @ k), grid.prefix.clamp(min=1)).to(q.dtype)
            both_ways = q @ grid.of_documents(whole)
            out = both_ways if out is None else torch.where(grid.in_prefix[..., None], both_ways, out)
        assert out is not None
        return out

    def init_own_state(self, batch_size: int) -> MemoryState:
        own = super().init_own_state(batch_size)
        gram = own.summary.new_zeros(batch_size, self.d_qk, self.d_qk)
        return MemoryState(own.position, own.summary, own.keys, own.values, own.keys.new_zeros(batch_size, self.d_qk), gram)


def folded(state: MemoryState) -> dict[str, Tensor]:
    """S and P of streams after the open chunks that their last token has filled, in the memory of the state."""
    summary, gram = writable(state.summary), writable(state.gram)
    size, position = state.values.shape[1], state.position
    full = position % size == 0
    if full.device.type == "cpu" and not is_traced():
        rows = full.nonzero()[:, 0] if full.any() else position[:0]
    else:  # no copy to the host: the same operations at each token
        rows = torch.arange(len(position), device=position.device)
    if len(rows):
        keys, values = state.keys[rows, 1].to(gram.dtype), state.values[rows].to(gram.dtype)
        after = gram[rows] + keys.mT @ keys
        sums = unsolved(summary[rows], gram[rows], position[rows] - size) + keys.mT @ values
        new = inverse(after, position[rows].clamp(min=1)) @ sums
        chosen = full[rows][:, None, None]
        summary.index_copy_(0, rows, torch.where(chosen, new, summary[rows]))
        gram.index_copy_(0, rows, torch.where(chosen, after, gram[rows]))
    return {"summary": summary, "gram": gram}


def unsolved(s: Tensor, p: Tensor, n: Tensor) -> Tensor:
    """The sum of K^T V over the n tokens before, [D], of which S [D, s, e] is (n I + P)^-1 times."""
    return n[:, None, None] * s + p @ s


def inverse(gram: Tensor, n: Tensor) -> Tensor:
    """(n I + gram)^-1, [..., s, s], of a symmetric gram without negative eigenvalues; n, [...], is at least 1."""
    matrix = gram + n[..., None, None] * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
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
