"""Losses by the number of tokens that precede them, and their standard errors.

Shapes: B rows, T tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PositionLoss:
    """The mean loss, in nats, of the `count` tokens that have from `first` to `last` tokens before them.

    `error` is its standard error: see `mean_over_rows`.
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


def mean_over_rows(losses: Tensor, tokens: Tensor) -> Mean | None:
    """The mean loss of rows with n_i `tokens` whose `losses` sum to s_i, float64 [rows]; None without any tokens.

    The losses of a row depend on each other, because its tokens share a topic. Therefore rows are the samples, and not tokens:
    the variance of a ratio of sums is sum (s_i - m n_i)^2 / n^2 * rows / (rows - 1), with m = s / n. A single row has none,
    nor have rows that are worth fewer than two of equal length, by n^2 / sum n_i^2 (Kish): one holds nearly all tokens.

    Source: Cochran, "Sampling Techniques" (1977), section 6.3, and 9A for clusters of unequal sizes.
    """
    losses, tokens = losses[tokens > 0], tokens[tokens > 0]
    rows, n = len(tokens), float(tokens.sum())
    if not rows:
        return None
    mean = losses.sum() / n
    squares = (losses - mean * tokens).square().sum()
    several = n * n >= 1.999 * float(tokens.square().sum())
    return Mean(float(mean), float((squares * rows / (rows - 1)).sqrt()) / n if several else None, int(n))


class PositionSums:
    """Sums of losses, row by row, by the number of preceding tokens: 1, 2-3, 4-7, ..."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []  # float64 [B, parts]: the sum over the tokens of each part
        self._tokens: list[Tensor] = []
        self._longest = 0

    def add(self, losses: Tensor, counted: Tensor, before: Tensor) -> None:
        """Add losses [B, T] of tokens with so many preceding tokens, [B, T]; `counted` marks those with a target."""
        self._longest = max(self._longest, int(before.max()))
        part = before.double().log2().floor().long()
        empty = torch.zeros(len(losses), int(part.max()) + 1, dtype=torch.float64, device=losses.device)
        self._losses.append(empty.scatter_add(1, part, losses.double() * counted))
        self._tokens.append(empty.scatter_add(1, part, counted.double()))

    def mean(self) -> Mean | None:
        """The mean over all tokens; None without any."""
        samples = self.samples()
        return mean_over_rows(samples[:, 0], samples[:, 1])

    def samples(self) -> Tensor:
        """The sum of the losses and the number of tokens of each row, in the order of `add`: float64 [rows, 2]."""
        return torch.stack([torch.cat([part.sum(1) for part in parts]) for parts in (self._losses, self._tokens)], 1)

    def by_position(self) -> Iterator[PositionLoss]:
        """The mean loss from each power of two to the next.

        If the largest number of preceding tokens is a power of two, it belongs to the part before it: alone, its few tokens
        would be noise.
        """
        widest = max(parts.shape[1] for parts in self._losses)
        losses, tokens = (
            torch.cat([F.pad(part, (0, widest - part.shape[1])) for part in parts]) for parts in (self._losses, self._tokens)
        )
        last = max(0, (self._longest - 1).bit_length() - 1)
        for part in range(last + 1):
            columns = slice(part, None if part == last else part + 1)
            if mean := mean_over_rows(losses[:, columns].sum(1), tokens[:, columns].sum(1)):
                end = self._longest if part == last else (2 << part) - 1
                yield PositionLoss(1 << part, end, mean.loss, mean.tokens, mean.error)
