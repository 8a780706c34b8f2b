"""The gated unit, the base of GAU and FLASH.

Shapes: B batch, T tokens, d model width, e = expansion * d value width, s query/key width.

    U = silu(x Wu + bu)  [B,T,e]      V = silu(x Wv + bv)  [B,T,e]      Z = silu(x Wz + bz)  [B,T,s]
    queries and keys = rope(Z * gamma + beta), one cheap (gamma, beta) for each
    out = input + (U * attention(..., V)) Wo + bo
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.errors import check_choice
from lineartime.layers.dense import Dense, factory
from lineartime.layers.mixer import Mixer, MixerOptions
from lineartime.ops.activations import ACTIVATIONS, NORMALIZATIONS, Activation, Normalization
from lineartime.ops.backends import BACKENDS, Backend
from lineartime.ops.batch import Batch
from lineartime.ops.checks import check_even, check_positive
from lineartime.ops.mixed_chunk.inputs import queries_and_keys

InitialScores = Literal["small", "unit"]


class GatedOptions(MixerOptions, total=False):
    """What every gated unit takes: see `GatedUnit`."""

    d_qk: int
    expansion: int
    activation: Activation
    normalization: Normalization
    rope: bool
    initial_scores: InitialScores


class GatedUnit(Mixer):
    """Projections, gate and output of a gated attention layer (arXiv 2202.10447, section 2.2); a subclass attends.

    Args:
        d_qk: s, the width of queries and keys, which must be even.
        expansion: the values and the gate have width e = expansion * d.
        activation: the activation of the scores: "relu2" or "softmax".
        normalization: "count" divides by the number of visible keys; for other values, see the subclass.
        rope: whether to apply rotary positions to queries and keys.
        initial_scores: "small" draws gamma from N(0, 0.02) and sets beta to 0, as published. "unit" sets gamma to 1 and beta to
            s^(-1/4) for the queries and keys of a quadratic part. q.k / sqrt(s) then starts near 1 and, with RoPE, falls with
            distance. The published values suit normalization="paper"; with "count", attention that starts small learns late.
        **options: the options of `Mixer`.
    """

    n_maps: ClassVar[int] = 2
    """The number of queries and keys that are made from Z, each with its own gamma and beta."""
    n_heads: int = 1
    """The number of heads that divide the width of queries, keys and values among them."""
    activations: ClassVar[tuple[str, ...]] = ACTIVATIONS
    """The values of `activation` that it supports."""
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
        initial_scores: InitialScores = "small",
        **options: Unpack[MixerOptions],
    ) -> None:
        super().__init__(d_model, **options)
        check_choice("activation", activation, self.activations)
        check_choice("normalization", normalization, self.normalizations)
        check_choice("initial_scores", initial_scores, get_args(InitialScores))
        check_positive(d_qk=d_qk, expansion=expansion)
        check_even("queries and keys consist of pairs of features", d_qk=d_qk)
        self.d_qk = d_qk
        self.expansion = expansion
        self.d_gate, self.d_value = self.gate_and_value_widths(expansion * d_model)
        self.activation: Activation = activation
        self.normalization: Normalization = normalization
        self.rope = rope
        self.initial_scores: InitialScores = initial_scores
        self.to_gate_value_base = Dense(d_model, self.d_gate, self.d_value, d_qk, **factory(options))
        self.gamma = nn.Parameter(torch.empty(self.n_maps, d_qk, **factory(options)))
        self.beta = nn.Parameter(torch.empty(self.n_maps, d_qk, **factory(options)))
        self.init_own()
        self.to_output = Dense(self.d_value, d_model, **factory(options))

    def init_own(self) -> None:
        """Initialise gamma and beta: see `initial_scores`."""
        nn.init.normal_(self.gamma, std=0.02)
        nn.init.zeros_(self.beta)
        if self.initial_scores == "unit":  # the queries and keys of a quadratic part come first
            nn.init.ones_(self.gamma[:2])
            nn.init.constant_(self.beta[:2], (self.d_qk / self.n_heads) ** -0.25)

    def gate_and_value_widths(self, width: int) -> tuple[int, int]:
        """The widths of U and V, given e = expansion * d."""
        return width, width

    def attend(self, maps: Sequence[Tensor], v: Tensor, batch: Batch, causal: bool) -> Tensor:
        """Attend over whole sequences: queries and keys [B, T, s], values [B, T, e] -> [B, T, e]."""
        raise NotImplementedError

    def attend_next(self, maps: Sequence[Tensor], v: Tensor, state: Any, batch: Batch) -> tuple[Tensor, Any]:
        """Attend for N more tokens of streams, [B, N, s] and [B, N, e], and return the new state."""
        raise NotImplementedError

    def mix(self, normed: Tensor, batch: Batch) -> Tensor:
        """Compute whole sequences of normed tokens: [B, T, d] -> [B, T, d]."""
        gate, v, maps = self.project(normed, batch)

        def within(*parts: Any) -> Tensor:
            *own, values, inner = parts
            return self.attend(own, values, inner, causal=False)

        attended = batch.with_prefix(self.attend(maps, v, batch, self.causal), within, *maps, v)
        out: Tensor = self.to_output(self.apply_gate(gate, attended))
        return out

    def mix_next(self, normed: Tensor, state: Any, batch: Batch) -> tuple[Tensor, Any]:
        """Compute N more normed tokens of streams: [B, N, d] -> [B, N, d] and the new state."""
        gate, v, maps = self.project(normed, batch)
        attended, state = self.attend_next(maps, v, state, batch)
        return self.to_output(self.apply_gate(gate, attended)), state

    def project(self, normed: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """The gate U and the values V, [B, T, e], and the queries and keys, [B, T, s] each, of normed tokens."""
        return self.split(self.to_gate_value_base(normed), batch.rotations)

    def split(self, projected: Tensor, rotations: Tensor | None) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """Split projected tokens into the gate U and the values V, [B, T, e], and the queries and keys, [B, T, s] each."""
        gate, value, base = F.silu(projected).split([self.d_gate, self.d_value, self.d_qk], dim=-1)
        return gate, value, self.queries_and_keys(base, rotations)

    def queries_and_keys(self, base: Tensor, rotations: Tensor | None) -> Sequence[Tensor]:
        """Z [B, T, s] -> rope(Z * gamma + beta), [B, T, s] for each map."""
        return queries_and_keys(base, self.gamma, self.beta, rotations).unbind(1)

    def apply_gate(self, gate: Tensor, attended: Tensor) -> Tensor:
        """Multiply the output of the attention by the gate U."""
        return gate * attended


def set_backend(module: nn.Module, backend: Backend) -> None:
    """Set the backend that computes the attention of all GAU, FLASH and mhsa-relu2 layers of a model, or of a single layer.

    Other layers stay as they are, and so does FLASH beside GAU for "triton", which FLASH does not have. The variants of FLASH
    in `lineartime.baselines` have only one implementation. In streams of FLASH, "tiled" and "auto" apply to whole chunks, if
    they can run there and no gradient is needed; otherwise, PyTorch's operations read them, without an error. Single tokens of
    streams, and streams of GAU, do not follow the backend.

    Args:
        module: a layer, or a module that contains layers.
        backend: "torch", "tiled" (for CPUs), "triton" (kernels for GPUs, of GAU), "oracle" (the definition, slow), or "auto",
            the fastest that can run.

    Raises:
        ArgumentError: if the backend is unknown, or none of these layers has it. A backend that cannot run here raises an error
            when the layer reads whole sequences.
    """
    check_choice("backend", backend, BACKENDS)
    layers = [layer for layer in module.modules() if isinstance(layer, Mixer) and layer.backend is not None]
    having = [layer for layer in layers if backend in layer.backends]
    if layers and not having:
        check_choice("backend", backend, layers[0].backends)
    for layer in having:
        layer.backend = backend
