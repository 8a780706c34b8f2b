"""The gated unit, base of GAU and FLASH.

Shapes: B batch, T tokens, d model width, e = expansion * d value width, s query/key width.

    U = silu(x Wu + bu)  [B,T,e]      V = silu(x Wv + bv)  [B,T,e]      Z = silu(x Wz + bz)  [B,T,s]
    queries and keys = rope(Z * gamma + beta), one cheap (gamma, beta) for each
    out = input + (U * attention(..., V)) Wo + bo
"""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.layers.checks import check_even, check_positive
from lineartime.layers.dense import Dense, factory
from lineartime.layers.mixer import MixerOptions, State
from lineartime.layers.opened import Opened, OpenMixer, Part
from lineartime.ops.activations import ACTIVATIONS, NORMALIZATIONS, Activation, Normalization, check_choice
from lineartime.ops.backends import BACKENDS, Backend
from lineartime.ops.checks import check_rotary_width
from lineartime.ops.layout import Layout, LayoutPlan
from lineartime.ops.mixed_chunk.inputs import queries_and_keys
from lineartime.ops.precision import acc_dtype

InitialScores = Literal["small", "unit"]


class GatedOptions(MixerOptions, total=False):
    """What every gated unit takes: see `GatedUnit`."""

    d_qk: int
    expansion: int
    activation: Activation
    normalization: Normalization
    rope: bool
    rotary_width: int | None
    initial_scores: InitialScores


