import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from lineartime.choices import Split
from lineartime.data import describe_splits, load_corpus
from lineartime.data.hub import HUB
from lineartime.data.readers import SPLITS
from lineartime.errors import LineartimeError

from .conftest import documents, write

ARTICLE = (
    "\n_START_ARTICLE_\nKaliningrad\n_START_PARAGRAPH_\nIt is a city._NEWLINE_It has a port.\n_START_SECTION_\nHistory\n"
    "_START_PARAGRAPH_\nIt is old."
)
LINES = ["", " = First = \n", "", " It begins . \n", " = = Part = = \n", "", " = Second = \n", " It ends . \n"]


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".gz":
        file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


@pytest.fixture(name="mirror")
def filled_mirror(mirror: Path) -> Path:
    """Repositories of a few rows with the columns and file names of the hub, and data sets that have no name of their own."""
    for split in SPLITS:
        for shard in range(2):
            rows: list[dict[str, Any]] = [{"wikidata_id": "Q1", "text": ARTICLE.replace("city", f"{split} {shard}")}]
            write_rows(mirror / f"google/wiki40b/en/{split}-{shard:05d}-of-00002.parquet", rows)
        rows = [{"short_book_title": f"Book {i}", "text": f"{split} book {i} "} for i in range(3)]
        write_rows(mirror / f"emozilla/pg19/data/{split}-00000-of-00001.parquet", rows)
        for config in ("wikitext-103-raw-v1", "wikitext-2-raw-v1"):
            rows = [{"text": line} for line in LINES]
            write_rows(mirror / f"Salesforce/wikitext/{config}/{split}-00000-of-00001.parquet", rows)
    for split, shards in (("train", 3), ("validation", 2)):
        for shard in range(shards):
            rows = [{"text": f"{split} {shard}.{i}", "url": "http://c"} for i in range(3)]
            write_rows(mirror / f"allenai/c4/en/c4-{split}.{shard:05d}-of-{shards:05d}.json.gz", rows)
        write_rows(mirror / f"org/stories/data/{split}-00000-of-00001.parquet", [{"body": f"{split} {i}"} for i in range(100)])
    for config in ("en", "de"):
        write_rows(mirror / f"org/articles/{config}/train-00000-of-00001.parquet", [{"text": config}])
        write_rows(mirror / f"org/articles/{config}/test_matched-00000-of-00001.parquet", [{"text": f"{config} test"}])
    published = {"train": "train", "dev": "test", "test_matched": "test", "test_other": "train", "unlabelled": "train"}
    configs = [
        {
            "config_name": f"lang-{config}",
            "data_files": [{"split": split, "path": f"{config}/{name}*"} for split, name in published.items()],
        }
        for config in ("en", "de")
    ]
    (mirror / "org/articles/README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n")  # JSON is YAML
    write_rows(mirror / "plain/rows.parquet", [{"text": f"row {i}"} for i in range(200)])
    return mirror


def texts(name: str, split: Split) -> list[str]:
    return documents(load_corpus(name), split)


@pytest.mark.usefixtures("mirror")
def test_each_corpus_has_its_own_documents() -> None:
    for split in SPLITS:
        expected = "Kaliningrad\nIt is a {}.\nIt has a port.\n\nHistory\nIt is old.\n"
        assert texts("wiki40b", split) == [expected.format(f"{split} {shard}") for shard in range(2)]
    assert texts("pg19", "test") == [f"test book {i} " for i in range(3)]
    assert texts("c4", "train") == [f"train {shard}.{i}" for shard in range(3) for i in range(3)]
    assert texts("c4", "validation") == ["validation 0.0", "validation 0.2", "validation 1.1"]
    assert texts("c4", "test") == ["validation 0.1", "validation 1.0", "validation 1.2"]
    assert load_corpus("c4").identity("test") != load_corpus("c4").identity("validation")


@pytest.mark.usefixtures("mirror")
def test_the_lines_of_wikitext_are_joined_into_articles() -> None:
    for name in ("wikitext", "hub:Salesforce/wikitext/wikitext-2-raw-v1"):
        assert texts(name, "test") == [
            " \n",
            " = First = \n \n It begins . \n = = Part = = \n \n",
            " = Second = \n It ends . \n",
        ]
    with pytest.raises(LineartimeError, match=r"text_column is line, but hub:Salesforce/.* has no columns: leave it at text"):
        load_corpus("hub:Salesforce/wikitext/wikitext-2-raw-v1", "line")


@pytest.mark.parametrize(
    ("name", "file"),
    [("wiki40b", "google/wiki40b/en/train-00001-of-00002.parquet"), ("c4", "allenai/c4/en/c4-train.00001-of-00003.json.gz")],
)
def test_a_file_that_is_cut_off_is_an_error_of_one_sentence(mirror: Path, name: str, file: str) -> None:
    (mirror / file).write_bytes((mirror / file).read_bytes()[:-9])
    with pytest.raises(LineartimeError, match=rf"^Cannot read {name} \(.+\): check its files or the network") as caught:
        texts(name, "train")
    assert "\n" not in str(caught.value)


