"""The gated unit, the base of GAU and FLASH.

Shapes: B batch, T tokens, d model width, e = expansion * d value width, s query/key width.

    U = silu(x Wu + bu)  [B,T,e]      V = silu(x Wv + bv)  [B,T,e]      Z = silu(x Wz + bz)  [B,T,s]
    queries and keys = rope(Z * gamma + beta), one cheap (gamma, beta) for each
    out = input + (U * attention(..., V)) Wo + bo
"""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.errors import check_choice
from lineartime.layers.checks import check_even
from lineartime.layers.dense import Dense, factory
from lineartime.layers.mixer import MixerOptions, State
from lineartime.layers.opened import Opened, OpenMixer, Part
from lineartime.ops.activations import ACTIVATIONS, NORMALIZATIONS, Activation, Normalization
from lineartime.ops.backends import BACKENDS, Backend
from lineartime.ops.checks import check_positive, check_rotary_width
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
        d_qk: s, the width of queries and keys, which must be even.
        expansion: the values and the gate have width e = expansion * d.
        activation: the activation of the scores: "relu2", "softmax", "softmax_plus" or "laplace".
        normalization: "count" divides by the number of visible keys; for other values, see the subclass.
        rope: whether to apply rotary positions to queries and keys.
        rotary_width: the number of their s features that are rotated, half of them in each half of s; None for all.
        initial_scores: "small" draws gamma from N(0, 0.02) and sets beta to 0, as published. "unit" sets gamma to 1 and beta to
            s^(-1/4) for the queries and keys of a quadratic part. q.k / sqrt(s) then starts near 1 and, with RoPE, falls with
            distance. The published values suit normalization="paper"; with "count", attention that starts small learns late.
        **options: the options of `Mixer`.
    """

    n_maps: ClassVar[int] = 2
    """The number of queries and keys that are made from Z, each with its own gamma and beta."""
    n_heads: int = 1
    """The number of heads that divide the width of queries, keys and values among them."""
    normalizations: ClassVar[tuple[str, ...]] = NORMALIZATIONS
    """The values of `normalization` that it supports."""

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
        check_even("queries and keys consist of pairs of features", d_qk=d_qk)
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

    @property
    def head_dim(self) -> int:
        """The width of the queries and keys whose products are scores."""
        return self.d_qk // self.n_heads

    def init_own(self) -> None:
        """Initialise gamma and beta: see `initial_scores`."""
        nn.init.normal_(self.gamma, std=0.02)
        nn.init.zeros_(self.beta)
        if self.initial_scores == "unit":  # the queries and keys of a quadratic part come first
            nn.init.ones_(self.gamma[:2])
            nn.init.constant_(self.beta[:2], self.head_dim**-0.25)

    def plan(self) -> LayoutPlan:
        """Request rotations of queries and keys."""
        width = self.d_qk if self.rope else None
        return super().plan()._replace(rotary_width=width, rotary_features=self.rotary_width, dtype=acc_dtype(self.gamma))

    def gate_and_value_widths(self, width: int) -> tuple[int, int]:
        """The widths of U and V, given e = expansion * d."""
        return width, width

    @abstractmethod
    def attend(self, maps: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Attend over whole sequences: queries and keys [B, maps, T, s], values [B, T, e] -> [B, T, e]."""

    @abstractmethod
    def attend_next(self, maps: Tensor, v: Tensor, state: State, layout: Layout) -> tuple[Tensor, State]:
        """Do the same for N more tokens of streams, [B, maps, N, s] and [B, N, e], and return the new state."""

    @abstractmethod
    def attend_part(self, part: Part, maps: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Compute one part of `attend`; values may have any width: [B, maps, T, s] and [B, T, w] -> [B, T, w]."""

    def attend_bidirectional(self, maps: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Bidirectional attention within prefixes, [B, maps, T, s] and [B, T, e] -> [B, T, e], if the layer `reads_prefix`."""
        raise NotImplementedError

    def attend_step(self, maps: Tensor, v: Tensor, streams: Any, layout: Layout) -> Tensor:
        """Attend from one token of every stream, [B, maps, 1, s] and [B, 1, e] -> [B, 1, e], if the layer steps in place."""
        raise NotImplementedError

    def mix(self, normed: Tensor, layout: Layout) -> Tensor:
        """Compute whole sequences of normed tokens: [B, T, d] -> [B, T, d]."""
        gate, v, maps = self.split(self.to_gate_value_base(normed), layout)
        out: Tensor = self.to_output(self.apply_gate(gate, self.attend(maps, v, layout)))
        return out

    def open_normed(self, normed: Tensor, layout: Layout) -> Opened:
        """The attention of `mix`, split into its parts."""
        gate, v, maps = self.split(self.to_gate_value_base(normed), layout)

        def read(part: Part) -> Callable[[Tensor], Tensor]:
            return lambda values: self.attend_part(part, maps, values, layout)

        return Opened(
            v, self.n_heads, {part: read(part) for part in self.parts}, lambda read: self.to_output(self.apply_gate(gate, read))
        )

    def mix_next(self, normed: Tensor, state: State, layout: Layout) -> tuple[Tensor, State]:
        """Compute N more normed tokens of streams: [B, N, d] -> [B, N, d] and the new state."""
        gate, v, maps = self.split(self.to_gate_value_base(normed), layout)
        attended, state = self.attend_next(maps, v, state, layout)
        attended = layout.with_prefix(attended, partial(self.attend_bidirectional, maps, v))
        return self.to_output(self.apply_gate(gate, attended)), state

    def mix_step(self, normed: Tensor, streams: Any, layout: Layout) -> Tensor:
        """Compute one more normed token of every stream, [B, 1, d] -> [B, 1, d]; updates `streams` in place."""
        gate, v, maps = self.split(self.to_gate_value_base(normed), layout)
        out: Tensor = self.to_output(self.apply_gate(gate, self.attend_step(maps, v, streams, layout)))
        return out

    def split(self, projected: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """Split projected tokens into the gate U and the values V, [B, T, e], and the queries and keys, [B, maps, T, s]."""
        gate, value, base = F.silu(projected).split([self.d_gate, self.d_value, self.d_qk], dim=-1)
        return gate, value, self.queries_and_keys(base, layout.rotations)

    def queries_and_keys(self, base: Tensor, rotations: Tensor | None) -> Tensor:
        """Z [B, T, s] -> rope(Z * gamma + beta), [B, maps, T, s]."""
        return queries_and_keys(base, self.gamma, self.beta, rotations)

    def apply_gate(self, gate: Tensor, attended: Tensor) -> Tensor:
        """Multiply the output of the attention by the gate U."""
        return gate * attended


class HasBackends(nn.Module):
    """A layer whose attention has several implementations."""

    backend: Backend = "auto"
    """The one that it uses: see `set_backend`."""

    def extra_repr(self) -> str:
        """The backend, printed after the options of a layer."""
        return f"backend={self.backend!r}"


def set_backend(module: nn.Module, backend: Backend) -> None:
    """Set the backend that computes the attention of all GAU, FLASH and mhsa-relu2 layers of a model, or of a single layer.

    Other layers stay as they are; the variants of FLASH in `lineartime.baselines` have only one implementation. In streams of
    FLASH, "triton", "tiled" and "auto" apply to whole chunks, if they can run there and no gradient is needed; otherwise,
    PyTorch's operations read them, without an error. Single steps and streams of GAU do not follow the backend: steps on a CPU
    are functions in C++, unless LINEARTIME_NATIVE=0 is set in the environment.

    Args:
        module: a layer, or a module that contains layers.
        backend: "torch", "tiled" (for CPUs), "triton" (kernels for GPUs), "oracle" (the definition, slow), or "auto", the
            fastest that can run.

    Raises:
        ArgumentError: if the backend is unknown. A known backend that cannot run raises an error when the layer reads
            whole sequences.
    """
    check_choice("backend", backend, BACKENDS)
    for layer in module.modules():
        if isinstance(layer, HasBackends):
            layer.backend = backend
