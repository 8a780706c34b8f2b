"""Learned positional modules: the two relative biases, the scaled sinusoid and the table of absolute positions.

Shapes: s query/key width, d model width.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.layers.dense import FactoryOptions
from lineartime.ops.checks import check_even, require
from lineartime.ops.modes import acc_dtype, is_exporting, is_traced, look_up
from lineartime.ops.packing import Packing
from lineartime.ops.positions import rotary_table, sinusoid

MAX_TABLE_LENGTH = 512
"""The largest length for which a relative bias is a table; above it, the bias is rotary (arXiv 2202.10447)."""


class RelativeBias(nn.Module, ABC):
    """A learned bias of scores for each distance of a key from the query, key position minus query position."""

    max_length: int | None = None
    """The longest sequence that it has values for; None for no limit."""

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    @abstractmethod
    def forward(self, n: int, packing: Packing | None = None) -> Tensor:
        """The values [2 n - 1] for the distances 1 - n, ..., n - 1, in float32 or better. Layers share what `packing` keeps."""


class TableBias(RelativeBias):
    """A learned relative bias for each distance between -(n-1) and n-1, n being `max_length`."""

    max_length: int

    def __init__(self, max_length: int, **factory: Unpack[FactoryOptions]) -> None:
        super().__init__()
        self.max_length = max_length
        self.table = nn.Parameter(torch.empty(2 * max_length - 1, **factory))
        self.reset_parameters()

    def forward(self, n: int, packing: Packing | None = None) -> Tensor:
        return self.table[self.max_length - n : self.max_length + n - 1].to(acc_dtype(self.table))


class RotaryBias(RelativeBias):
    """A learned relative bias of any length, rope(a)_t . rope(b)_j, with a and b in R^s (arXiv 2202.10447, `rel_pos_bias`).

    With the halves a1, a2 and b1, b2 of both and the angles of the distance j - t, that is
    (a1 b1 + a2 b2) . cos + (a2 b1 - a1 b2) . sin.
    """

    def __init__(self, d_qk: int, **factory: Unpack[FactoryOptions]) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(d_qk, **factory))
        self.b = nn.Parameter(torch.empty(d_qk, **factory))
        self.reset_parameters()

    def forward(self, n: int, packing: Packing | None = None) -> Tensor:
        exact, half, near = acc_dtype(self.a), self.a.shape[0] // 2, 64
        (a1, a2), (b1, b2) = self.a.to(exact).chunk(2), self.b.to(exact).chunk(2)
        of_cos, of_sin = a1 * b1 + a2 * b2, a2 * b1 - a1 * b2

        def tables(*ranges: tuple[int, int]) -> list[Tensor]:
            return [rotary_table(torch.arange(0, stop, by, device=self.a.device), half, exact) for stop, by in ranges]

        if is_traced():  # where n is a symbol
            ((cos, sin),) = tables((n, 1))
            even, odd = cos @ of_cos, sin @ of_sin
        else:  # Angles are sums, of that of every 64th distance and of one below.
            key, parts = ("distances", half, n, exact), ((n, near), (near, 1))
            (cos, sin), rest = tables(*parts) if packing is None else packing.shared(key, lambda: tables(*parts))
            even = (cos * of_cos) @ rest[0].mT - (sin * of_cos) @ rest[1].mT
            odd = (sin * of_sin) @ rest[0].mT + (cos * of_sin) @ rest[1].mT
            even, odd = (x.flatten()[:n] for x in (even, odd))
        return torch.cat([(even - odd)[1:].flip(0), even + odd])


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
