import numpy as np
import pytest
import torch

from lineartime.data import ByteTokenizer, TokenStream, causal_batch, masked_batch, packed_batch
from lineartime.data.batches import spread_windows
from lineartime.ops.cross_entropy import IGNORED


def stream(length: int) -> TokenStream:
    return TokenStream("the train split of numbers", np.arange(length, dtype=np.uint16), length)


def test_the_target_of_a_token_is_its_successor() -> None:
    batch = causal_batch(torch.tensor([[1, 2, 3]]))
    assert (batch.inputs.tolist(), batch.targets.tolist()) == ([[1, 2]], [[2, 3]])


def test_masking_is_that_of_bert() -> None:
    tokenizer = ByteTokenizer()
    windows = torch.full((100, 1001), 65)
    batch = masked_batch(windows, tokenizer, [(0, row) for row in range(100)])
    selected = batch.targets != IGNORED
    assert torch.equal(batch.targets[selected], windows[:, :-1][selected])
    assert torch.equal(batch.inputs[~selected], windows[:, :-1][~selected])
    assert selected.float().mean() == pytest.approx(0.15, abs=0.005)
    inside = batch.inputs[selected]
    assert (inside == tokenizer.mask).float().mean() == pytest.approx(0.8, abs=0.02)
    assert (inside == 65).float().mean() == pytest.approx(0.1, abs=0.02)


def test_what_is_masked_in_a_row_depends_on_its_key_alone() -> None:
    windows = torch.full((3, 101), 65)
    batch = masked_batch(windows, ByteTokenizer(), [(1,), (2,), (1,)])
    again = masked_batch(windows[:1], ByteTokenizer(), [(2,)])
    assert torch.equal(batch.inputs[0], batch.inputs[2])
    assert torch.equal(batch.inputs[1], again.inputs[0])
    assert not torch.equal(batch.inputs[0], batch.inputs[1])


def test_packing_cuts_after_each_end_and_each_row() -> None:
    end = ByteTokenizer.end_of_document
    windows = torch.tensor([[end, 1, 2, end, 3], [4, 5, 6, end, 7]])
    batch = packed_batch(causal_batch(windows), windows, end)
    assert batch.inputs.tolist() == [[end, 1, 2, end, 4, 5, 6, end]]
    assert batch.targets.tolist() == [[IGNORED, 2, end, IGNORED, 5, 6, end, IGNORED]]
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [0, 1, 4, 8]


def test_validation_windows_are_spread_and_do_not_overlap() -> None:
    assert spread_windows(stream(101), 3, 10) == [0, 30, 60]
    assert spread_windows(stream(101), 99, 50) == [0, 50]
