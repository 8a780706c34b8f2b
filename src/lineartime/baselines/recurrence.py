"""Linear recurrences with decay and a delta rule: the state of today's linear models.

    S[t] = diag(exp(g[t])) S[t - 1] + a[t] b[t]^T S[t - 1] + k[t] v[t]^T        S[-1] = 0
    o[t] = S[t]^T q[t]

g <= 0 are the logarithms of decays, one for each feature of a key or one for all of them. a b^T is what a delta rule moves;
a = b = 0 leaves decay alone. With the tokens of a chunk, and the sums G of g from its start to each of them,

    (I - L) U = B S + L' V        L[i, j] = b[i]^T diag(exp(G[i] - g[i] - G[j])) a[j] for j < i;  L' the same of k
    O = Q S + M V + M' U          M[i, j] = q[i]^T diag(exp(G[i] - G[j])) k[j] for j <= i;        M' the same of a

with rows b[i] exp(G[i] - g[i]) of B and q[i] exp(G[i]) of Q. The rows of U are b[i]^T S[i - 1]. This is the WY form, solved for
the S at the start of a chunk, so that only these states are computed one after the other.

Shapes: ... batch and heads, T tokens, N new tokens of a stream, G chunks, C chunk size, s key width, e value width.
Sources: "Parallelizing Linear Transformers with the Delta Rule" (arXiv 2406.06484), for the delta rule; "Gated Linear Attention
Transformers" (arXiv 2312.06635), for decays.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.modes import acc_dtype

LONGEST_DECAY = 80.0
"""The maximum sum of -g over a chunk of features that decay each on their own: exp(80) is within the range of float32."""


class Tokens(NamedTuple):
    """What a recurrence reads of each token.

    Attributes:
        q, k: [..., T, s]. Heads may share them: one for all.
        v: [..., T, e].
        g: [..., T, 1] or [..., T, s].
        a, b: [..., T, s]; None without a delta rule.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    a: Tensor | None = None
    b: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> "Tokens":
        """A function of each of them."""
        rule = None if self.a is None or self.b is None else (function(self.a), function(self.b))
        return Tokens(function(self.q), function(self.k), function(self.v), function(self.g), *(rule or ()))

    def accumulated(self) -> "Tokens":
        """The same in float32 or better."""
        return self.map(lambda each: each.to(acc_dtype(each)))


def recurrence_oracle(x: Tokens) -> Tensor:
    """The definition for one head of one document, one token at a time: [T, ...] -> [T, e]."""
    q, k, v, g, a, b = x
    s, rows = v.new_zeros(k.shape[1], v.shape[1]), []
    for t in range(len(v)):
        moved = 0 if a is None or b is None else torch.outer(a[t], b[t] @ s)
        s = g[t].exp()[:, None] * s + moved + torch.outer(k[t], v[t])
        rows.append(q[t] @ s)
    return torch.stack(rows)


def recurrence(x: Tokens, state: Tensor, *, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Continue a state by any number of tokens: [..., s, e] -> the outputs [..., T, e], and the state after them.

    If g has a value for each feature, -g may sum up to `LONGEST_DECAY` within a chunk.
    """
    length = x.v.shape[-2]
    size = max(1, min(chunk_size, length))  # a longer chunk would only be padded
    spare = -length % size
    q, k, v, g, a, b = x.accumulated().map(lambda each: F.pad(each, (0, 0, 0, spare)).unflatten(-2, (-1, size)))
    through = g.cumsum(-2)
    whole, reads = through[..., -1:, :], q * through.exp()
    rows, columns, before = [(q, through, reads)], [k], through - g
    if a is not None and b is not None:
        rows, columns = [*rows, (b, before, b * before.exp())], [k, a]
    of_stored, *of_others = products(rows, columns, through)
    within = of_stored.tril() @ v
    added = (k * (whole - through).exp()).mT @ v
    moved = None
    if a is not None and b is not None:
        of_moved, stored, once_more = of_others
        right = torch.cat([rows[1][2].expand(*v.shape[:-1], -1), stored.tril(-1) @ v], -1)
        unit = torch.eye(size, dtype=v.dtype, device=v.device)
        solved = torch.linalg.solve_triangular(unit - once_more.tril(-1), right, upper=False)
        of_state, own = solved.split([q.shape[-1], v.shape[-1]], -1)
        of_moved = of_moved.tril()
        reads, within = reads + of_moved @ of_state, within + of_moved @ own
        to_end = (a * (whole - through).exp()).mT
        added, moved = added + to_end @ own, to_end @ of_state
    starts = []
    factors = whole.mT.exp().unbind(-3)
    for chunk, (factor, more) in enumerate(zip(factors, added.unbind(-3), strict=True)):
        starts.append(state)
        kept = more if moved is None else more + moved[..., chunk, :, :] @ state
        state = kept + factor * state
    out = within + reads @ torch.stack(starts, -3) if starts else within
    return out.flatten(-3, -2)[..., :length, :], state


def products(rows: Sequence[tuple[Tensor, Tensor, Tensor]], columns: Sequence[Tensor], of_y: Tensor) -> list[Tensor]:
    """x[i]^T diag(exp(of_x[i] - of_y[j])) y[j], where that decays; elsewhere any number: [..., C, s] each -> [..., C, C].

    For each x, of_x and x exp(of_x) of the rows and each y of the columns. Decays of features are taken relative to the start
    of the chunk, so that no row depends on later tokens.
    """
    if of_y.shape[-1] == 1:
        return [(x @ y.mT) * (of_x - of_y.mT).clamp(max=0).exp() for x, of_x, _ in rows for y in columns]
    middle = math.exp(LONGEST_DECAY / 2)  # both factors, and their gradients, are far from the smallest and the largest numbers
    to_middle, lefts = of_y.exp() * middle, [decayed * middle for _, _, decayed in rows]
    rights = [(y / to_middle).mT for y in columns]
    return [left @ right for left in lefts for right in rights]


def recurrence_step(x: Tokens, state: Tensor) -> Tensor:
    """One token of each stream, [..., 1, s] -> [..., 1, e]; the state [..., s, e] is updated in place."""
    q, k, v, g, a, b = x.accumulated()
    moved = k.mT @ v if a is None or b is None else a.mT @ (b @ state) + k.mT @ v
    state *= g.mT.exp()
    state += moved
    return q @ state
