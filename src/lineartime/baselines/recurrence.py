"""Linear recurrences with decay and a delta rule, and the base of the linear models whose state they update.

    S[t] = diag(exp(g[t])) S[t - 1] + a[t] b[t]^T S[t - 1] + k[t] v[t]^T        S[-1] = 0
    o[t] = S[t]^T q[t]

g <= 0 are the logarithms of decays, one for each feature of a key or one for all of them. a b^T is what a delta rule moves;
a = b = 0 leaves decay alone. With the tokens of a chunk, and the sums G of g from its start to each of them,

    (I - L) U = B S + L' V        L[i, j] = b[i]^T diag(exp(G[i] - g[i] - G[j])) a[j] for j < i;  L' the same of k
    O = Q S + M V + M' U          M[i, j] = q[i]^T diag(exp(G[i] - G[j])) k[j] for j <= i;        M' the same of a

with rows b[i] exp(G[i] - g[i]) of B and q[i] exp(G[i]) of Q. The rows of U are b[i]^T S[i - 1]. This is the WY form, solved for
the S at the start of a chunk, so that only these states are computed one after the other.

Shapes: ... batch and heads, T tokens, N tokens of all documents, D documents or streams, R rows (one for each document), L
tokens of the longest row, H heads, C chunk size, s key width, e value width of a head, f features, d model width.
Sources: "Parallelizing Linear Transformers with the Delta Rule" (arXiv 2406.06484), for the delta rule; "Gated Linear Attention
Transformers" (arXiv 2312.06635), for decays.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.baselines.blocks import StreamState
from lineartime.layers.dense import Dense, FactoryOptions, factory
from lineartime.layers.mixer import Mixer, MixerOptions
from lineartime.layers.residual import RMSNorm
from lineartime.ops.checks import check_n_heads
from lineartime.ops.modes import acc_dtype, matmul_dtype, output_dtype, without_autocast
from lineartime.ops.packing import Packing
from lineartime.ops.state import in_place, writable

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


def recurrence(x: Tokens, state: Tensor, *, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Continue a state by any number of tokens: [..., s, e] -> the outputs [..., T, e], and the state after them.

    If g has a value for each feature, -g may sum up to `LONGEST_DECAY` within a chunk.
    """
    length = x.v.shape[-2]
    size = max(1, min(chunk_size, length))  # a longer chunk would only be padded
    spare = -length % size
    q, k, v, g, a, b = x.map(lambda each: F.pad(each.to(acc_dtype(each)), (0, 0, 0, spare)).unflatten(-2, (-1, size)))
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
    q, k, v, g, a, b = x.map(lambda each: each.to(acc_dtype(each)))
    moved = k.mT @ v if a is None or b is None else a.mT @ (b @ state) + k.mT @ v
    state *= g.mT.exp()
    state += moved
    return q @ state


CONVOLVED = 4
"""The tokens that a short convolution reads, as published."""


