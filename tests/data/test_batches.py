import numpy as np
import pytest
import tokenizers
import torch

from lineartime.data import ByteTokenizer, JsonTokenizer, TokenStream
from lineartime.data.batches import (
    causal_batch,
    draw_prefix_lengths,
    evaluation_batch,
    masked_batch,
    packed_batch,
    prefix_batch,
    spread_windows,
    text_length,
)
from lineartime.errors import ArgumentError
from lineartime.ops.cross_entropy import IGNORED

LETTERS = {name: place for place, name in enumerate(["<|endoftext|>", "[MASK]", "[CLS]", "[SEP]", *"abcdefgh"])}
FRAMED = tokenizers.Tokenizer(tokenizers.models.WordLevel(LETTERS, unk_token="a")).to_str()


def stream(length: int) -> TokenStream:
    return TokenStream("the train split of numbers", np.arange(length, dtype=np.uint16), length)


def test_masking_is_that_of_bert() -> None:
    tokenizer = ByteTokenizer()
    windows = torch.full((100, 1001), 65)
    windows[:, ::10] = tokenizer.end_of_document  # which is never selected
    batch = masked_batch(windows, tokenizer, [(0, row) for row in range(100)])
    selected = batch.targets != IGNORED
    assert torch.equal(batch.targets[selected], windows[:, :-1][selected])
    assert torch.equal(batch.inputs[~selected], windows[:, :-1][~selected])
    assert not selected[:, ::10].any()
    assert selected.float().mean() == pytest.approx(0.9 * 0.15, abs=0.005)
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


def test_a_masked_row_is_framed_and_packed_or_causal_ones_are_not() -> None:
    tokenizer = JsonTokenizer(FRAMED, "letters")
    windows = torch.randint(4, 12, (50, 33))
    row = evaluation_batch("mlm", windows, tokenizer, range(50))
    assert row.inputs.shape == (50, 34)
    assert text_length(34, "mlm", tokenizer) == 32
    selected = row.targets != IGNORED
    assert torch.equal(torch.where(selected, row.targets, row.inputs)[:, 1:-1], windows[:, :-1])
    assert not selected[:, [0, -1]].any()
    assert selected.any()
    assert {(first, last) for first, last in row.inputs[:, [0, -1]].tolist()} == {tokenizer.frame}
    for task, packed in (("mlm", True), ("clm", False), ("prefix-lm", False)):
        assert evaluation_batch(task, windows, tokenizer, range(50), packed=packed).inputs.numel() == 32 * 50
        assert text_length(34, task, tokenizer, packed) == 34
    with pytest.raises(ArgumentError, match=r"^context_length is 2, but must be at least 3"):
        text_length(2, "mlm", tokenizer)


def test_packing_cuts_after_each_end_and_each_row() -> None:
    end = ByteTokenizer.end_of_document
    windows = torch.tensor([[end, 1, 2, end, 3], [4, 5, 6, end, 7]])
    batch = packed_batch(causal_batch(windows), windows[:, :-1] == end)
    assert batch.inputs.tolist() == [[end, 1, 2, end, 4, 5, 6, end]]
    assert batch.targets.tolist() == [[IGNORED, 2, end, IGNORED, 5, 6, end, IGNORED]]
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [0, 1, 4, 8]


def test_validation_windows_are_spread_and_do_not_overlap() -> None:
    assert spread_windows(stream(101), 3, 10) == [0, 30, 60]
    assert spread_windows(stream(101), 99, 50) == [0, 50]


def test_targets_begin_with_what_the_last_token_of_a_prefix_predicts() -> None:
    windows = torch.arange(5).expand(4, -1)
    batch = prefix_batch(causal_batch(windows), torch.tensor([0, 1, 2, 4]))
    none = IGNORED
    assert batch.targets.tolist() == [[1, 2, 3, 4], [1, 2, 3, 4], [none, 2, 3, 4], [none, none, none, 4]]
    assert torch.equal(batch.inputs, windows[:, :-1])


def test_prefix_lengths_are_uniform_and_depend_on_the_key_of_their_window() -> None:
    batch = causal_batch(torch.zeros(2000, 9, dtype=torch.long))
    lengths = draw_prefix_lengths(batch, [(3, row) for row in range(2000)])
    assert torch.bincount(lengths).tolist() == pytest.approx([250] * 8, abs=60)
    one = causal_batch(torch.zeros(1, 9, dtype=torch.long))
    assert draw_prefix_lengths(one, [(3, 1999)]).tolist() == lengths[-1:].tolist()


def test_each_document_of_a_pack_has_a_prefix_of_its_own() -> None:
    end = ByteTokenizer.end_of_document
    windows = torch.tensor([[1, 2, end, 3, 4, 5], [6, 7, 8, 9, end, 7]])
    batch = packed_batch(causal_batch(windows), windows[:, :-1] == end)
    assert batch.lengths().tolist() == [3, 2, 5]
    drawn = [draw_prefix_lengths(batch, [(seed, 0), (seed, 1)]) for seed in range(100)]
    assert torch.stack(drawn).amax(0).tolist() == [2, 1, 4]
    assert torch.stack(drawn).amin(0).tolist() == [0, 0, 0]
    alone = packed_batch(causal_batch(windows[1:]), windows[1:, :-1] == end)
    assert all(draw_prefix_lengths(alone, [(seed, 1)]) == lengths[-1] for seed, lengths in enumerate(drawn))
    targets = prefix_batch(batch, torch.tensor([2, 1, 4])).targets
    assert targets.tolist() == [[IGNORED, end, IGNORED, 4, 5, IGNORED, IGNORED, IGNORED, end, IGNORED]]
