import math

import numpy as np
import pytest
import torch

from lineartime.evaluation.perplexity import PositionSums


def add(sums: PositionSums, losses: torch.Tensor, counted: torch.Tensor | None = None, first: int = 1) -> None:
    before = torch.arange(first, first + losses.shape[1]).expand_as(losses)
    sums.add(losses, torch.ones_like(losses, dtype=torch.bool) if counted is None else counted, before)


def error_by_hand(losses: list[list[float]]) -> float:
    """Cochran's formula, row by row."""
    mean = sum(map(sum, losses)) / sum(map(len, losses))
    squares = sum((sum(row) - mean * len(row)) ** 2 for row in losses)
    return math.sqrt(squares * len(losses) / (len(losses) - 1)) / sum(map(len, losses))


def test_means_and_errors_are_those_of_the_counted_tokens() -> None:
    losses = torch.rand(5, 6, generator=torch.Generator().manual_seed(0))
    counted = torch.ones(5, 6, dtype=torch.bool)
    counted[0, 1:4] = counted[3] = False
    sums = PositionSums()
    add(sums, losses[:2], counted[:2])
    add(sums, losses[2:], counted[2:])
    mean = sums.mean()
    assert mean is not None
    rows = [losses[i][counted[i]].tolist() for i in (0, 1, 2, 4)]
    assert mean.tokens == sum(map(len, rows)) == 21
    assert mean.loss == pytest.approx(sum(map(sum, rows)) / 21, rel=1e-6)
    assert mean.error == pytest.approx(error_by_hand(rows), rel=1e-6)
    found = {(each.first, each.last): each for each in sums.by_position()}
    assert set(found) == {(1, 1), (2, 3), (4, 6)}
    middle = [losses[i, 1:3].tolist() for i in (1, 2, 4)]
    assert found[2, 3].count == 6
    assert found[2, 3].loss == pytest.approx(sum(map(sum, middle)) / 6, rel=1e-6)
    assert found[2, 3].error == pytest.approx(error_by_hand(middle), rel=1e-6)


def test_error_is_that_of_rows_whose_tokens_share_a_topic() -> None:
    random = np.random.default_rng(0)

    def measured() -> tuple[float, float]:
        topic = random.normal(size=(40, 1))  # a deviation that all tokens of a row share
        sums = PositionSums()
        add(sums, torch.from_numpy(3 + topic + random.normal(size=(40, 30))))
        mean = sums.mean()
        assert mean is not None
        assert mean.error is not None
        return mean.loss, mean.error

    means, errors = zip(*(measured() for _ in range(400)), strict=True)
    actual = float(np.std(means))
    assert np.mean(errors) == pytest.approx(actual, rel=0.1)
    assert actual > 3 * math.sqrt(2 / (40 * 30))  # what tokens as independent samples would claim


def test_longest_row_of_a_power_of_two_joins_its_last_place_whatever_the_window() -> None:
    losses = torch.rand(3, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sums = PositionSums()
    add(sums, losses)
    last = list(sums.by_position())[-1]
    rows = losses[:, 7:].tolist()
    assert (last.first, last.last, last.count) == (8, 16, 27)
    assert last.error == pytest.approx(error_by_hand(rows), rel=1e-9)
    add(sums, losses[:, :1], first=17)  # a longer one: the place belongs to the next part again
    assert [(each.first, each.last) for each in sums.by_position()][-2:] == [(8, 15), (16, 17)]


def test_one_row_has_no_error_and_nothing_counted_has_no_mean() -> None:
    sums = PositionSums()
    add(sums, torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    assert sums.mean() is None
    assert list(sums.by_position()) == []
    add(sums, torch.full((1, 300), 1.1, dtype=torch.float64))
    assert sums.mean() == (pytest.approx(1.1), None, 300)
    add(sums, torch.full((1, 3), 1.1, dtype=torch.float64))  # beside the first row, nothing
    assert sums.mean() == (pytest.approx(1.1), None, 303)
