"""GAU, the gated attention unit; a model of GAUs is FLASH-Quad.

Shapes: B batch, T tokens, N new tokens of a stream, D documents, L tokens of the longest row, s query/key width,
e value width, R rows (one for each document).
The definition of its attention is in `lineartime.ops.quadratic.reference`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from lineartime.errors import ArgumentError, check_choice
from lineartime.layers.dense import factory
from lineartime.layers.gated import GatedOptions, GatedUnit, HasBackends
from lineartime.layers.opened import Part
from lineartime.layers.positions import BIAS_FORMS, BiasForm, RelativeBias, RotaryBias, TableBias, build_relative_bias
from lineartime.layers.prefix import PrefixMixer
from lineartime.layers.stepping import SteppingMixer
from lineartime.ops import exported
from lineartime.ops.activations import QUADRATIC_NORMALIZATIONS
from lineartime.ops.cache import KVCache, KVStreams
from lineartime.ops.checks import check_positive
from lineartime.ops.layout import Layout, LayoutPlan
from lineartime.ops.positions import FactoredBias
from lineartime.ops.precision import acc_dtype
from lineartime.ops.quadratic import attend_rows
from lineartime.ops.quadratic.inputs import QuadraticOptions
from lineartime.ops.quadratic.stream import quadratic_attention_extend, quadratic_attention_step

PUBLISHED_LENGTH = 512
"""The constant n of a causal layer with normalization="paper" and no max_length: the paper's shortest context."""