def test_the_identity_on_the_hub_is_the_newest_commit_or_the_last_that_was_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LINEARTIME_MIRROR", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    corpus = replace(HUB["wiki40b"])  # which has not looked for it yet
    with pytest.raises(LineartimeError, match=r"^Cannot reach google/wiki40b on the Hugging Face hub \(.+\): check the"):
        corpus.identity("train")
    write(tmp_path / "datasets--google--wiki40b", {"refs/main": "a1" * 20, f"snapshots/{'a1' * 20}/README.md": ""})
    assert corpus.identity("train") == f"google/wiki40b:train:en/train-*.parquet:{'a1' * 20}"


@pytest.mark.usefixtures("mirror")
def test_any_data_set_of_the_hub_is_read_by_its_name() -> None:
    corpus = load_corpus("hub:org/stories", "body")
    assert documents(corpus, "validation") == [f"validation {i}" for i in range(100)]
    train, test = documents(corpus, "train"), documents(corpus, "test")
    assert 1 <= len(test) <= 10
    assert sorted(train + test) == sorted(f"train {i}" for i in range(100))
    assert len(documents(corpus, "all")) == 200
    assert describe_splits(corpus) == [
        "train:      95% of split train of hub:org/stories",
        "validation: split validation of hub:org/stories",
        "test:       5% of split train of hub:org/stories",
    ]


@pytest.mark.usefixtures("mirror")
def test_the_third_part_of_a_name_is_a_configuration() -> None:
    corpus = load_corpus("hub:org/articles/lang-de")
    assert [documents(corpus, split) for split in SPLITS] == [["de"], ["de test"], ["de test", "de"]]
    assert documents(load_corpus("hub:org/articles/en"), "test") == ["en test"]  # of a mirror, a folder will do
    message = "^data is hub:org/articles{}, but must name one of the configurations lang-en, lang-de: hub:org/articles/lang-en."
    for wrong in ("", "/lang-fr"):
        with pytest.raises(LineartimeError, match=message.format(wrong)):
            documents(load_corpus(f"hub:org/articles{wrong}"), "train")
    for name in ("hub:", "hub:org/", "hub:a/b/c/d"):
        with pytest.raises(LineartimeError, match=f"^data is {name}, but must be hub:ORG/NAME or hub:ORG/NAME/CONFIG"):
            load_corpus(name)


@pytest.mark.usefixtures("mirror")
def test_documents_are_held_out_of_a_data_set_without_splits_wherever_they_stand() -> None:
    parts = [texts("hub:plain", split) for split in SPLITS]
    assert [len(part) for part in parts] == [182, 11, 7]
    assert sorted(text for part in parts for text in part) == sorted(f"row {i}" for i in range(200))


def test_a_column_that_a_data_set_lacks_is_named_with_those_it_has(mirror: Path) -> None:
    with pytest.raises(LineartimeError, match=r"^text_column is text, but hub:org/stories has the columns body: name the one"):
        documents(load_corpus("hub:org/stories"), "validation")
    write_rows(mirror / "org/chat/train.parquet", [{"text": ["a", "b"]}])
    with pytest.raises(LineartimeError, match=r'^hub:org/chat has \[.* in "text" instead of a text: choose another column'):
        documents(load_corpus("hub:org/chat"), "all")


def test_the_identity_follows_the_files_of_the_split_and_the_column(mirror: Path) -> None:
    corpora = [load_corpus("wiki40b"), *(load_corpus("hub:org/stories", column) for column in ("text", "body"))]
    before = [{split: corpus.identity(split) for split in SPLITS} for corpus in corpora]
    assert len({identity for each in before for identity in each.values()}) == 9
    write_rows(mirror / "google/wiki40b/en/train-00001-of-00002.parquet", [{"text": "other"}])
    write_rows(mirror / "org/stories/data/train-00000-of-00001.parquet", [{"body": "other"}])
    assert all(corpus.identity("train") != each["train"] for corpus, each in zip(corpora, before, strict=True))
    assert corpora[0].identity("test") == before[0]["test"]


def test_a_data_set_is_asked_of_the_hub_at_the_newest_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def splits(*arguments: Any, **options: Any) -> list[str]:
        asked.append((arguments, options))
        return ["train", "test"]

    def load(*arguments: Any, **options: Any) -> list[dict[str, str | None]]:
        asked.append((arguments, options))
        return [{"text": "a"}, {"text": None}]

    monkeypatch.delenv("LINEARTIME_MIRROR", raising=False)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: "/cache/snapshots/abc123/.gitattributes")
    monkeypatch.setattr(datasets, "get_dataset_split_names", splits)
    monkeypatch.setattr(datasets, "load_dataset", load)
    corpus = load_corpus("hub:org/name/config")
    assert documents(corpus, "test") == ["a"]
    assert asked == [
        (("org/name", "config"), {"revision": "abc123"}),
        (("org/name",), {"name": "config", "revision": "abc123", "split": "test", "streaming": True}),
    ]
    assert corpus.identity("test") == "hub:org/name/config:text:test:abc123"


def test_a_data_set_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LINEARTIME_MIRROR", raising=False)
    corpus = load_corpus("hub:org/name")
    message = r"^Cannot reach org/name on the Hugging Face hub \(.+\): check the name and the network, or set"
    for ask in (lambda: corpus.identity("train"), lambda: documents(corpus, "train")):
        with pytest.raises(LineartimeError, match=message):
            ask()
    assert describe_splits(corpus)[0] == "train:      hub:org/name"
