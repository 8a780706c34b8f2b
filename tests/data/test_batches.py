"""Batches of each task, and loaders: the rows of every step, from any step on, of encoded text and of streams."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lineartime.data import (
    Batch,
    BatchMaker,
    ByteTokenizer,
    CachedLoader,
    Corpus,
    JsonTokenizer,
    Loader,
    Rows,
    StreamingLoader,
    TokenStream,
    load_corpus,
    merge_states,
)
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
from lineartime.data.readers import SPLITS
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.ops.cross_entropy import IGNORED

LETTERS = {name: place for place, name in enumerate(["<|endoftext|>", "[MASK]", "[CLS]", "[SEP]", *"abcdefgh"])}
BYTES, END = ByteTokenizer(), ByteTokenizer.end_of_document
FRAMED = tokenizers.Tokenizer(tokenizers.models.WordLevel(LETTERS, unk_token="a")).to_str()


def numbers(length: int) -> TokenStream:
    return TokenStream("the train split of numbers", np.arange(length, dtype=np.uint16), length)


def test_masking_is_that_of_bert() -> None:
    tokenizer = BYTES
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
    batch = masked_batch(windows, BYTES, [(1,), (2,), (1,)])
    again = masked_batch(windows[:1], BYTES, [(2,)])
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
    windows = torch.tensor([[END, 1, 2, END, 3], [4, 5, 6, END, 7]])
    batch = packed_batch(causal_batch(windows), windows[:, :-1] == END)
    assert batch.inputs.tolist() == [[END, 1, 2, END, 4, 5, 6, END]]
    assert batch.targets.tolist() == [[IGNORED, 2, END, IGNORED, 5, 6, END, IGNORED]]
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [0, 1, 4, 8]


def test_validation_windows_are_spread_and_do_not_overlap() -> None:
    assert spread_windows(numbers(101), 3, 10) == [0, 30, 60]
    assert spread_windows(numbers(101), 99, 50) == [0, 50]


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
    windows = torch.tensor([[1, 2, END, 3, 4, 5], [6, 7, 8, 9, END, 7]])
    batch = packed_batch(causal_batch(windows), windows[:, :-1] == END)
    assert batch.lengths().tolist() == [3, 2, 5]
    drawn = [draw_prefix_lengths(batch, [(seed, 0), (seed, 1)]) for seed in range(100)]
    assert torch.stack(drawn).amax(0).tolist() == [2, 1, 4]
    assert torch.stack(drawn).amin(0).tolist() == [0, 0, 0]
    alone = packed_batch(causal_batch(windows[1:]), windows[1:, :-1] == END)
    assert all(draw_prefix_lengths(alone, [(seed, 1)]) == lengths[-1] for seed, lengths in enumerate(drawn))
    targets = prefix_batch(batch, torch.tensor([2, 1, 4])).targets
    assert targets.tolist() == [[IGNORED, END, IGNORED, 4, 5, IGNORED, IGNORED, IGNORED, END, IGNORED]]


# Loaders ----------------------------------------


def stream(length: int) -> TokenStream:
    """Tokens that equal their position modulo 251, with some ends of documents."""
    tokens = (np.arange(length) % 251).astype(np.uint16)
    tokens[np.random.default_rng(0).integers(0, length, length // 20)] = END
    return TokenStream("the train split of numbers", tokens, length)


def loader(length: int = 400, context: int = 8, **options: Any) -> Loader:
    usual = {"per_step": 4, "at_once": 2, "rank": 0, "ranks": 1, "groups": 0}
    rows = Rows(*(options.pop(name, default) for name, default in usual.items()))
    return CachedLoader(stream(length), BatchMaker(BYTES, **{"task": "clm", "seed": 3, **options}), context, rows)


def rows_of(batch: Batch, context: int) -> list[list[int]]:
    """The inputs and targets of a batch, row by row."""
    both = torch.stack([batch.inputs.view(-1, context), batch.targets.view(-1, context)], dim=1)
    return both.flatten(1).tolist()


def step_rows(loaders: list[Loader], context: int) -> list[list[int]]:
    """All rows of the next step, in order, from the loaders of all ranks."""
    parts = [[row for batch in one.next_step() for row in rows_of(batch, context)] for one in loaders]
    return [parts[i % len(parts)][i // len(parts)] for i in range(sum(map(len, parts)))]


def test_an_epoch_reads_every_window_once_and_the_next_one_at_other_places() -> None:
    one = CachedLoader(numbers(401), BatchMaker(BYTES, "clm"), 8, Rows(1, 1))
    starts = [int(one.next_step()[0].inputs[0, 0]) for _ in range(150)]
    offsets = []
    while starts:
        offset = starts[0] % 8
        windows = (400 - offset) // 8
        epoch, starts = starts[:windows], starts[windows:]
        offsets.append(offset)
        assert len(set(epoch)) == len(epoch)
        assert {start % 8 for start in epoch} == {offset}
        assert epoch != sorted(epoch)
    assert len(offsets) == 4
    assert len(set(offsets)) > 1


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.sampled_from([1, 2, 4]),
    at_once=st.sampled_from([1, 2]),
    done=st.integers(0, 12),
    task=st.sampled_from(["clm", "mlm", "prefix-lm"]),
    packed=st.booleans(),
)
def test_any_number_of_processes_resumes_at_any_step_with_the_same_rows(
    ranks: int, at_once: int, done: int, task: str, packed: bool
) -> None:
    options: dict[str, Any] = {"per_step": 8, "task": task, "packed": packed}
    whole = loader(at_once=8, **options)
    expected = [step_rows([whole], 8) for _ in range(done + 4)]
    before = [loader(at_once=4, rank=rank, ranks=2, **options) for rank in range(2)]
    for step in range(done):
        assert step_rows(before, 8) == expected[step]
    state = json.loads(json.dumps(merge_states([one.state() for one in before])))
    after = [loader(at_once=at_once, rank=rank, ranks=ranks, **options) for rank in range(ranks)]
    for one in after:
        one.restore(state)
    for step in range(done, done + 4):
        assert step_rows(after, 8) == expected[step]


def test_each_seed_gives_another_order() -> None:
    first, same, other = loader(), loader(), loader(seed=4)
    rows = step_rows([first], 8)
    assert rows == step_rows([same], 8)
    assert rows != step_rows([other], 8)


def test_what_cannot_be_read_in_steps_is_an_error() -> None:
    problem = "6 sequences cannot be distributed over 2 processes in batches of 2: use a multiple of 4"
    with pytest.raises(LineartimeError, match=problem):
        Rows(6, 2, 0, 2)
    with pytest.raises(LineartimeError, match=r"There are 8 tokens in .*, fewer than a context .* \(9\): give more text"):
        loader(length=8, context=8)
    assert loader(length=9, context=8).next_step()[0].inputs.shape == (2, 8)
    first, second = loader(rank=0, ranks=2), loader(rank=1, ranks=2)
    second.next_step()
    with pytest.raises(ArgumentError, match="states are from different steps"):
        merge_states([first.state(), second.state()])


class Counting(Loader):
    """A loader of numbered steps that fails at one of them."""

    def __init__(self, fails_at: int = 10**9) -> None:
        super().__init__(BatchMaker(BYTES, "clm"), 1, Rows(1, 1))
        self.fails_at = fails_at
        self.read = 0

    def _window(self, row: int) -> torch.Tensor:
        if row == self.fails_at:
            raise LineartimeError("The file is gone.")
        self.read = row + 1
        return torch.tensor([row + 1, 0])

    def _seek(self, state: dict[str, Any]) -> None:
        self.read = state["rows"]


def number(one: Loader) -> int:
    return int(one.next_step()[0].inputs)


def test_preparing_the_next_step_changes_nothing() -> None:
    one = Counting()
    for step in range(1, 30):
        assert number(one) == step
        assert one.state() == {"rows": step}
        assert one.read <= step + 1
    one.restore({"rows": 5})
    assert one.state() == {"rows": 5}
    assert number(one) == 6
    one.close()
    with pytest.raises(RuntimeError):
        one.next_step()


def test_an_error_in_the_thread_is_raised_by_next_step() -> None:
    one = Counting(fails_at=2)
    assert [number(one), number(one)] == [1, 2]
    for _ in range(2):
        with pytest.raises(LineartimeError, match="The file is gone"):
            one.next_step()
    one.restore({"rows": 0})
    assert number(one) == 1
    one.close()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_groups_hold_the_same_rows_whatever_the_number_of_processes(ranks: int) -> None:
    """Three steps, so that an epoch ends in one of them."""
    plain = loader(per_step=16)
    loaders = [loader(per_step=16, at_once=2, rank=rank, ranks=ranks, groups=8) for rank in range(ranks)]
    for _ in range(4):
        rows = step_rows([plain], 8)
        for rank, one in enumerate(loaders):
            batches = [rows_of(batch, 8) for batch in one.next_step()]
            assert batches == [[rows[group], rows[group + 8]] for group in range(rank, 8, ranks)]


# Streams ----------------------------------------

CONTEXT = 8
FILES = [[f"<{file}.{number}{'x' * ((7 * number + 3 * file) % 23)}>" for number in range(9 + file)] for file in range(3)]


def write(file: Path, texts: list[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file, row_group_size=3)


@pytest.fixture
def corpus(mirror: Path) -> Corpus:
    for number, texts in enumerate(FILES):
        write(mirror / f"emozilla/pg19/data/train-{number:05d}-of-00003.parquet", texts)
    return load_corpus("pg19")


def streamed(corpus: Corpus, rank: int = 0, ranks: int = 1, context: int = CONTEXT, **options: Any) -> StreamingLoader:
    make = BatchMaker(BYTES, **{"task": "clm", "seed": 1, **options})
    return StreamingLoader(corpus, make, context, Rows(4, 2 // ranks, rank, ranks))


def step(one: StreamingLoader) -> list[list[int]]:
    return [batch.inputs.flatten().tolist() + batch.targets.flatten()[-1:].tolist() for batch in one.next_step()]


def restored(one: StreamingLoader, states: list[dict[str, Any]]) -> StreamingLoader:
    one.restore(json.loads(json.dumps(merge_states(states))))
    return one


@pytest.mark.parametrize("ranks", [1, 2])
def test_stream_has_each_document_once_an_epoch(corpus: Corpus, ranks: int) -> None:
    shares = []
    for rank in range(ranks):
        one, tokens = streamed(corpus, rank, ranks), []
        while one.state()["processes"][str(rank)]["epoch"] == 0:
            tokens += [token for batch in one.next_step() for token in batch.inputs.flatten().tolist()]
        text = bytes(token if token < 256 else 0 for token in tokens).decode()
        shares += text.split("\0")[: sum(map(len, FILES)) // ranks]
    assert Counter(shares) == Counter(text for file in FILES for text in file)


@pytest.mark.parametrize("options", [{"task": "clm"}, {"task": "mlm"}, {"task": "clm", "packed": True}])
@pytest.mark.parametrize("ranks", [1, 2])
def test_stream_stopped_and_resumed_twice_goes_on_as_if_it_had_not_been(
    corpus: Corpus, ranks: int, options: dict[str, Any]
) -> None:
    whole = [streamed(corpus, rank, ranks, **options) for rank in range(ranks)]
    expected = [[step(one) for one in whole] for _ in range(24)]
    for first, second in ((1, 2), (5, 11), (9, 20)):  # one, many, and documents of the next epoch
        running = [streamed(corpus, rank, ranks, **options) for rank in range(ranks)]
        for number in range(24):
            if number in (first, second):
                states = [one.state() for one in running]
                running = [restored(streamed(corpus, rank, ranks, **options), states) for rank in range(ranks)]
            assert [step(one) for one in running] == expected[number]


def test_stream_leaves_out_held_out_documents(mirror: Path) -> None:
    write(mirror / "org/whole/data.parquet", [f"text {i}" for i in range(100)])
    corpus = load_corpus("hub:org/whole")
    held_out = {"".join(blocks) for split in SPLITS[1:] for blocks in corpus.documents(split)}
    one = streamed(corpus, context=100)
    text = BYTES.decode([token for _ in range(5) for row in step(one) for token in row])
    assert len(held_out) > 3
    assert not any(f"{document}text" in text for document in held_out)


def test_state_of_a_stream_stays_small_however_long_the_documents(mirror: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(60_000))  # longer than a block
    for split in SPLITS:
        write(mirror / f"org/long/{split}.parquet", [text] * 3)
    one = streamed(load_corpus("hub:org/long"), context=4096)
    tokens = [token for _ in range(20) for batch in one.next_step() for token in batch.inputs.flatten().tolist()]
    assert BYTES.decode(tokens) == text[: 20 * 4 * 4096]
    assert len(json.dumps(one.state())) < 1000


def test_text_that_cannot_be_streamed_is_refused(mirror: Path, corpus: Corpus) -> None:
    write(mirror / "a.parquet", ["one", "two", "three"])
    for split in SPLITS:
        write(mirror / f"org/few/{split}.parquet", ["one"])
    with pytest.raises(LineartimeError, match=r"fewer documents than processes \(2\): use fewer processes"):
        streamed(load_corpus("hub:org/few"), 1, 2)
    for data in (str(mirror / "a.parquet"), "wikitext", ["pg19", "hub:org/few"]):
        with pytest.raises(LineartimeError, match=r"^data is .*, but a stream is one data set of the hub whose rows are doc"):
            streamed(load_corpus(data))
    with pytest.raises(LineartimeError, match="to no processes and cannot continue in 1"):
        streamed(corpus).restore({"rows": 8})
