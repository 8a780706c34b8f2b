"""Corpora and their splits: by names of files and folders, by file, within files, and of several texts together."""

import os
import zipfile
from pathlib import Path, PurePath

import pytest

from lineartime.choices import Split
from lineartime.data import ByteTokenizer, Corpus, LocalCorpus, describe_splits, load_corpus, token_stream
from lineartime.data.corpora import standard_library
from lineartime.data.folders import split_of_path
from lineartime.data.readers import SPLITS
from lineartime.errors import LineartimeError

from .conftest import documents, write


def files(corpus: Corpus) -> dict[Split, list[Path]]:
    (source,) = corpus.sources
    assert isinstance(source, LocalCorpus)
    return {split: [part.path for part in parts] for split, parts in source.splits.items()}


def write_names(root: Path, *names: str) -> None:
    """Write texts of the same lines, each of which is the name of its file."""
    write(root, {name: f"{name}\n" * 100 for name in names})


def test_the_standard_library_is_large_and_split_by_file() -> None:
    paths = {split: set(found) for split, found in files(standard_library()).items()}
    assert len(set.union(*paths.values())) == sum(map(len, paths.values()))
    sizes = {split: sum(path.stat().st_size for path in found) for split, found in paths.items()}
    assert sum(sizes.values()) > 5_000_000
    shares = {split: size / sum(sizes.values()) for split, size in sizes.items()}
    assert 0.85 < shares["train"] < 0.91
    assert all(0.04 < shares[split] < 0.08 for split in ("validation", "test"))


def test_files_keep_their_splits_when_another_is_added(tmp_path: Path) -> None:
    write_names(tmp_path, *(f"{i:02}.txt" for i in range(40)))
    held_out = {split: [path.stem for path in found] for split, found in files(load_corpus(tmp_path)).items()}
    assert held_out["test"] == ["14", "21"]  # as ever: what was held out must not be trained on later
    assert held_out["validation"] == ["15", "09"]
    write_names(tmp_path, "new.txt")
    after = files(load_corpus(tmp_path))["train"]
    assert len({path.stem for path in after} ^ {*held_out["train"], "new"}) <= 2


def test_empty_files_and_names_that_are_no_text_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / os.fsdecode(b"\xff.txt")).write_text("line\n" * 1000)
    corpus = load_corpus(tmp_path)
    assert all(documents(corpus, split)[0] for split in SPLITS)
    token_stream(corpus, "train", ByteTokenizer(), tmp_path / "cache")


