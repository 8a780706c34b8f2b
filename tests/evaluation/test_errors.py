"""Means with their standard errors, and differences of two evaluations."""

import math
from dataclasses import replace

import pytest
import torch

from lineartime.errors import ArgumentError
from lineartime.evaluation import Evaluation, difference
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


TOKENS = torch.tensor([8.0, 8.0, 8.0, 3.0], dtype=torch.float64)


def evaluation(losses: list[float]) -> Evaluation:
    """An evaluation of four windows with such mean losses; a token has two bytes."""
    sums = torch.tensor(losses, dtype=torch.float64) * TOKENS
    loss = float(sums.sum() / 27)
    bits = loss / 2 / math.log(2)
    return Evaluation("the text", "windows", loss, 27, False, bits, None, True, [], samples=torch.stack([sums, TOKENS], 1))


def test_error_is_that_of_the_differences_window_by_window() -> None:
    first, second = evaluation([1.0, 5.0, 3.0, 9.0]), evaluation([1.2, 5.1, 3.3, 9.2])
    found = difference(first, second)
    mean = (8 * 0.2 + 8 * 0.1 + 8 * 0.3 + 3 * 0.2) / 27
    squares = sum((n * (d - mean)) ** 2 for n, d in zip(TOKENS.tolist(), (0.2, 0.1, 0.3, 0.2), strict=True))
    error = math.sqrt(squares * 4 / 3) / 27
    assert found.loss == pytest.approx(mean)
    assert found.loss == pytest.approx(second.loss - first.loss)
    assert found.loss_error == pytest.approx(error)
    assert first.bits_per_byte is not None
    assert second.bits_per_byte is not None
    assert found.bits_per_byte == pytest.approx(second.bits_per_byte - first.bits_per_byte)
    assert found.bits_per_byte_error == pytest.approx(error / 2 / math.log(2))
    assert difference(second, first).loss == pytest.approx(-mean)


def test_masked_models_differ_in_nats_alone() -> None:
    first = replace(evaluation([1.0, 2.0, 3.0, 4.0]), masked=True, bits_per_byte=None)
    found = difference(first, replace(first, loss=first.loss))
    assert (found.loss, found.loss_error) == (0, 0)
    assert (found.bits_per_byte, found.bits_per_byte_error) == (None, None)


def test_evaluations_of_other_tokens_are_not_compared() -> None:
    first = replace(evaluation([1.0, 2.0, 3.0, 4.0]), digest="abc")
    assert difference(first, replace(first, text="the same text by another path")).loss == 0
    wrong = {
        "is an evaluation with another text: ": replace(first, text="other", digest=""),
        "is an evaluation with another text or tokenizer: ": replace(first, digest="def"),
        "is an evaluation with another task: ": replace(first, masked=True),
        "is an evaluation with another context: ": replace(first, context="carried"),
        "predicts other tokens than the first: ": replace(first, samples=torch.ones(2, 2, dtype=torch.float64)),
    }
    for message, second in wrong.items():
        with pytest.raises(ArgumentError, match=f"^second {message}"):
            difference(first, second)
