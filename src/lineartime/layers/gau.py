"""The gated unit, the base of GAU and FLASH, and GAU; a model of GAUs is FLASH-Quad.

Shapes: B batch, T tokens, N new tokens of a stream, d model width, e = expansion * d value width, s query/key width,
R rows (one for each document), L tokens of the longest row.
The definition of the attention of GAU is in `lineartime.ops.quadratic.reference`.

    U = silu(x Wu + bu)  [B,T,e]      V = silu(x Wv + bv)  [B,T,e]      Z = silu(x Wz + bz)  [B,T,s]
    queries and keys = rope(Z * gamma + beta), one cheap (gamma, beta) for each
    out = input + (U * attention(..., V)) Wo + bo
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.errors import ArgumentError, check_choice
from lineartime.layers.dense import Dense, factory
from lineartime.layers.mixer import Mixer, MixerOptions
from lineartime.layers.positions import RelativeBias, RotaryBias, TableBias, build_relative_bias
from lineartime.ops.activations import ACTIVATIONS, NORMALIZATIONS, Activation, Normalization
from lineartime.ops.backends import BACKENDS, Backend
from lineartime.ops.batch import Batch, Needs
from lineartime.ops.checks import check_even, check_positive
from lineartime.ops.mixed_chunk.inputs import queries_and_keys
from lineartime.ops.modes import acc_dtype
from lineartime.ops.positions import FactoredBias
from lineartime.ops.quadratic import attend_rows, quadratic_attention_extend
from lineartime.ops.quadratic.inputs import QuadraticOptions
from lineartime.ops.state import KVCache

InitialScores = Literal["small", "unit"]
PUBLISHED_LENGTH = 512
"""The constant n of a causal layer with normalization="paper" and no max_length: the paper's shortest context."""


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
        gate, v, maps = self.project(normed, batch)

        def within(*parts: Any) -> Tensor:
            *own, values, inner = parts
            return self.attend(own, values, inner, causal=False)

        attended = batch.with_prefix(self.attend(maps, v, batch, self.causal), within, *maps, v)
        out: Tensor = self.to_output(self.apply_gate(gate, attended))
        return out

    def mix_next(self, normed: Tensor, state: Any, batch: Batch) -> tuple[Tensor, Any]:
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


class GAU(GatedUnit):
    """Gated attention unit: one layer that replaces attention and feed-forward, quadratic in T.

    The layer includes a pre-norm and a residual connection: `y = GAU(256)(x)` maps [B, T, d] to [B, T, d]. With
    normalization="paper", it computes the published relu(q.k / n + bias)^2. n is the number of real tokens or, in a causal
    layer, the constant `max_length` (512 if it is None).

    Args:
        relative_bias: whether to add a learned bias, which depends on the distance, to the scores.
        max_length: the length of the longest sequence, or None. Up to 512, the relative bias is a table, and a longer input
            raises an error. Above 512, or with None, the bias has the rotary form, which has no length limit.
        **options: the options of `GatedUnit`.

    Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 2.2.
    """

    name = "gau"
    reads_prefix = True
    any_positions = True
    backend: Backend | None = "auto"

    def __init__(
        self,
        d_model: int,
        *,
        relative_bias: bool = True,
        max_length: int | None = None,
        **options: Unpack[GatedOptions],
    ) -> None:
        super().__init__(d_model, **options)
        if max_length is not None:
            check_positive(max_length=max_length)
        self.max_length = max_length
        self.relative_bias = relative_bias
        self.bias: RelativeBias | None = None
        if relative_bias:
            self.bias = build_relative_bias(max_length, self.d_qk, **factory(options))

    @property
    def longest_sequence(self) -> int | None:
        """The length that the table of relative biases covers, or None without a table."""
        return self.bias.max_length if isinstance(self.bias, TableBias) else None

    def needs(self) -> Needs:
        """Request rotations of the queries and keys of a head, and rows as long as the table of relative biases allows."""
        width = self.d_qk // self.n_heads if self.rope else None
        return Needs(rotary_width=width, max_length=self.longest_sequence, dtype=acc_dtype(self.gamma))

    def attend(self, maps: Sequence[Tensor], v: Tensor, batch: Batch, causal: bool) -> Tensor:
        """Attend within each document: queries and keys [B, T, s], values [B, T, e] -> [B, T, e]."""
        return batch.by_row(partial(self.attend_rows, causal=causal, batch=batch), *maps, v)

    def attend_rows(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, causal: bool, batch: Batch) -> Tensor:
        """Attend within each row: [R, L, s], [R, L, s], [R, L, e] -> [R, L, e]; `real`, bool [R, L], is False for padding."""
        options = QuadraticOptions(causal, self.activation, self.divisor())
        return attend_rows(q, k, v, self.bias_of_rows(q.shape[1], real, batch), real, options, self.backend or "auto")

    def bias_of_rows(self, length: int, real: Tensor | None, batch: Batch) -> Tensor | FactoredBias | None:
        """The relative bias within rows of `length` slots, of which those are tokens that `real` marks: [L, L] or [R, L, L]."""
        if isinstance(self.bias, RotaryBias):
            places = torch.arange(length, device=self.gamma.device)
            return self.bias.factors(places, places, batch)
        self._check_length(length)
        return None if self.bias is None else self.bias.consecutive(length, length)

    def divisor(self) -> Normalization | int:
        """The normalization of its attention. The divisor of a causal layer must not change with the current length."""
        if not self.causal or self.normalization == "count":
            return self.normalization
        return self.max_length or PUBLISHED_LENGTH

    def _check_length(self, n_keys: int) -> None:
        longest = self.longest_sequence
        if longest is not None and n_keys > longest:
            problem = f"is {longest}, the length of this GAU's table of relative biases, but the sequence has {n_keys} tokens"
            raise ArgumentError("max_length", f"{problem}: build it with a larger max_length, or with None for no limit.")

    def init_own_state(self, batch_size: int) -> Any:
        like = self.any_parameter
        keys = torch.zeros(batch_size, 0, self.d_qk, dtype=acc_dtype(like), device=like.device)
        return KVCache(self.first_position(batch_size), keys, keys.new_zeros(batch_size, 0, self.d_value))

    def attend_next(self, maps: Sequence[Tensor], v: Tensor, state: KVCache, batch: Batch) -> tuple[Tensor, KVCache]:
        q, k = maps
        return quadratic_attention_extend(
            q,
            k,
            v,
            state,
            batch=batch,
            bias=partial(self.bias_of_streams, batch),
            activation=self.activation,
            normalization=self.divisor(),
        )

    def bias_of_streams(self, batch: Batch, n_keys: int) -> Tensor | None:
        """The bias of new tokens of streams for the first `n_keys` places, [N, K] or [B, N, K]."""
        self._check_length(n_keys)
        if self.bias is None:
            return None
        if batch.start is not None and batch.counts is None:
            return self.bias.consecutive(n_keys - batch.start, n_keys, batch.start, batch)
        places, positions = torch.arange(n_keys, device=self.gamma.device), batch.positions
        if isinstance(self.bias, TableBias):  # those of padding are never used
            positions = positions.clamp(max=self.bias.max_length - 1)
        positions = positions.expand(batch.shape)
        rows: Tensor = self.bias(positions.flatten(), places, batch)
        return rows.view(*positions.shape, n_keys)


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