@pytest.mark.parametrize("sizes", [[1000] * 3, [1000] * 9, [9000, 9000, *[200] * 10], [10, 10_000, 10, 10]])
def test_few_or_large_files_leave_most_of_the_text_for_training(sizes: list[int], tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path, {f"{number}.txt": "line\n" * (size // 5) for number, size in enumerate(sizes)}))
    read = {split: sum(map(len, documents(corpus, split))) for split in SPLITS}
    assert sum(read.values()) == sum(sizes)
    assert read["train"] >= 0.8 * sum(sizes)
    assert all(0 < read[split] <= 0.1 * sum(sizes) for split in ("validation", "test"))


def test_a_missing_split_takes_records_of_the_files_for_training(tmp_path: Path) -> None:
    rows = {f"{name}.jsonl": "".join(f'{{"text": "{name} {i}"}}\n' for i in range(100)) for name in ("train", "test")}
    corpus = load_corpus(write(tmp_path, rows))
    assert files(corpus)["train"] == [tmp_path / "train.jsonl"]  # what is left of it is one part
    train, validation = (documents(corpus, split) for split in ("train", "validation"))
    assert sorted(train + validation) == sorted(f"train {i}" for i in range(100))
    assert 1 <= len(validation) <= 10
    many = write(tmp_path / "many", {f"train/{number}.jsonl": f'{{"text": "{number}"}}\n' for number in range(400)})
    read = {split: documents(load_corpus(many), split) for split in SPLITS}
    assert sorted(int(text) for texts in read.values() for text in texts) == list(range(400))
    assert all(10 < len(read[split]) < 40 for split in ("validation", "test"))


def test_links_are_followed_but_not_to_what_is_read_anyway(tmp_path: Path) -> None:
    write_names(tmp_path, "other/a.txt")
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "more").symlink_to(tmp_path / "other")
    assert documents(load_corpus(tmp_path / "books"), "all") == ["other/a.txt\n" * 100]
    (tmp_path / "books" / "b.txt").symlink_to(tmp_path / "other" / "a.txt")
    with pytest.raises(LineartimeError, match=r"data has .*a.txt twice: leave one out"):
        load_corpus(tmp_path / "books")


PG19 = {"train/1.txt": 90, "validation/2.txt": 5, "test/training-day.txt": 99}
MODULES = {f"module{number}.py": 10 for number in range(9)}


@pytest.mark.parametrize(
    ("given", "sizes", "train", "held_out", "left_out"),
    [
        ("pg19", {**PG19, "metadata.csv": 20}, ["train/1.txt"], ["validation/2.txt", "test/training-day.txt"], "metadata.csv"),
        ("a", {"train.txt": 90, "test.txt": 9, "notes.txt": 80}, ["train.txt"], ["test.txt"], "notes.txt"),
        ("a", {"train.py": 9, "test_a.py": 999, **MODULES}, ["train.py", *MODULES], ["test_a.py"], ""),
        ("a", {"dev-test.txt": 9, "README.md": 99, **MODULES}, [*MODULES], ["dev-test.txt"], ""),
        ("a", {"test/1.txt": 90, "metadata.csv": 20}, [], ["test/1.txt"], "metadata.csv"),
        ("a", {"train/a.txt": 90, "eval/a.txt": 20}, ["train/a.txt"], ["eval/a.txt"], ""),
        ("a", {"training/a.py": 9, "test/b.py": 9, "src/c.py": 5}, ["training/a.py", "src/c.py"], ["test/b.py"], ""),
        ("a", {"test-run/train.txt": 9, "test-run/valid.txt": 9}, ["test-run/train.txt"], ["test-run/valid.txt"], ""),
        ("test", {"training-day.txt": 9, "dev.py": 9, **MODULES}, [], ["training-day.txt", "dev.py", *MODULES], ""),
    ],
)
def test_what_is_named_for_testing_is_never_trained_on(
    tmp_path: Path, given: str, sizes: dict[str, int], train: list[str], held_out: list[str], left_out: str
) -> None:
    root = write(tmp_path / given, {name: "x" * size for name, size in sizes.items()})
    corpus = load_corpus(root)
    found = {split: {path.relative_to(root).as_posix() for path in paths} for split, paths in files(corpus).items()}
    assert found.get("train", set()) == set(train)
    assert (found.get("validation", set()) | found.get("test", set())) - set(train) == set(held_out)
    note = f"Left out of {root}, because the names of other files state the splits: {left_out}."
    assert corpus.notes == ((note,) if left_out else ())


def test_a_split_is_a_whole_word_in_the_nearest_name_or_held_out_in_any() -> None:
    names: dict[Split | None, str] = {
        "train": "wikitext2_train.txt.xz training_notes.txt test-run/train.txt trainset.csv train-data/a.csv",
        "validation": "wiki.valid.tokens enwik8-dev.txt val2.txt valset.csv validate.csv dev_set/train-robbery.txt eng.testa",
        "test": "Testing.TXT test/part-0.jsonl wiki_test/en/0.jsonl training_data/test.txt test/train-robbery.txt dev-test.txt "
        "eval.jsonl evaluation/train.txt holdout.csv heldout held-out/train.txt held_out.csv testset.csv test-set/train.txt",
        None: "latest.txt contest tests/a.txt constrain.txt devices.txt étest.txt train-test.txt retrieval.txt medieval/a.txt "
        "evaluator.py invalid.txt validated.tsv household.txt dataset.txt primeval-evaluations.txt",
    }
    assert {split: [split_of_path(PurePath(name)) for name in given.split()] for split, given in names.items()} == {
        split: [split] * len(given.split()) for split, given in names.items()
    }


@pytest.mark.parametrize(("name", "given"), [("test.txt",) * 2, ("test/a.txt", "test"), ("folder/test/en/a.txt", "folder")])
def test_a_text_that_is_a_test_split_is_all_of_it_and_nothing_else(tmp_path: Path, name: str, given: str) -> None:
    write_names(tmp_path, name)
    corpus = load_corpus(tmp_path / given)
    assert documents(corpus, "test") == documents(corpus, "all") == [f"{name}\n" * 100]
    with pytest.raises(LineartimeError, match=r"^data is .*, which, .* file names, has a test split but no train split: give"):
        corpus.identity("train")
    with pytest.raises(LineartimeError, match=r"but no validation split: choose an existing split, or all"):
        list(corpus.documents("validation"))


def test_a_text_that_is_named_for_training_alone_is_divided(tmp_path: Path) -> None:
    write_names(tmp_path, "train.txt", "train/a.txt", "my-test/a.txt")
    for given in ("train.txt", "train", "my-test"):
        sizes = [len(documents(load_corpus(tmp_path / given), split)[0]) for split in SPLITS]
        assert all(sizes)
        assert 0.89 < sizes[0] / sum(sizes) < 0.93
    write_names(tmp_path / "books", "training-day.txt", *MODULES)
    corpus = load_corpus(tmp_path / "books")  # in which that is a name like the others
    assert sorted(documents(corpus, "all")) == sorted(f"{name}\n" * 100 for name in ("training-day.txt", *MODULES))
    assert all(documents(corpus, split) for split in SPLITS)


def test_texts_with_the_names_of_splits_are_one_folder(tmp_path: Path) -> None:
    names = [f"wiki.{word}.txt" for word in ("train", "valid", "test")]
    write_names(tmp_path / "a", *names)
    for given in ([tmp_path / "a" / name for name in names], tmp_path / "a"):
        assert [documents(load_corpus(given), split) for split in SPLITS] == [[f"{name}\n" * 100] for name in names]
    write_names(tmp_path, "train/1.txt", "train/2.txt", "test/1.txt")
    apart = load_corpus([tmp_path / "train", tmp_path / "test"])
    assert describe_splits(apart) == [
        "train:      95% of 2 files (1.txt, 2.txt)",
        "validation: 5% of 2 files (1.txt, 2.txt)",
        "test:       1.txt",
    ]
    assert documents(apart, "test") == ["test/1.txt\n" * 100]


def test_several_texts_are_put_together_split_by_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"a.txt": "a" * 1000, "b.txt": "b" * 1000, "test.txt": "test"})
    corpus = load_corpus(["a.txt", Path("b.txt"), "test.txt"])
    assert documents(corpus, "train") == ["a" * 900, "b" * 900]
    assert documents(corpus, "test") == ["test", "a" * 50, "b" * 50]
    assert documents(corpus, "all") == ["test", "a" * 1000, "b" * 1000]
    assert corpus.name == "test.txt, a.txt, b.txt"
    assert describe_splits(corpus)[2] == "test:       test.txt + 5% of a.txt + 5% of b.txt"
    repeated: list[list[str | Path]] = [["a.txt", "a.txt"], [".", "a.txt"], ["test.txt", Path("test.txt")], ["c4", "c4"]]
    for twice in repeated:
        with pytest.raises(LineartimeError, match=r"^data has .*(a.txt|test.txt|c4) twice: leave one out"):
            load_corpus(twice)


