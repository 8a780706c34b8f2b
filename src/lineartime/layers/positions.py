"""Learned positional modules: the two relative biases, the scaled sinusoid and the table of absolute positions.

Shapes: Q queries, K keys, s query/key width, d model width.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.layers.dense import FactoryOptions
from lineartime.ops.batch import Batch
from lineartime.ops.checks import check_even, require
from lineartime.ops.modes import acc_dtype, is_exporting, look_up
from lineartime.ops.positions import FactoredBias, by_distance, rotary_bias, rotary_table, sinusoid, table_bias

MAX_TABLE_LENGTH = 512
"""The largest length for which a relative bias is a table; above it, the bias is rotary (arXiv 2202.10447)."""


class RelativeBias(nn.Module, ABC):
    """A learned bias of scores that depends on the offset of a key from the query.

    The layers of a `batch` share the rotations of its rotary forms. The positions of keys are then 0, 1, ..., and those of
    queries are among them.
    """

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    @abstractmethod
    def forward(self, query_positions: Tensor, key_positions: Tensor, batch: Batch | None = None) -> Tensor:
        """The bias [Q, K] for positions [Q] and [K]."""

    @abstractmethod
    def consecutive(self, n_queries: int, n_keys: int, first_query: int = 0, batch: Batch | None = None) -> Tensor:
        """The bias [Q, K] for queries first_query, ..., and keys 0, 1, ...; its gradient is summed in a fixed order."""


class TableBias(RelativeBias):
    """A learned relative bias for each offset between -(n-1) and n-1, n being `max_length`."""

    def __init__(self, max_length: int, **factory: Unpack[FactoryOptions]) -> None:
        super().__init__()
        self.max_length = max_length
        self.table = nn.Parameter(torch.empty(2 * max_length - 1, **factory))
        self.reset_parameters()

    def extra_repr(self) -> str:
        return f"max_length={self.max_length}"

    def forward(self, query_positions: Tensor, key_positions: Tensor, batch: Batch | None = None) -> Tensor:
        """The bias [Q, K] for positions [Q] and [K] within `max_length`."""
        return table_bias(self.table, query_positions, key_positions)

    def consecutive(self, n_queries: int, n_keys: int, first_query: int = 0, batch: Batch | None = None) -> Tensor:
        first = self.max_length - first_query - n_queries
        return by_distance(self.table[first : first + n_queries + n_keys - 1], n_queries, n_keys)


class RotaryBias(RelativeBias):
    """A learned relative bias of any length, rope(a)_t . rope(b)_j, with a and b in R^s."""

    def __init__(self, d_qk: int, **factory: Unpack[FactoryOptions]) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(d_qk, **factory))
        self.b = nn.Parameter(torch.empty(d_qk, **factory))
        self.reset_parameters()

    def extra_repr(self) -> str:
        return f"d_qk={len(self.a)}"

    def forward(self, query_positions: Tensor, key_positions: Tensor, batch: Batch | None = None) -> Tensor:
        return self.factors(query_positions, key_positions, batch).dense()

    def consecutive(self, n_queries: int, n_keys: int, first_query: int = 0, batch: Batch | None = None) -> Tensor:
        places = torch.arange(max(n_keys, first_query + n_queries), device=self.a.device)
        return self.factors(places[first_query : first_query + n_queries], places[:n_keys], batch).dense()

    def factors(self, query_positions: Tensor, key_positions: Tensor, batch: Batch | None = None) -> FactoredBias:
        """The same bias as two factors, without computing their product."""
        width, places, table = self.a.shape[0], key_positions.shape[0], None
        if batch is not None:
            table = batch.shared((width, places), lambda: rotary_table(key_positions, width // 2, acc_dtype(self.a)))
        return rotary_bias(self.a, self.b, query_positions, key_positions, table)


def build_relative_bias(max_length: int | None, d_qk: int, **factory: Unpack[FactoryOptions]) -> RelativeBias:
    """Build a relative bias: a table if `max_length` is given and at most 512, and the rotary form otherwise."""
    if max_length is not None and max_length <= MAX_TABLE_LENGTH:
        return TableBias(max_length, **factory)
    return RotaryBias(d_qk, **factory)


class ScaledSin(nn.Module):
    """The sinusoid table times one learned scalar, which starts at 1/sqrt(d) (arXiv 2202.10447, code 7)."""

    def __init__(self, d_model: int, **factory: Unpack[FactoryOptions]) -> None:
        super().__init__()
        check_even("a sinusoid is made of pairs of features", d_model=d_model)
        self.d_model = d_model
        self.scale = nn.Parameter(torch.empty(1, **factory))  # [1], not a scalar: FSDP2 shards rows
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, self.d_model**-0.5)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}"

    def forward(self, positions: Tensor) -> Tensor:
        """[...] integer positions -> [..., d]."""
        return self.scale * sinusoid(positions, self.d_model, self.scale.dtype)


class LearnedPositions(nn.Module):
    """One learned vector for each of `max_positions` positions, as in BERT (arXiv 1810.04805)."""

    tables = ("table",)

    def __init__(self, max_positions: int, d_model: int, **factory: Unpack[FactoryOptions]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(max_positions, d_model, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=0.02)

    def extra_repr(self) -> str:
        return f"max_positions={self.table.shape[0]}, d_model={self.table.shape[1]}"

    def forward(self, positions: Tensor) -> Tensor:
        """[...] integer positions -> [..., d]; ArgumentError for a position beyond the last."""
        n = self.table.shape[0]
        if not is_exporting():  # ONNX has no assertions
            advice = "but the sequence is longer: increase max_positions or pass shorter sequences."
            require(positions < n, "max_positions", f"is {n}, the number of learned positions, {advice}")
        return look_up(self.table, positions)
