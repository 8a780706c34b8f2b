import math
from dataclasses import replace

import pytest
import torch

from lineartime.errors import ArgumentError
from lineartime.evaluation import Evaluation, difference

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