class GatedUnit(OpenMixer[State]):
    """Projections, gate and output of a gated attention layer (arXiv 2202.10447, section 2.2); a subclass attends.

    Args:
        d_qk: s, the width of queries and keys; even.
        expansion: values and gate are e = expansion * d wide.
        activation: of the scores: "relu2", "softmax", "softmax_plus" or "laplace".
        normalization: "count" divides by the number of visible keys; for others, see the subclass.
        rope: whether queries and keys are rotated by their position.
        rotary_width: how many of their s features are rotated, half of them in each half; None for all.
        initial_scores: "small" draws gamma from N(0, 0.02) and sets beta to 0, as published. "unit" sets gamma to 1 and beta to
            s^(-1/4) for the queries and keys of a quadratic part: q.k / sqrt(s) starts near 1, and RoPE lets it fall with
            distance. The published values suit normalization="paper"; with "count", attention that starts small learns late.
        **options: those of `Mixer`.
    """

    n_maps: ClassVar[int] = 2
    """Queries and keys that are made of Z, each by its own gamma and beta."""
    normalizations: ClassVar[tuple[str, ...]] = NORMALIZATIONS
    """Those that it has."""

    def __init__(
        self,
        d_model: int,
        *,
        d_qk: int = 128,
        expansion: int = 2,
        activation: Activation = "relu2",
        normalization: Normalization = "count",
        rope: bool = True,
        rotary_width: int | None = None,
        initial_scores: InitialScores = "small",
        **options: Unpack[MixerOptions],
    ) -> None:
        super().__init__(d_model, **options)
        check_choice("activation", activation, ACTIVATIONS)
        check_choice("normalization", normalization, self.normalizations)
        check_choice("initial_scores", initial_scores, get_args(InitialScores))
        check_positive(d_qk=d_qk, expansion=expansion)
        check_even("rotary positions turn pairs of features", d_qk=d_qk)
        check_rotary_width(rotary_width, d_qk)
        self.d_qk = d_qk
        self.expansion = expansion
        self.d_gate, self.d_value = self.gate_and_value_widths(expansion * d_model)
        self.activation: Activation = activation
        self.normalization: Normalization = normalization
        self.rope = rope
        self.rotary_width = rotary_width
        self.initial_scores: InitialScores = initial_scores
        self.to_gate_value_base = Dense(d_model, self.d_gate, self.d_value, d_qk, **factory(options))
        self.gamma = nn.Parameter(torch.empty(self.n_maps, d_qk, **factory(options)))
        self.beta = nn.Parameter(torch.empty(self.n_maps, d_qk, **factory(options)))
        self.init_own()
        self.to_output = Dense(self.d_value, d_model, **factory(options))

    def init_own(self) -> None:
        """Draw or set gamma and beta: see `initial_scores`."""
        nn.init.normal_(self.gamma, std=0.02)
        nn.init.zeros_(self.beta)
        if self.initial_scores == "unit":  # the maps of a quadratic part come first
            nn.init.ones_(self.gamma[:2])
            nn.init.constant_(self.beta[:2], self.d_qk**-0.25)

    def plan(self) -> LayoutPlan:
        """Rotations of queries and keys."""
        width = self.d_qk if self.rope else None
        return super().plan()._replace(rotary_width=width, rotated=self.rotary_width, dtype=acc_dtype(self.gamma))

    def gate_and_value_widths(self, width: int) -> tuple[int, int]:
        """How wide U and V are, given e = expansion * d."""
        return width, width

    @abstractmethod
    def attend_and_gate(self, projected: Tensor, layout: Layout) -> Tensor:
        """From the projected tokens [B, T, 2 e + s] to what the output map reads, [B, T, e], for whole sequences."""

    @abstractmethod
    def attend_next(self, maps: Tensor, v: Tensor, state: State, layout: Layout) -> tuple[Tensor, State]:
        """Queries and keys [B, maps, N, s] and values [B, N, e] of more tokens -> [B, N, e], and the state after them."""

    @abstractmethod
    def attend_part(self, part: Part, maps: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """One part of its attention over whole sequences: [B, maps, T, s] and values [B, T, w] of any width -> [B, T, w]."""

    def attend_both_ways(self, maps: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """`attend_next` for prefixes, [B, maps, T, s] and [B, T, e] -> [B, T, e], in a layer that `reads_prefix`."""
        raise NotImplementedError

    def mix(self, normed: Tensor, layout: Layout) -> Tensor:
        """Whole sequences of normed tokens, [B, T, d] -> [B, T, d]."""
        out: Tensor = self.to_output(self.attend_and_gate(self.to_gate_value_base(normed), layout))
        return out

    def open_normed(self, normed: Tensor, layout: Layout) -> Opened:
        """The attention of `mix`, taken apart."""
        gate, v, maps = self.split(self.to_gate_value_base(normed), layout)

        def read(part: Part) -> Callable[[Tensor], Tensor]:
            return lambda values: self.attend_part(part, maps, values, layout)

        return Opened(v, 1, {part: read(part) for part in self.parts}, lambda read: self.to_output(self.gate(gate, read)))

    def mix_next(self, normed: Tensor, state: State, layout: Layout) -> tuple[Tensor, State]:
        """N more normed tokens of streams, [B, N, d] -> [B, N, d], and the state after them."""
        gate, v, maps = self.split(self.to_gate_value_base(normed), layout)
        attended, state = self.attend_next(maps, v, state, layout)
        attended = layout.with_prefix(attended, partial(self.attend_both_ways, maps, v))
        return self.to_output(self.gate(gate, attended)), state

    def split(self, projected: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """Projected tokens -> the gate U and the values V, [B, T, e], and the queries and keys, [B, maps, T, s]."""
        gate, value, base = F.silu(projected).split([self.d_gate, self.d_value, self.d_qk], dim=-1)
        return gate, value, self.queries_and_keys(base, layout.rotations)

    def queries_and_keys(self, base: Tensor, rotations: Tensor | None) -> Tensor:
        """Z [B, T, s] -> rope(Z * gamma + beta), [B, maps, T, s]."""
        return queries_and_keys(base, self.gamma, self.beta, rotations)

    def gate(self, gate: Tensor, attended: Tensor) -> Tensor:
        """U * attention's output."""
        return gate * attended


class HasBackends(nn.Module):
    """A layer whose attention has several implementations."""

    backend: Backend = "auto"
    """Which of them it uses: see `set_backend`."""

    def extra_repr(self) -> str:
        """The backend, which a layer shows behind its options."""
        return f"backend={self.backend!r}"


def set_backend(module: nn.Module, backend: Backend) -> None:
    """Have all GAU and FLASH layers of a model, or a layer itself, compute their attention by one backend.

    Streaming, and the variants of FLASH in `lineartime.baselines`, have one implementation each, and do not change.

    Args:
        module: a layer, or anything that contains layers.
        backend: "torch", "tiled" (for processors), "triton" (kernels for GPUs), "oracle" (the definition, slow), or "auto", the
            fastest that can run.

    Raises:
        ValueError: for an unknown backend. One that is known but cannot run says so when the layer is used.
    """
    check_choice("backend", backend, BACKENDS)
    for layer in module.modules():
        if isinstance(layer, HasBackends):
            layer.backend = backend
