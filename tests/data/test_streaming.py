"""Streams of documents: shared out to lanes, shuffled, and resumed after any document."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lineartime.data import (
    BatchMaker,
    ByteTokenizer,
    Corpus,
    Loader,
    Rows,
    StreamingLoader,
    load_corpus,
    merge_states,
)
from lineartime.data.readers import SPLITS
from lineartime.data.streaming import State, _Lane, shuffled, stream_documents
from lineartime.errors import LineartimeError

BYTES = ByteTokenizer()
CONTEXT = 8


def write_parquet(file: Path, texts: list[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "id": list(range(len(texts)))}), file, row_group_size=3)


def write_json_lines(file: Path, texts: list[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def text_of(file: int, number: int) -> str:
    return f"<{file}.{number}" + "x" * ((7 * number + 3 * file) % 23) + ">"


FILES = [[text_of(file, number) for number in range(9 + file)] for file in range(3)]
ALL = [text for file in FILES for text in file]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpora")
    for number, texts in enumerate(FILES):
        write_parquet(root / f"mirror/emozilla/pg19/data/train-{number:05d}-of-00003.parquet", texts)
        write_json_lines(root / f"json/train-{number}.jsonl", texts)
    for name in ("json/valid.jsonl", "json/test.jsonl"):
        write_json_lines(root / name, ["text"])
    write_json_lines(root / "first/train.jsonl", FILES[0])
    for number, texts in enumerate(FILES[1:]):
        write_parquet(root / f"mirror/org/rest/train-{number:05d}-of-00002.parquet", texts)
    for split in ("validation", "test"):
        write_parquet(root / f"mirror/org/rest/{split}.parquet", ["text"])
        write_json_lines(root / f"first/{split}.jsonl", ["text"])
    write_parquet(root / "mirror/org/whole/data.parquet", [f"text {i}" for i in range(100)])
    return root


@pytest.fixture(params=["hub", "json", "several"])
def corpus(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    monkeypatch.setenv("LINEARTIME_MIRROR", str(folder / "mirror"))
    if request.param == "hub":
        return load_corpus("pg19")
    if request.param == "several":
        return load_corpus([folder / "first", "hub:org/rest"])
    return load_corpus(folder / "json")


def read(corpus: Corpus, lane: int, lanes: int, state: dict[str, Any] | None = None) -> list[tuple[str, dict[str, Any]]]:
    return [(texts[0], after) for texts, after in stream_documents(corpus, lane, lanes, state)]


def test_lanes_share_out_all_documents(corpus: Corpus) -> None:
    for lanes in (1, 2, 3, 4, 7):
        shares = [[text for text, _ in read(corpus, lane, lanes)] for lane in range(lanes)]
        assert Counter(text for share in shares for text in share) == Counter(ALL)
        assert len({share[0][:2] for share in shares}) > (lanes > 1)  # they begin in different files


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_lane_resumes_after_any_document(corpus: Corpus, lanes: int) -> None:
    for lane in range(lanes):
        whole = read(corpus, lane, lanes)
        for index, (_, state) in list(enumerate(whole))[::2]:
            for skipped in (1, 2):  # the second time from the state of a lane that was resumed
                again = read(corpus, lane, lanes, json.loads(json.dumps(state)))
                assert [text for text, _ in again] == [text for text, _ in whole[index + skipped :]]
                state = again[0][1] if again else state


def test_held_out_documents_of_a_data_set_are_in_no_lane(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINEARTIME_MIRROR", str(folder / "mirror"))
    corpus = load_corpus("hub:org/whole")
    held_out = ["".join(blocks) for split in SPLITS[1:] for blocks in corpus.documents(split)]
    assert len(held_out) > 3
    whole = [read(corpus, lane, 3) for lane in range(3)]
    assert sorted([text for lane in whole for text, _ in lane] + held_out) == sorted(f"text {i}" for i in range(100))
    again = read(corpus, 1, 3, json.loads(json.dumps(whole[1][9][1])))
    assert [text for text, _ in again] == [text for text, _ in whole[1][10:]]


def loader(corpus: Corpus, lanes: int, **options: Any) -> Loader:
    rows = Rows(options.pop("per_step", 4), options.pop("at_once", 1), options.pop("rank", 0), options.pop("ranks", 1))
    context, shuffle = options.pop("context_length", CONTEXT), options.pop("shuffle", 0)
    return StreamingLoader(corpus, BatchMaker(BYTES, **{"task": "clm", "seed": 1, **options}), context, rows, lanes, shuffle)


def step_rows(loaders: list[Loader]) -> list[list[int]]:
    """All rows of the next step, in order, from the loaders of all ranks."""
    parts = [[row for batch in one.next_step() for row in batch.inputs.view(-1, CONTEXT).tolist()] for one in loaders]
    return [parts[i % len(parts)][i // len(parts)] for i in range(sum(map(len, parts)))]


def test_a_lane_is_its_documents_one_after_another(corpus: Corpus) -> None:
    texts = [text for text, _ in read(corpus, 1, 2)]
    expected = [token for _ in range(2) for text in texts for token in [*text.encode(), BYTES.end_of_document]]
    lane = _Lane(corpus, BYTES, 1, 2)
    got: list[int] = []
    while len(got) + CONTEXT < len(expected):
        window = lane.window(CONTEXT).tolist()
        assert len(window) == CONTEXT + 1
        assert window == expected[len(got) : len(got) + CONTEXT + 1]
        got += window[:-1]
    assert lane.state()["epoch"] == 1


@pytest.mark.slow
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ranks=st.sampled_from([1, 2, 4]),
    at_once=st.sampled_from([1, 2]),
    done=st.integers(0, 20),
    packed=st.booleans(),
    task=st.sampled_from(["clm", "mlm"]),
    shuffle=st.sampled_from([0, 1, 3, 1000]),
)
def test_any_number_of_processes_resumes_at_any_step_with_the_same_rows(
    corpus: Corpus, ranks: int, at_once: int, done: int, packed: bool, task: str, shuffle: int
) -> None:
    options: dict[str, Any] = {"per_step": 8, "packed": packed, "task": task, "shuffle": shuffle}
    whole = loader(corpus, 4, at_once=8, **options)
    expected = [step_rows([whole]) for _ in range(done + 3)]
    before = [loader(corpus, 4, at_once=2, rank=rank, ranks=2, **options) for rank in range(2)]
    for step in range(done):
        assert step_rows(before) == expected[step]
    state = json.loads(json.dumps(merge_states([one.state() for one in before])))
    after = [loader(corpus, 4, at_once=at_once, rank=rank, ranks=ranks, **options) for rank in range(ranks)]
    for one in after:
        one.restore(state)
    for step in range(done, done + 3):
        assert step_rows(after) == expected[step]
    for one in [whole, *before, *after]:
        one.close()


def test_the_state_stays_small_however_long_the_documents(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "train.jsonl", ["word " * 50_000] * 3)
    one = loader(load_corpus(tmp_path / "train.jsonl"), 1, context_length=4096)
    for _ in range(20):
        one.next_step()
    assert len(json.dumps(one.state())) < 1000


def test_a_document_that_is_longer_than_a_block_is_read_whole(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(30_000))
    write_json_lines(tmp_path / "a.jsonl", [text])
    lane = _Lane(load_corpus(tmp_path / "a.jsonl"), BYTES, 0, 1)
    tokens = np.concatenate([lane.window(1000)[:-1] for _ in range(len(text) // 1000)])
    assert BYTES.decode(tokens.tolist()) == text[: len(tokens)]


def test_what_cannot_be_streamed_is_an_error(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "a.jsonl", ["one", "two", "three", "four", "five"])
    (tmp_path / "a.txt").write_text("text\n" * 100)
    (tmp_path / "b.jsonl").write_text('{"text": "abc"}\n{"txt": "abc"}\n')
    few = load_corpus(tmp_path / "a.jsonl")
    with pytest.raises(LineartimeError, match="fewer documents than lanes"):  # before the first step: it may be read late
        loader(few, 4)
    with pytest.raises(LineartimeError, match=r"^lanes is 4, but 3 processes need a multiple of 3"):
        loader(few, 4, per_step=3, ranks=3)
    with pytest.raises(LineartimeError, match=r"a.txt is one long text and cannot be streamed"):
        loader(load_corpus(tmp_path / "a.txt"), 1)
    with pytest.raises(LineartimeError, match=r'b.jsonl, line 2, has no "text"'):
        loader(load_corpus(tmp_path / "b.jsonl"), 1).next_step()
    state = loader(few, 2).state()
    with pytest.raises(LineartimeError, match="in 2 lanes and cannot continue in 1"):
        loader(few, 1).restore(state)
    with pytest.raises(LineartimeError, match="in no lanes and cannot continue in 1"):
        loader(few, 1).restore({"rows": 8})


def numbers(count: int, state: State | None) -> Iterator[tuple[list[str], State]]:
    for number in range(0 if state is None else state["at"], count):
        yield [str(number)], {"at": number + 1}


def shuffle(count: int, block_size: int, seed: tuple[int, ...] = (1, 2), state: State | None = None) -> list[tuple[int, State]]:
    stream = shuffled(lambda begin: numbers(count, begin), block_size, seed, state, "numbers")
    return [(int(text), after) for [text], after in stream]


@pytest.mark.parametrize(("count", "block_size"), [(0, 3), (9, 3), (10, 3), (10, 100), (10, 1)])
def test_a_shuffled_document_comes_once_and_in_its_block_also_after_a_resume(count: int, block_size: int) -> None:
    whole = shuffle(count, block_size)
    order = [number for number, _ in whole]
    assert sorted(order) == list(range(count))
    assert all(number // block_size == place // block_size for place, number in enumerate(order))
    for index, (_, state) in enumerate(whole):
        assert shuffle(count, block_size, (1, 2), json.loads(json.dumps(state))) == whole[index + 1 :]


def test_documents_change_places_by_the_seed_and_otherwise_in_each_block() -> None:
    first = [number for number, _ in shuffle(40, 20)]
    assert first == [number for number, _ in shuffle(40, 20)]
    assert first[:20] != sorted(first[:20])
    assert [number - 20 for number in first[20:]] != first[:20]
    assert first != [number for number, _ in shuffle(40, 20, (1, 3))]


@pytest.mark.parametrize(
    "state",
    [
        {"at": 3},
        {"block": 0, "done": 4, "begin": None},  # more than the block has
        {"block": 3, "done": 1, "begin": {"at": 10}},  # beyond the end
    ],
)
def test_a_position_that_does_not_exist_is_named(state: State) -> None:
    with pytest.raises(LineartimeError, match="The checkpoint's position in numbers does not exist in this text"):
        shuffle(10, 4, (1, 2), state)
