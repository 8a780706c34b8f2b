"""A text read as a stream: each document once, divided over processes, and resumed after any step."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lineartime.data import BatchMaker, ByteTokenizer, Corpus, Rows, StreamingLoader, load_corpus, merge_states
from lineartime.data.readers import SPLITS
from lineartime.errors import LineartimeError

BYTES = ByteTokenizer()
CONTEXT = 8
FILES = [[f"<{file}.{number}{'x' * ((7 * number + 3 * file) % 23)}>" for number in range(9 + file)] for file in range(3)]


def write(file: Path, texts: list[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file, row_group_size=3)


@pytest.fixture(autouse=True)
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LINEARTIME_MIRROR", str(tmp_path))
    return tmp_path


@pytest.fixture
def corpus(mirror: Path) -> Corpus:
    for number, texts in enumerate(FILES):
        write(mirror / f"emozilla/pg19/data/train-{number:05d}-of-00003.parquet", texts)
    return load_corpus("pg19")


def loader(corpus: Corpus, rank: int = 0, ranks: int = 1, context: int = CONTEXT, **options: Any) -> StreamingLoader:
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
        one, tokens = loader(corpus, rank, ranks), []
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
    whole = [loader(corpus, rank, ranks, **options) for rank in range(ranks)]
    expected = [[step(one) for one in whole] for _ in range(24)]
    for first, second in ((1, 2), (5, 11), (9, 20)):  # one, many, and documents of the next epoch
        running = [loader(corpus, rank, ranks, **options) for rank in range(ranks)]
        for number in range(24):
            if number in (first, second):
                states = [one.state() for one in running]
                running = [restored(loader(corpus, rank, ranks, **options), states) for rank in range(ranks)]
            assert [step(one) for one in running] == expected[number]


def test_stream_leaves_out_held_out_documents(mirror: Path) -> None:
    write(mirror / "org/whole/data.parquet", [f"text {i}" for i in range(100)])
    corpus = load_corpus("hub:org/whole")
    held_out = {"".join(blocks) for split in SPLITS[1:] for blocks in corpus.documents(split)}
    one = loader(corpus, context=100)
    text = BYTES.decode([token for _ in range(5) for row in step(one) for token in row])
    assert len(held_out) > 3
    assert not any(f"{document}text" in text for document in held_out)


def test_state_of_a_stream_stays_small_however_long_the_documents(mirror: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(60_000))  # longer than a block
    for split in SPLITS:
        write(mirror / f"org/long/{split}.parquet", [text] * 3)
    one = loader(load_corpus("hub:org/long"), context=4096)
    tokens = [token for _ in range(20) for batch in one.next_step() for token in batch.inputs.flatten().tolist()]
    assert BYTES.decode(tokens) == text[: 20 * 4 * 4096]
    assert len(json.dumps(one.state())) < 1000


def test_text_that_cannot_be_streamed_is_refused(mirror: Path, corpus: Corpus) -> None:
    write(mirror / "a.parquet", ["one", "two", "three"])
    for split in SPLITS:
        write(mirror / f"org/few/{split}.parquet", ["one"])
    with pytest.raises(LineartimeError, match=r"fewer documents than processes \(2\): use fewer processes"):
        loader(load_corpus("hub:org/few"), 1, 2)
    for given in (str(mirror / "a.parquet"), "wikitext", ["pg19", "hub:org/few"]):
        with pytest.raises(LineartimeError, match=r"^data is .*, but a stream is one data set of the hub whose rows are doc"):
            loader(load_corpus(given))
    with pytest.raises(LineartimeError, match="to no processes and cannot continue in 1"):
        loader(corpus).restore({"rows": 8})