def test_a_column_of_a_text_without_columns_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "text", "a.jsonl": '{"body": "text"}\n'})
    with pytest.raises(LineartimeError, match=r"^text_column is body, but .*a.txt has no columns: leave it at text"):
        load_corpus(tmp_path / "a.txt", "body")
    assert documents(load_corpus([tmp_path / "a.txt", tmp_path / "a.jsonl"], "body"), "all") == ["text", "text"]


def test_a_text_that_is_not_there_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    cases: dict[str | Path, str] = {
        tmp_path: r"holds no text: give a text file or a folder",
        tmp_path / "empty.txt": "holds no text",
        "": "^data is empty: ",
        "wiki41b": r"^data is wiki41b, which is neither .* corpus \(did you mean wiki40b\?\): c4, enwik8, pg19, text8",
    }
    for given, message in cases.items():
        with pytest.raises(LineartimeError, match=message):
            load_corpus(given)


def test_a_file_that_is_called_like_a_corpus_is_chosen_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c4").write_text("line\n" * 100)
    assert documents(load_corpus("./c4"), "validation")[0].startswith("line")
    assert documents(load_corpus(Path("c4")), "validation")[0].startswith("line")
    assert load_corpus("c4").describe("train") == "en/c4-train.*.json.gz of allenai/c4"


def test_enwik8_and_text8_are_split_by_position_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(LineartimeError, match=r"no file text8 or text8.zip here: download http"):
        load_corpus("text8")
    (tmp_path / "enwik8").write_text("ab\n" * 1000)
    with zipfile.ZipFile(tmp_path / "text8.zip", "w") as archive:
        archive.writestr("text8", "é" * 500)
    monkeypatch.chdir(tmp_path)
    assert [len(documents(load_corpus("enwik8"), split)[0]) for split in SPLITS] == [2700, 150, 150]
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setenv("LINEARTIME_MIRROR", str(tmp_path))
    assert [len(documents(load_corpus("text8"), split)[0]) for split in SPLITS] == [450, 25, 25]


def test_the_identity_of_a_split_follows_its_files(tmp_path: Path) -> None:
    write_names(tmp_path, "a.txt")
    before = [load_corpus(tmp_path / "a.txt").identity(split) for split in SPLITS]
    assert len(set(before)) == 3
    assert [load_corpus(tmp_path / "a.txt").identity(split) for split in SPLITS] == before
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    assert load_corpus(tmp_path / "a.txt").identity("train") != before[0]
