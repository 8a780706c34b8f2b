"""Losses by the number of tokens that precede them, and their standard errors.

Shapes: B rows, T tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_PARTS = 64
"""One for each power of two that a number of tokens can have."""


@dataclass(frozen=True)
class PositionLoss:
    """The mean loss, in nats, of the `count` tokens that have from `first` to `last` tokens before them.

    `error` is its standard error: see `standard_error`.
    """

    first: int
    last: int
    loss: float
    count: int
    error: float | None = None


class Mean(NamedTuple):
    """A mean of losses, its standard error, and the number of tokens."""

    loss: float
    error: float | None
    tokens: int


class RowSums:
    """Sums over rows, in several columns, from which means and standard errors follow."""

    def __init__(self, columns: int) -> None:
        # By column: the sums over rows of s, n, s^2, s n, n^2 and 1, of rows with n tokens whose losses sum to s.
        self._sums = torch.zeros(6, columns, dtype=torch.float64, device="cpu")

    def add(self, s: Tensor, n: Tensor) -> None:
        """Add rows: the sums of their losses and their tokens, float64 [B, columns]."""
        self._sums += torch.stack([s, n, s * s, s * n, n * n, (n > 0).double()]).sum(1)

    def mean(self, column: int) -> Mean | None:
        """The mean over the tokens of a column; None without any."""
        s, n, ss, sn, nn, rows = self._sums[:, column].tolist()
        return Mean(s / n, standard_error(s, n, ss, sn, nn, rows), int(n)) if n else None


class PositionSums:
    """Sums of losses by the number of preceding tokens: 1, 2-3, 4-7, ...

    If the largest number is a power of two, it belongs to the part before it: alone, its few tokens would be noise.
    """

    def __init__(self) -> None:
        self._sums, self._up_to_next = RowSums(_PARTS), RowSums(_PARTS)  # the second: with the first place of the next part
        self._total = RowSums(1)
        self._samples: list[Tensor] = []
        self._longest = 0

    def add(self, losses: Tensor, counted: Tensor, before: Tensor) -> None:
        """Add losses [B, T] of tokens with so many preceding tokens, [B, T]; `counted` marks those with a target."""
        self._longest = max(self._longest, int(before.max()))
        part, losses = before.double().log2().floor().long(), losses.double() * counted
        s, n = (torch.zeros(len(losses), _PARTS, dtype=torch.float64, device=losses.device) for _ in range(2))
        s.scatter_add_(1, part, losses)
        n.scatter_add_(1, part, counted.double())
        self._sums.add(s, n)
        self._total.add(s.sum(1, keepdim=True), n.sum(1, keepdim=True))
        self._samples.append(torch.stack([s.sum(1), n.sum(1)], 1))
        is_first = (before == 1 << part) & (part > 0)
        s.scatter_add_(1, (part - 1).clamp(min=0), losses * is_first)
        n.scatter_add_(1, (part - 1).clamp(min=0), (counted & is_first).double())
        self._up_to_next.add(s, n)

    def mean(self) -> Mean | None:
        """The mean over all tokens; None without any."""
        return self._total.mean(0)

    def samples(self) -> Tensor:
        """The sum of the losses and the number of tokens of each row, in the order of `add`: float64 [rows, 2]."""
        return torch.cat(self._samples)

    def by_position(self) -> Iterator[PositionLoss]:
        """The mean loss from each power of two to the next."""
        last = max(0, (self._longest - 1).bit_length() - 1)
        for part in range(last + 1):
            mean = (self._up_to_next if self._longest == 2 << part else self._sums).mean(part)
            if mean is not None:
                end = self._longest if part == last else (2 << part) - 1
                yield PositionLoss(1 << part, end, mean.loss, mean.tokens, mean.error)


def standard_error(s: float, n: float, ss: float, sn: float, nn: float, rows: float) -> float | None:
    """The standard error of the mean loss s / n, of rows whose n_i tokens have losses that sum to s_i; None for one row.

    The losses of a row depend on each other, because its tokens share a topic. Therefore rows are the samples, and not tokens:
    the variance of a ratio of sums is sum (s_i - m n_i)^2 / n^2 * rows / (rows - 1), with m = s / n.

    Args:
        s, n, ss, sn, nn: the sums over rows of s_i, n_i, s_i^2, s_i n_i and n_i^2.
        rows: the number of rows with tokens.

    Source: Cochran, "Sampling Techniques" (1977), section 6.3, and 9A for clusters of unequal sizes.
    """
    if rows < 2:
        return None
    m = s / n
    return math.sqrt(max(0.0, ss - 2 * m * sn + m * m * nn) * rows / (rows - 1)) / n
