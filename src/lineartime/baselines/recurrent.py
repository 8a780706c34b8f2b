"""The base of linear models whose state a recurrence updates: projections, short convolution, streams, norm, gate, output.

Shapes: B batch or streams, T tokens, N new tokens of a stream, H heads, s key width, e value width of a head, f features.
The definition is in `lineartime.ops.recurrence`.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.layers.dense import Dense, FactoryOptions, factory
from lineartime.layers.mixer import Mixer, MixerOptions
from lineartime.layers.residual import RMSNorm
from lineartime.ops.batch import Batch
from lineartime.ops.checks import check_n_heads
from lineartime.ops.modes import acc_dtype, matmul_dtype, output_dtype, without_autocast
from lineartime.ops.recurrence import Tokens, recurrence, recurrence_step
from lineartime.ops.state import State, in_place, writable

CONVOLVED = 4
"""The tokens that a short convolution reads, as published."""


def with_earlier(x: Tensor, count: int, positions: Tensor | None) -> list[Tensor]:
    """The tokens [B, T, f], and those 1, 2, ..., `count` before each, with zeros before the first token of a document."""
    earlier = [x, *(F.pad(x, (0, 0, by, 0))[:, : x.shape[1]] for by in range(1, count + 1))]
    if positions is not None:
        earlier = [each.masked_fill((positions < by)[..., None], 0) if by else each for by, each in enumerate(earlier)]
    return earlier


class ShortConvolution(nn.Module):
    """silu of a causal convolution of each feature over a few tokens: tokens as of `with_earlier` -> [B, T, f]."""

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
    """The time step of each head and token, and the logarithm of its decay: [B, T, d] -> [B, T, H, 1] each.

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
class RecurrentState(State):
    """What causal streams remember, of constant size.

    Attributes:
        position: int64 [B], the number of tokens that each stream has read.
        summary: [B, H, s, e], the state of the recurrence, in float32 or better.
        recent: [B, n, f], what is kept of the last n tokens, the last one at the end.
    """

    position: Tensor
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
        short_convolution: whether the maps pass a short convolution.
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
        """What later tokens read of a token beside the state, [B, T, d] -> [B, T, f]."""
        assert self.to_maps is not None
        maps: Tensor = self.to_maps(normed)
        return maps

    def read(self, earlier: Sequence[Tensor]) -> Sequence[Tensor]:
        """The maps of each token, [B, T, ...], of what `remember` returned for it and for the tokens before it."""
        if self.convolution is not None:
            maps = self.convolution(earlier)
        else:
            maps = F.silu(earlier[0]) if self.activated else earlier[0]
        parts: Sequence[Tensor] = maps.split(self.map_widths, -1)
        return parts

    def heads(self, x: Tensor) -> Tensor:
        """[B, T, H f] -> [B, T, H, f]."""
        split: Tensor = x.unflatten(-1, (self.n_heads, -1))
        return split

    @abstractmethod
    def tokens(self, normed: Tensor, maps: Sequence[Tensor], batch: Batch) -> Tokens:
        """What the recurrence reads, [B, T, H, ...] each."""

    def combine(self, normed: Tensor, maps: Sequence[Tensor], x: Tokens, out: Tensor) -> Tensor:
        """What is added to the tokens, [B, T, d], given the recurrence's output [B, T, H, e]: norm, gate, projection."""
        out = torch.flatten(self.head_norm(out), 2)
        if self.to_gate is not None:
            out = out * F.silu(self.to_gate(normed))
        added: Tensor = self.to_output(out)
        return added

    def _maps(self, normed: Tensor, batch: Batch) -> tuple[Sequence[Tensor], Tokens]:
        positions = None if batch.document is None else batch.positions
        maps = self.read(with_earlier(self.remember(normed), self.recent_shape[0], positions))
        return maps, self.tokens(normed, maps, batch)

    def mix(self, normed: Tensor, batch: Batch) -> Tensor:
        maps, x = self._maps(normed, batch)
        heads = [each.shape[2] for each in x if each is not None]

        def attend(*of_rows: Tensor | None) -> Tensor:
            parts = zip(of_rows, heads, strict=False)  # the last one says which tokens are real: others are zeros
            out, _ = self.recur(Tokens(*(each.unflatten(-1, (count, -1)) for each, count in parts if each is not None)), None)
            return out.flatten(2)

        out = batch.by_row(attend, *(each.flatten(2) for each in x if each is not None))
        return self.combine(normed, maps, x, self.heads(out))

    def recur(self, x: Tokens, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The recurrence over rows [B, T, H, ...] -> [B, T, H, e], and the state [B, H, s, e]."""
        inputs = x.map(lambda each: each.transpose(1, 2))
        values = inputs.v
        with without_autocast(values):
            if state is None:
                shape = values.shape[0], self.n_heads, inputs.k.shape[-1], values.shape[-1]
                state = values.new_zeros(shape, dtype=acc_dtype(values))
            if values.shape[2] == 1 and in_place(*(each for each in inputs if each is not None), state):
                out = recurrence_step(inputs, state)
            else:
                out, state = recurrence(inputs, state, chunk_size=self.chunk)
            return out.transpose(1, 2).to(output_dtype(x.q, matmul_dtype(x.q))), state

    def mix_next(self, normed: Tensor, state: RecurrentState, batch: Batch) -> tuple[Tensor, RecurrentState]:
        (kept, _), new = self.recent_shape, normed.shape[1]
        known = torch.cat([state.recent.to(normed.dtype), self.remember(normed)], 1)
        maps = self.read([known[:, kept - by : kept - by + new] for by in range(kept + 1)])
        x = self.tokens(normed, maps, batch)
        if batch.counts is not None:
            real = (torch.arange(new, device=normed.device) < batch.counts[:, None])[:, :, None, None]
            x = x._replace(**{name: each * real for name, each in x._asdict().items() if name in "kga" and each is not None})
        stepping = new == 1 and in_place(known, state.summary)
        position, recent, summary = (
            writable(each) if stepping else each for each in (state.position, state.recent, state.summary)
        )
        out, summary = self.recur(x, summary)
        last = known[:, new:] if batch.counts is None else _last(known, batch.counts, kept)
        recent = recent.copy_(last) if stepping else last.to(recent.dtype)
        position = position.copy_(batch.after(position)) if stepping else batch.after(position)
        return self.combine(normed, maps, x, out), RecurrentState(position, summary, recent)

    def init_own_state(self, batch_size: int) -> RecurrentState:
        like, (keys, values) = self.any_parameter, self.widths
        shape = batch_size, self.n_heads, keys // self.n_heads, values // self.n_heads
        summary = torch.zeros(shape, dtype=acc_dtype(like), device=like.device)
        recent = torch.zeros(batch_size, *self.recent_shape, dtype=like.dtype, device=like.device)
        return RecurrentState(self.first_position(batch_size), summary, recent)


def _last(known: Tensor, counts: Tensor, size: int) -> Tensor:
    """The last `size` of the real tokens [B, n + N, f], of which n were before `counts` new ones: [B, size, f]."""
    places = counts[:, None] + torch.arange(size, device=known.device)
    return known.gather(1, places[..., None].expand(-1, -1, known.shape[-1]))
