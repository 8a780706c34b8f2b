"""Losses by the number of tokens that precede them, and their standard errors.

Shapes: B rows, T tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_ALL = 64
"""The column of the sums over all positions, after one for each power of two."""


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


class PositionSums:
    """Sums of losses by the number of preceding tokens: 1, 2-3, 4-7, ...; and, for their standard errors, sums over rows."""

    def __init__(self) -> None:
        # By column: the sums over rows of s, n, s^2, s n, n^2 and 1, of rows with n tokens whose losses sum to s.
        self._sums = torch.zeros(6, _ALL + 1, dtype=torch.float64)
        self._longest = 0

    def add(self, losses: Tensor, counted: Tensor, before: Tensor) -> None:
        """Add losses [B, T] of tokens with so many preceding tokens, [B, T]; `counted` marks those with a target."""
        self._longest = max(self._longest, int(before.max()))
        column = before.double().log2().floor().long()
        s, n = (torch.zeros(len(losses), _ALL + 1, dtype=torch.float64) for _ in range(2))
        s.scatter_add_(1, column, losses.double() * counted)
        n.scatter_add_(1, column, counted.double())
        s[:, _ALL], n[:, _ALL] = s.sum(1), n.sum(1)
        self._sums += torch.stack([s, n, s * s, s * n, n * n, (n > 0).double()]).sum(1)

    def mean(self) -> Mean | None:
        """The mean over all tokens; None without any."""
        return _mean(self._sums[:, _ALL])

    def by_position(self) -> Iterator[PositionLoss]:
        """The mean loss from each power of two to the next."""
        sums = self._sums[:, :_ALL].clone()
        top = self._longest.bit_length() - 1
        if top > 0 and self._longest == 1 << top:  # a single place, whose few tokens would be noise, joins the one before
            sums[:, top - 1] += sums[:, top]
            sums[:, top] = 0
            top -= 1
        for power in range(top + 1):
            mean = _mean(sums[:, power])
            if mean is not None:
                last = self._longest if power == top else (2 << power) - 1
                yield PositionLoss(1 << power, last, mean.loss, mean.tokens, mean.error)


def _mean(sums: Tensor) -> Mean | None:
    s, n, ss, sn, nn, rows = sums.tolist()
    return Mean(s / n, standard_error(s, n, ss, sn, nn, rows), int(n)) if n else None


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