class ShortConvolution(nn.Module):
    """silu of a causal convolution of each feature over a few tokens: tokens, and those 1, 2, ... before -> [N, f]."""

    def __init__(self, width: int, **factory: Unpack[FactoryOptions]) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.empty(CONVOLVED, width, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as `nn.Conv1d` does."""
        nn.init.uniform_(self.taps, -(CONVOLVED**-0.5), CONVOLVED**-0.5)

    def forward(self, earlier: Sequence[Tensor]) -> Tensor:
        out = earlier[0] * self.taps[0]
        for each, weight in zip(earlier[1:], self.taps[1:], strict=True):
            out = torch.addcmul(out, each, weight)
        return F.silu(out)


class SoftplusDecay(nn.Module):
    """The time step of each head and token, and the logarithm of its decay: [N, d] -> [N, H, 1] each.

        step = softplus(x W + b)        log_decay = -step A

    Source: "Transformers are SSMs" (arXiv 2405.21060), Mamba-2. A begins from 1 to 16 and the step from 0.001 to 0.1, as there,
    but both are spread evenly over the heads, not drawn.
    """

    maps = ("weight",)

    def __init__(self, d_model: int, n_heads: int, **factory: Unpack[FactoryOptions]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads, d_model, **factory))
        self.bias, self.log_a = (nn.Parameter(torch.empty(n_heads, **factory)) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Spread A evenly, and the steps evenly on a logarithmic scale."""
        nn.init.normal_(self.weight, std=0.02)
        n_heads = len(self.log_a)
        places = (torch.arange(n_heads, dtype=torch.float64) + 0.5) / n_heads
        with torch.no_grad():
            self.log_a.copy_((1 + 15 * places).log())
            self.bias.copy_((1e-3 * 100**places).expm1().log())  # the inverse of softplus

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = acc_dtype(x)
        step = F.softplus(F.linear(x, self.weight, self.bias).to(wide))
        return step[..., None], (-step * self.log_a.to(wide).exp())[..., None]


@dataclass(eq=False)
class RecurrentState(StreamState):
    """What causal streams remember, of constant size.

    Attributes:
        summary: [D, H, s, e], the state of the recurrence, in float32 or better.
        recent: [D, n, f], what is kept of the last n tokens, the last one at the end.
    """

    summary: Tensor
    recent: Tensor


class RecurrentMixer(Mixer):
    """A linear recurrence between projections: [B, T, d] -> [B, T, d]. It streams with a constant state.

    Args:
        n_heads: H, which must divide both widths.
        widths: the widths of all keys and of all values.
        maps: the widths of what a linear map makes of each token first, before a convolution: queries, keys and values by
            default; empty for none.
        gated: whether a gate multiplies the output.
        short_convolution: whether the maps (queries, keys and values) pass a short convolution.
        **options: the options of `Mixer`; causal is True by default, and False raises an error.
    """

    why_only_causal = "its state holds the tokens before"
    any_positions = True
    constant_state = True
    chunk: ClassVar[int] = 64
    """The number of tokens between two states that are stored."""
    activated: ClassVar[bool] = True
    """Whether queries, keys and values pass silu also without a short convolution."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        widths: tuple[int, int],
        maps: tuple[int, ...] | None = None,
        gated: bool = True,
        short_convolution: bool = True,
        **options: Unpack[MixerOptions],
    ) -> None:
        options.setdefault("causal", True)
        super().__init__(d_model, **options)
        check_n_heads(n_heads, {"the width of keys": widths[0], "the width of values": widths[1]}, in_pairs=False)
        maps, made = (widths[0], *widths) if maps is None else maps, factory(options)
        self.n_heads, self.widths, self.map_widths, self.short_convolution = n_heads, widths, maps, short_convolution
        self.to_maps = Dense(d_model, *maps, **made) if maps else None
        self.convolution = ShortConvolution(sum(maps), **made) if short_convolution else None
        self.to_gate = Dense(d_model, widths[1], **made) if gated else None
        self.head_norm: nn.Module = RMSNorm(widths[1] // n_heads, **made)
        self.to_output = Dense(widths[1], d_model, **made)

    @property
    def recent_shape(self) -> tuple[int, int]:
        """The number of tokens before a token that it reads beside the state, and the width of what it reads of each."""
        return (CONVOLVED - 1 if self.short_convolution else 0), sum(self.map_widths)

    def remember(self, normed: Tensor) -> Tensor:
        """What later tokens read of a token beside the state, [N, d] -> [N, f]."""
        assert self.to_maps is not None
        maps: Tensor = self.to_maps(normed)
        return maps

    def project(self, earlier: Sequence[Tensor]) -> Sequence[Tensor]:
        """The maps of each token, [N, ...], of what `remember` returned for it and for the tokens before it."""
        if self.convolution is not None:
            maps = self.convolution(earlier)
        else:
            maps = F.silu(earlier[0]) if self.activated else earlier[0]
        parts: Sequence[Tensor] = maps.split(self.map_widths, -1)
        return parts

    def heads(self, x: Tensor) -> Tensor:
        """[N, H f] -> [N, H, f]."""
        split: Tensor = x.unflatten(-1, (self.n_heads, -1))
        return split

    @abstractmethod
    def tokens(self, normed: Tensor, maps: Sequence[Tensor], packing: Packing) -> Tokens:
        """What the recurrence reads, [N, H, ...] each."""

    def combine(self, normed: Tensor, maps: Sequence[Tensor], x: Tokens, out: Tensor) -> Tensor:
        """What is added to the tokens, [N, d], given the recurrence's output [N, H, e]: norm, gate, projection."""
        out = torch.flatten(self.head_norm(out), 1)
        if self.to_gate is not None:
            out = out * F.silu(self.to_gate(normed))
        added: Tensor = self.to_output(out)
        return added

    def read(self, x: Tensor, packing: Packing, state: RecurrentState | None = None) -> tuple[Tensor, RecurrentState | None]:
        own, (kept, _) = self.remember(x), self.recent_shape
        summary, recent = (None, None) if state is None else (state.summary, state.recent)
        before, recent = packing.earlier(own, kept, recent) if kept else ([], recent)
        maps = self.project([own, *before])
        inputs, outputs = self.tokens(x, maps, packing), []
        for grid, *parts in packing.by_grid(None, True, *inputs):  # zeros where no token stands change no state
            out, after = self.recur(Tokens(*parts).map(grid.queries), summary)
            outputs.append(grid.tokens(out))
        added = self.combine(x, maps, inputs, torch.cat(outputs) if len(outputs) > 1 else outputs[0])
        if state is None or recent is None:
            return added, None
        if packing.longest == 1 and in_place(own, state.summary):
            position = writable(state.position)
            position += packing.new
            return added, RecurrentState(position, after, writable(state.recent).copy_(recent))
        return added, RecurrentState(state.position + packing.new, after, recent)

    def recur(self, x: Tokens, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The recurrence over rows, [R, L, H, ...] -> [R, L, H, e], and the state [R, H, s, e] after them."""
        inputs = x.map(lambda each: each.transpose(1, 2))
        values = inputs.v
        with without_autocast(values):
            if state is None:
                shape = values.shape[0], self.n_heads, inputs.k.shape[-1], values.shape[-1]
                state = values.new_zeros(shape, dtype=acc_dtype(values))
            if values.shape[2] == 1 and in_place(*(each for each in inputs if each is not None), state):
                state = writable(state)
                out = recurrence_step(inputs, state)
            else:
                out, state = recurrence(inputs, state, chunk_size=self.chunk)
            return out.transpose(1, 2).to(output_dtype(x.q, matmul_dtype(x.q))), state

    def init_own_state(self, batch_size: int) -> RecurrentState:
        like, (keys, values) = self.any_parameter, self.widths
        shape = batch_size, self.n_heads, keys // self.n_heads, values // self.n_heads
        summary = torch.zeros(shape, dtype=acc_dtype(like), device=like.device)
        recent = torch.zeros(batch_size, *self.recent_shape, dtype=like.dtype, device=like.device)
        return RecurrentState(self.first_position(batch_size), summary, recent)