class GAU(GatedUnit[KVCache], PrefixMixer[KVCache], SteppingMixer[KVCache, KVStreams], HasBackends):
    """Gated attention unit: one layer that replaces attention and feed-forward, quadratic in T.

    The layer includes a pre-norm and a residual connection: `y = GAU(256)(x)` maps [B, T, d] to [B, T, d]. With
    normalization="paper", it computes the published relu(q.k / n + bias)^2. n is the number of real tokens or, in a causal
    layer, the constant `max_length` (512 if it is None). With "paper_bias", it computes relu((q.k + bias) / n)^2, as in a
    published port.

    Args:
        relative_bias: whether to add a learned bias, which depends on the distance, to the scores.
        bias_form: the form of the relative bias. "auto" depends on `max_length`; "buckets" has one value for each of T5's 32
            buckets of distances and no length limit.
        max_length: the length of the longest sequence, or None. Up to 512, the relative bias is a table, and a longer input
            raises an error. Above 512, or with None, the bias has the rotary form, which has no length limit.
        **options: the options of `GatedUnit`.

    Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 2.2.
    """

    name = "gau"
    normalizations = QUADRATIC_NORMALIZATIONS

    def __init__(
        self,
        d_model: int,
        *,
        relative_bias: bool = True,
        bias_form: BiasForm = "auto",
        max_length: int | None = None,
        **options: Unpack[GatedOptions],
    ) -> None:
        super().__init__(d_model, **options)
        if max_length is not None:
            check_positive(max_length=max_length)
        self.max_length = max_length
        self.relative_bias = relative_bias
        check_choice("bias_form", bias_form, BIAS_FORMS)
        self.bias_form: BiasForm = bias_form
        self.bias: RelativeBias | None = None
        if relative_bias:
            self.bias = build_relative_bias(bias_form, max_length, self.d_qk, self.causal, **factory(options))

    @property
    def longest_sequence(self) -> int | None:
        """The length that the table of relative biases covers, or None without a table."""
        return self.bias.max_length if isinstance(self.bias, TableBias) else None

    def plan(self) -> LayoutPlan:
        """Request rows and rotations and, for a rotary bias, rotations of the places of a row."""
        plan = super().plan()
        return plan._replace(
            bias_width=self.d_qk if isinstance(self.bias, RotaryBias) else None,
            max_length=self.longest_sequence,
        )

    def attend_part(self, part: Part, maps: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """The whole attention, its only part: [B, 2, T, s] and [B, T, w] -> [B, T, w]."""
        return self.attend(maps, v, layout)

    def attend(self, maps: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Attend within each document: [B, 2, T, s] and [B, T, w] -> [B, T, w]."""
        attend = partial(self.attend_rows, layout=layout, causal=self.causal)
        attended = layout.by_row(attend, *maps.unbind(1), v)
        return layout.with_prefix(attended, partial(self.attend_bidirectional, maps, v))

    def attend_bidirectional(self, maps: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Bidirectional attention within each prefix: [B, 2, T, s] and [B, T, e] -> [B, T, e]."""
        return layout.by_row(partial(self.attend_rows, layout=layout, causal=False), *maps.unbind(1), v)

    def attend_rows(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, layout: Layout, causal: bool) -> Tensor:
        """Attend within each row: [R, L, s], [R, L, s], [R, L, e] -> [R, L, e]; `real`, bool [R, L], is False for padding."""
        bias: Tensor | FactoredBias | None
        if isinstance(self.bias, RotaryBias) and not self._divides_bias:
            places = torch.arange(q.shape[1], device=q.device)
            bias = self.bias.factors(places, places, layout.place_rotations)
        else:
            bias = self._bias(q.shape[1], q.shape[1], 0, layout)
        normalization = self._constant_normalization() if self.causal else self.normalization
        options = QuadraticOptions(causal, self.activation, normalization)
        attend = exported.quadratic if torch.compiler.is_exporting() else attend_rows
        return attend(q, k, v, bias, real, options, self.backend)

    def _constant_normalization(self) -> int | Literal["count"]:
        """The divisor of a causal layer, which must not change with the current length."""
        return "count" if self.normalization == "count" else self._constant_length

    @property
    def _constant_length(self) -> int:
        return self.max_length or PUBLISHED_LENGTH

    @property
    def _divides_bias(self) -> bool:
        return QuadraticOptions(self.causal, self.activation, self.normalization).divides_bias

    def _bias(self, n_queries: int, n_keys: int, first_query: int, layout: Layout) -> Tensor | None:
        self._check_length(n_keys)
        if self.bias is None:
            return None
        return self._divided(self.bias.consecutive(n_queries, n_keys, first_query, layout.place_rotations))

    def _bias_of_step(self, streams: KVStreams) -> Tensor | None:
        """The bias of the next token of each stream for all tokens of the longest one, [B, T]."""
        self._check_length(streams.longest + 1)
        if self.bias is None:
            return None
        places = torch.arange(streams.longest + 1, device=streams.position.device)
        return self._divided(self.bias(streams.position, places))

    def _divided(self, bias: Tensor) -> Tensor:
        return bias / self._constant_length if self.causal and self._divides_bias else bias

    def _check_length(self, n_keys: int) -> None:
        if isinstance(self.bias, TableBias) and n_keys > self.bias.max_length:
            raise ArgumentError(
                "max_length",
                f"is {self.bias.max_length}, the length of this GAU's table of relative biases, but the sequence has "
                f"{n_keys} tokens: build it with a larger max_length, or with None for no limit.",
            )

    def init_own_state(self, batch_size: int) -> KVCache:
        """The state before the first token of `batch_size` streams."""
        like = self.any_parameter
        empty = torch.zeros(batch_size, 0, self.d_qk, dtype=acc_dtype(like), device=like.device)
        return KVCache(empty, empty.new_zeros(batch_size, 0, self.d_value))

    def attend_next(self, maps: Tensor, v: Tensor, state: KVCache, layout: Layout) -> tuple[Tensor, KVCache]:
        """Attend to all cached keys and values; return the outputs and the cache extended by N tokens."""
        q, k = maps.unbind(1)
        n_new = len(layout.positions)
        return quadratic_attention_extend(
            q,
            k,
            v,
            state,
            bias=self._bias(n_new, state.position + n_new, state.position, layout),
            activation=self.activation,
            normalization=self._constant_normalization(),
        )

    def join_own_streams(self, states: Sequence[KVCache]) -> KVStreams:
        """Join streams at different positions."""
        return KVStreams(states)

    def separate_own_streams(self, streams: KVStreams, positions: Sequence[int]) -> list[KVCache]:
        """The state of each stream."""
        return streams.separate(positions)

    def attend_step(self, maps: Tensor, v: Tensor, streams: KVStreams, layout: Layout) -> Tensor:
        """Attend from one token of every stream, [B, 2, 1, s] and [B, 1, e] -> [B, 1, e]; updates `streams` in place."""
        q, k = maps.unbind(1)
        return quadratic_attention_step(
            q,
            k,
            v,
            streams,
            bias=self._bias_of_step(streams),
            activation=self.activation,
            normalization=self._constant_normalization(),
        )
