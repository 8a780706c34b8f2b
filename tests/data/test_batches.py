import numpy as np
import pytest
import torch

from lineartime.data import ByteTokenizer, TokenStream, causal_batch, masked_batch, random_windows
from lineartime.data.batches import check_long_enough, spread_windows
from lineartime.errors import LineartimeError
from lineartime.ops.cross_entropy import IGNORED


def stream(length: int) -> TokenStream:
    return TokenStream("the train split of numbers", np.arange(length, dtype=np.uint16), length)


def test_a_batch_depends_on_its_key_alone() -> None:
    assert torch.equal(random_windows(stream(1000), 4, 16, (0, 7)), random_windows(stream(1000), 4, 16, (0, 7)))
    assert not torch.equal(random_windows(stream(1000), 4, 16, (0, 7)), random_windows(stream(1000), 4, 16, (0, 8)))


def test_windows_are_consecutive_tokens_from_everywhere() -> None:
    windows = random_windows(stream(20), 500, 4, (0,))
    assert windows.shape == (500, 5)
    assert (windows.diff() == 1).all()
    assert set(windows[:, 0].tolist()) == set(range(16))


def test_the_target_of_a_token_is_its_successor() -> None:
    batch = causal_batch(torch.tensor([[1, 2, 3]]))
    assert (batch.inputs.tolist(), batch.targets.tolist()) == ([[1, 2]], [[2, 3]])


def test_masking_is_that_of_bert() -> None:
    tokenizer = ByteTokenizer()
    windows = torch.full((100, 1001), 65)
    batch = masked_batch(windows, tokenizer, (0, 1))
    selected = batch.targets != IGNORED
    assert torch.equal(batch.targets[selected], windows[:, :-1][selected])
    assert torch.equal(batch.inputs[~selected], windows[:, :-1][~selected])
    assert selected.float().mean() == pytest.approx(0.15, abs=0.005)
    inside = batch.inputs[selected]
    assert (inside == tokenizer.mask).float().mean() == pytest.approx(0.8, abs=0.02)
    assert (inside == 65).float().mean() == pytest.approx(0.1, abs=0.02)


def test_windows_to_measure_on_are_spread_and_do_not_overlap() -> None:
    assert spread_windows(stream(101), 3, 10) == [0, 30, 60]
    assert spread_windows(stream(101), 99, 50) == [0, 50]


def test_a_corpus_shorter_than_a_context_is_an_error_that_says_what_to_do() -> None:
    check_long_enough(stream(11), 10)
    message = r"The train split of numbers has 10 tokens, fewer than one context and its successor \(11\): give more text"
    with pytest.raises(LineartimeError, match=message):
        check_long_enough(stream(10), 10)
