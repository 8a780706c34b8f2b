"""Loaders: the order of encoded text, and streams, divided over processes and resumed after any step."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lineartime.data import (
    Batch,
    BatchMaker,
    ByteTokenizer,
    CachedLoader,
    Corpus,
    Loader,
    Rows,
    StreamingLoader,
    TokenStream,
    load_corpus,
    merge_states,
)
from lineartime.data.folders import SPLITS
from lineartime.errors import ArgumentError, LineartimeError

END = ByteTokenizer.end_of_document


def stream(length: int) -> TokenStream:
    """Tokens that equal their position modulo 251, with some ends of documents."""
    tokens = (np.arange(length) % 251).astype(np.uint16)
    tokens[np.random.default_rng(0).integers(0, length, length // 20)] = END
    return TokenStream("the train split of numbers", tokens, length)


def loader(length: int = 400, context: int = 8, **options: Any) -> Loader:
    usual = {"per_step": 4, "at_once": 2, "rank": 0, "ranks": 1, "groups": 0}
    rows = Rows(*(options.pop(name, default) for name, default in usual.items()))
    return CachedLoader(stream(length), BatchMaker(ByteTokenizer(), **{"task": "clm", "seed": 3, **options}), context, rows)


def rows_of(batch: Batch) -> list[list[int]]:
    """The inputs and targets of a batch, row by row of 8 tokens."""
    return torch.stack([batch.inputs.view(-1, 8), batch.targets.view(-1, 8)], dim=1).flatten(1).tolist()


def step_rows(loaders: list[Loader]) -> list[list[int]]:
    """All rows of the next step, in order, from the loaders of all ranks."""
    parts = [[row for batch in one.next_step() for row in rows_of(batch)] for one in loaders]
    return [parts[i % len(parts)][i // len(parts)] for i in range(sum(map(len, parts)))]


def test_an_epoch_reads_every_window_once_and_the_next_one_at_other_places() -> None:
    numbers = TokenStream("the train split of numbers", np.arange(401, dtype=np.uint16), 401)
    one = CachedLoader(numbers, BatchMaker(ByteTokenizer(), "clm"), 8, Rows(1, 1))
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
    expected = [step_rows([whole]) for _ in range(done + 4)]
    before = [loader(at_once=4, rank=rank, ranks=2, **options) for rank in range(2)]
    for step in range(done):
        assert step_rows(before) == expected[step]
    state = json.loads(json.dumps(merge_states([one.state() for one in before])))
    after = [loader(at_once=at_once, rank=rank, ranks=ranks, **options) for rank in range(ranks)]
    for one in after:
        one.restore(state)
    for step in range(done, done + 4):
        assert step_rows(after) == expected[step]


def test_each_seed_gives_another_order() -> None:
    assert step_rows([loader()]) == step_rows([loader()]) != step_rows([loader(seed=4)])


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
        super().__init__(BatchMaker(ByteTokenizer(), "clm"), 1, Rows(1, 1))
        self.fails_at = fails_at
        self.read = 0

    def _window(self, row: int) -> torch.Tensor:
        if row == self.fails_at:
            raise LineartimeError("The file is gone.")
        self.read = row + 1
        return torch.tensor([row + 1, 0])

    def _position(self) -> dict[str, Any]:
        return {"rows": self._rows_read}

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
        rows = step_rows([plain])
        for rank, one in enumerate(loaders):
            batches = [rows_of(batch) for batch in one.next_step()]
            assert batches == [[rows[group], rows[group + 8]] for group in range(rank, 8, ranks)]


# Streams ----------------------------------------------------------------------------------------------------------------------

CONTEXT = 8
FILES = [[f"<{file}.{number}{'x' * ((7 * number + 3 * file) % 23)}>" for number in range(9 + file)] for file in range(3)]


def write(file: Path, texts: list[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file, row_group_size=3)
    else:
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture(params=["a data set of the hub", "files"])
def corpus(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    monkeypatch.setenv("LINEARTIME_MIRROR", str(tmp_path / "mirror"))
    for number, texts in enumerate(FILES):
        write(tmp_path / f"mirror/emozilla/pg19/data/train-{number:05d}-of-00003.parquet", texts)
        write(tmp_path / f"json/train-{number}.jsonl", texts)
    for split in SPLITS[1:]:
        write(tmp_path / f"json/{split}.jsonl", ["text"])
    return load_corpus("pg19" if "hub" in request.param else tmp_path / "json")


def streaming(corpus: Corpus, rank: int = 0, ranks: int = 1, context: int = CONTEXT, **options: Any) -> StreamingLoader:
    make = BatchMaker(ByteTokenizer(), **{"task": "clm", "seed": 1, **options})
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
        one, tokens = streaming(corpus, rank, ranks), []
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
    whole = [streaming(corpus, rank, ranks, **options) for rank in range(ranks)]
    expected = [[step(one) for one in whole] for _ in range(24)]
    for first, second in ((1, 2), (5, 11), (9, 20)):  # one, many, and documents of the next epoch
        running = [streaming(corpus, rank, ranks, **options) for rank in range(ranks)]
        for number in range(24):
            if number in (first, second):
                states = [one.state() for one in running]
                running = [restored(streaming(corpus, rank, ranks, **options), states) for rank in range(ranks)]
            assert [step(one) for one in running] == expected[number]


def test_stream_leaves_out_held_out_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINEARTIME_MIRROR", str(tmp_path))
    write(tmp_path / "org/whole/data.parquet", [f"text {i}" for i in range(100)])
    corpus = load_corpus("hub:org/whole")
    held_out = {"".join(blocks) for split in SPLITS[1:] for blocks in corpus.documents(split)}
    one = streaming(corpus, context=100)
    text = ByteTokenizer().decode([token for _ in range(5) for row in step(one) for token in row])
    assert len(held_out) > 3
    assert not any(f"{document}text" in text for document in held_out)


def test_state_of_a_stream_stays_small_however_long_the_documents(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(60_000))  # longer than a block
    write(tmp_path / "train.jsonl", [text] * 3)
    one = streaming(load_corpus(tmp_path / "train.jsonl"), context=4096)
    tokens = [token for _ in range(20) for batch in one.next_step() for token in batch.inputs.flatten().tolist()]
    assert ByteTokenizer().decode(tokens) == text[: 20 * 4 * 4096]
    assert len(json.dumps(one.state())) < 1000


def test_text_that_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ["one", "two", "three"])
    (tmp_path / "a.txt").write_text("text\n" * 100)
    (tmp_path / "b.jsonl").write_text('{"text": "abc"}\n{"txt": "abc"}\n')
    few = load_corpus(tmp_path / "a.jsonl")
    with pytest.raises(LineartimeError, match=r"fewer documents than processes \(2\): use fewer processes"):
        streaming(few, 1, 2)
    with pytest.raises(LineartimeError, match=r"a.txt is one long text and cannot be streamed"):
        streaming(load_corpus(tmp_path / "a.txt"))
    with pytest.raises(LineartimeError, match=r"^data is .*, but a stream is a single text: give one"):
        streaming(load_corpus([str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]))
    with pytest.raises(LineartimeError, match=r'b.jsonl, line 2, has no "text"'):
        streaming(load_corpus(tmp_path / "b.jsonl")).next_step()
    with pytest.raises(LineartimeError, match="to no processes and cannot continue in 1"):
        streaming(few).restore({"rows": 8})
