"""GAU, the gated attention unit; a model of GAUs is FLASH-Quad.

Shapes: B batch, T tokens, N new tokens of a stream, D documents, L tokens of the longest row, s query/key width,
e value width, R rows (one for each document).
The definition of its attention is in `lineartime.ops.quadratic.reference`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from lineartime.errors import ArgumentError
from lineartime.layers.dense import factory
from lineartime.layers.gated import GatedOptions, GatedUnit
from lineartime.layers.positions import RelativeBias, RotaryBias, TableBias, build_relative_bias
from lineartime.ops.activations import Normalization
from lineartime.ops.backends import Backend
from lineartime.ops.batch import Batch, Needs
from lineartime.ops.cache import KVCache
from lineartime.ops.checks import check_positive
from lineartime.ops.positions import FactoredBias
from lineartime.ops.precision import acc_dtype
from lineartime.ops.quadratic import attend_rows, quadratic_attention_extend
from lineartime.ops.quadratic.inputs import QuadraticOptions

PUBLISHED_LENGTH = 512
"""The constant n of a causal layer with normalization="paper" and no max_length: the paper's shortest context."""


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
        """The state before the first token of `batch_size` streams."""
        like = self.any_parameter
        keys = torch.zeros(batch_size, 0, self.d_qk, dtype=acc_dtype(like), device=like.device)
        return KVCache(self.first_position(batch_size), keys, keys.new_zeros(batch_size, 0, self.d_value))

    def attend_next(self, maps: Sequence[Tensor], v: Tensor, state: KVCache, batch: Batch) -> tuple[Tensor, KVCache]:
        """Attend to all cached keys and values; return the outputs and the cache extended by N tokens."""
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
