import gzip
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from lineartime.data import load_corpus
from lineartime.data.hub import HUB, HubCorpus
from lineartime.data.readers import SPLITS, Split
from lineartime.errors import LineartimeError

ARTICLE = (
    "\n_START_ARTICLE_\nKaliningrad\n_START_PARAGRAPH_\nIt is a city._NEWLINE_It has a port.\n_START_SECTION_\nHistory\n"
    "_START_PARAGRAPH_\nIt is old."
)
LINES = ["", " = First = \n", "", " It begins . \n", " = = Part = = \n", "", " = Second = \n", " It ends . \n"]


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".gz":
        file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def evidence(number: int) -> dict[str, Any]:
    pages = [f"wiki {number}.{i}" for i in range(number % 3)]
    results = [f"web {number}.{i}" for i in range(number % 2)]
    return {
        "question": f"question {number}",
        "question_id": f"tc_{number}",
        "question_source": "http://www.triviacountry.com/",
        "entity_pages": {
            "doc_source": ["TagMe"] * len(pages),
            "filename": ["a.txt"] * len(pages),
            "title": ["A"] * len(pages),
            "wiki_context": pages,
        },
        "search_results": {
            "description": ["d"] * len(results),
            "filename": ["b.txt"] * len(results),
            "rank": [1] * len(results),
            "title": ["B"] * len(results),
            "url": ["http://b"] * len(results),
            "search_context": results,
        },
        "answer": {"aliases": ["x"], "normalized_value": "x", "type": "WikipediaEntity", "value": "X"},
    }


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Repositories of a few rows with the schemas and file names of the hub."""
    for split in SPLITS:
        for shard in range(2):
            write(
                tmp_path / f"google/wiki40b/en/{split}-{shard:05d}-of-00002.parquet",
                [{"wikidata_id": "Q1", "text": ARTICLE.replace("city", f"{split} {shard}"), "version_id": "1"}],
            )
        write(
            tmp_path / f"emozilla/pg19/data/{split}-00000-of-00001.parquet",
            [
                {"short_book_title": f"Book {i}", "publication_date": 1900, "url": "http://g", "text": f"{split} book {i} "}
                for i in range(3)
            ],
        )
        write(tmp_path / f"mandarjoshi/trivia_qa/rc/{split}-00000-of-00001.parquet", [evidence(i) for i in range(1, 4)])
        write(
            tmp_path / f"Salesforce/wikitext/wikitext-103-raw-v1/{split}-00000-of-00001.parquet",
            [{"text": line} for line in LINES],
        )
    for split, shards in (("train", 3), ("validation", 2)):
        for shard in range(shards):
            write(
                tmp_path / f"allenai/c4/en/c4-{split}.{shard:05d}-of-{shards:05d}.json.gz",
                [{"text": f"{split} {shard}.{i}", "timestamp": "2019-04-25T12:57:54Z", "url": "http://c"} for i in range(3)],
            )
    monkeypatch.setenv("LINEARTIME_MIRROR", str(tmp_path))
    return tmp_path


def texts(name: str, split: Split) -> list[str]:
    return ["".join(blocks) for blocks in load_corpus(name).documents(split)]


@pytest.mark.usefixtures("mirror")
def test_wiki40b_is_read_without_its_markers() -> None:
    for split in SPLITS:
        expected = "Kaliningrad\nIt is a {}.\nIt has a port.\n\nHistory\nIt is old.\n"
        assert texts("wiki40b", split) == [expected.format(f"{split} {shard}") for shard in range(2)]


@pytest.mark.usefixtures("mirror")
def test_a_document_of_pg19_is_a_book() -> None:
    assert texts("pg19", "test") == [f"test book {i} " for i in range(3)]


@pytest.mark.usefixtures("mirror")
def test_the_test_split_of_c4_is_every_second_document_of_its_validation_split() -> None:
    assert texts("c4", "train") == [f"train {shard}.{i}" for shard in range(3) for i in range(3)]
    assert texts("c4", "validation") == ["validation 0.0", "validation 0.2", "validation 1.1"]
    assert texts("c4", "test") == ["validation 0.1", "validation 1.0", "validation 1.2"]
    assert load_corpus("c4").identity("test") != load_corpus("c4").identity("validation")


@pytest.mark.usefixtures("mirror")
def test_the_documents_of_trivia_qa_are_its_evidence() -> None:
    assert texts("trivia_qa", "validation") == ["wiki 1.0", "web 1.0", "wiki 2.0", "wiki 2.1", "web 3.0"]


@pytest.mark.usefixtures("mirror")
def test_the_documents_of_wikitext_are_articles() -> None:
    assert texts("wikitext", "train") == [
        " \n",
        " = First = \n \n It begins . \n = = Part = = \n \n",
        " = Second = \n It ends . \n",
    ]


def test_the_identity_follows_the_files_of_the_split(mirror: Path) -> None:
    corpus = load_corpus("wiki40b")
    before = {split: corpus.identity(split) for split in SPLITS}
    write(mirror / "google/wiki40b/en/train-00001-of-00002.parquet", [{"text": "other"}])
    assert corpus.identity("train") != before["train"]
    assert corpus.identity("test") == before["test"]


def test_a_mirror_that_lacks_files_is_named(mirror: Path) -> None:
    for file in (mirror / "google/wiki40b/en").glob("test-*"):
        file.unlink()
    for ask in (lambda: load_corpus("wiki40b").identity("test"), lambda: texts("wiki40b", "test")):
        with pytest.raises(LineartimeError, match=r"no file en/test-\*.parquet in .*google/wiki40b: complete the mirror"):
            ask()


@pytest.mark.parametrize(
    ("name", "file"),
    [("wiki40b", "google/wiki40b/en/train-00001-of-00002.parquet"), ("c4", "allenai/c4/en/c4-train.00001-of-00003.json.gz")],
)
@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_a_damaged_file_is_an_error_of_one_sentence(mirror: Path, name: str, file: str, damage: str) -> None:
    data = (mirror / file).read_bytes()
    (mirror / file).write_bytes(data[:-9] if damage == "cut" else b"garbage" * 100)
    with pytest.raises(LineartimeError, match=rf"^Cannot read {name} \(.+\): check its files or the network") as caught:
        texts(name, "train")
    assert "\n" not in str(caught.value)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> HubCorpus:
    """A corpus of the hub without cached facts."""
    monkeypatch.delenv("LINEARTIME_MIRROR", raising=False)
    return HubCorpus("wiki40b", "google/wiki40b", HUB["wiki40b"].files)


def unreachable(*_: object, **__: object) -> None:
    raise ConnectionError("Name or service not known\nand more")


def test_without_a_network_there_is_one_sentence(hub: HubCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    message = r"^Cannot reach google/wiki40b on the Hugging Face hub \(ConnectionError: Name or service not known\): check the"
    with pytest.raises(LineartimeError, match=message):
        hub.identity("train")


def test_the_identity_on_the_hub_is_the_commit(hub: HubCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: "/cache/snapshots/abc123/README.md")
    assert hub.identity("train") == "google/wiki40b:train:en/train-*.parquet:abc123"


def test_without_a_network_the_last_commit_seen_counts(hub: HubCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: "/cache/snapshots/abc123/README.md")
    assert hub.identity("train") == "google/wiki40b:train:en/train-*.parquet:abc123"


def test_a_missing_package_is_named_with_its_extra(mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(LineartimeError, match=r"needs datasets.*pip install 'lineartime\[data\]'"):
        texts("wiki40b", "train")
