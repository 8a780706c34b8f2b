"""The base of linear models whose state a recurrence updates: projections, short convolution, streams, norm, gate, output.

Shapes: N tokens, D documents or streams, H heads, s key width, e value width of a head, f features, d model width; R rows (one
for each document), L tokens of the longest row.
The definition is in `lineartime.baselines.recurrence`.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.baselines.recurrence import Tokens, recurrence, recurrence_step
from lineartime.layers.dense import Dense, FactoryOptions, factory
from lineartime.layers.mixer import Mixer, MixerOptions
from lineartime.layers.residual import RMSNorm
from lineartime.ops.checks import check_n_heads
from lineartime.ops.modes import acc_dtype, matmul_dtype, output_dtype, without_autocast
from lineartime.ops.packing import Packing
from lineartime.ops.state import State, in_place, writable

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
class RecurrentState(State):
    """What causal streams remember, of constant size.

    Attributes:
        position: int64 [D], the number of tokens that each stream has read.
        summary: [D, H, s, e], the state of the recurrence, in float32 or better.
        recent: [D, n, f], what is kept of the last n tokens, the last one at the end.
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
