import os
from collections.abc import Iterator
from pathlib import Path, PurePath

import pytest

from lineartime.choices import Split
from lineartime.data import ByteTokenizer, Corpus, LocalCorpus, describe_splits, load_corpus, standard_library, token_stream
from lineartime.data.readers import SPLITS
from lineartime.data.splits import split_of_path
from lineartime.errors import LineartimeError


def documents(corpus: Corpus, split: Split) -> list[str]:
    return ["".join(blocks) for blocks in corpus.documents(split)]


def test_the_embedded_corpus_is_large_split_by_file_and_always_the_same() -> None:
    corpus, again = standard_library(), standard_library()
    assert corpus == again
    paths = {split: {part.path for part in corpus.splits[split]} for split in SPLITS}
    assert not paths["train"] & paths["validation"]
    assert not paths["train"] & paths["test"]
    assert not paths["validation"] & paths["test"]
    sizes = {split: sum(path.stat().st_size for path in paths[split]) for split in SPLITS}
    total = sum(sizes.values())
    assert total > 5_000_000
    assert 0.85 < sizes["train"] / total < 0.91
    assert all(0.04 < sizes[split] / total < 0.08 for split in ("validation", "test"))


def test_adding_a_file_hardly_changes_the_splits(tmp_path: Path) -> None:
    for i in range(100):
        (tmp_path / f"{i}.txt").write_text("x" * 100)
    before = {part.path for part in load_corpus(tmp_path).splits["train"]}
    (tmp_path / "new.txt").write_text("x" * 100)
    after = {part.path for part in load_corpus(tmp_path).splits["train"]}
    assert len(before ^ after) <= 3


def test_one_file_is_split_by_position_at_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("".join(f"line {i}\n" for i in range(1000)))
    parts = [documents(load_corpus(file), split) for split in SPLITS]
    assert [len(part) for part in parts] == [1, 1, 1]
    texts = [part[0] for part in parts]
    assert "".join(texts) == file.read_text()
    assert all(text.endswith("\n") for text in texts)
    assert 0.89 < len(texts[0]) / file.stat().st_size < 0.91


def test_text_without_lines_is_cut_between_characters(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("日" * 1000)
    texts = [documents(load_corpus(tmp_path / "text.txt"), split)[0] for split in SPLITS]
    assert "".join(texts) == "日" * 1000
    assert min(map(len, texts)) > 40


def test_one_long_line_is_cut_between_characters_too(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("x" * 10_000 + "\n")
    assert min(len(documents(load_corpus(tmp_path / "text.txt"), split)[0]) for split in SPLITS) > 400


def test_empty_files_and_names_that_are_no_text_do_no_harm(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).touch()
    (tmp_path / os.fsdecode(b"\xff.txt")).write_text("line\n" * 1000)
    corpus = load_corpus(tmp_path)
    assert all(documents(corpus, split)[0] for split in SPLITS)
    token_stream(corpus, "train", ByteTokenizer(), tmp_path / "cache")


def test_a_file_with_most_of_the_bytes_is_for_training(tmp_path: Path) -> None:
    for name, size in (("a", 10), ("b", 10_000), ("c", 10), ("d", 10)):
        (tmp_path / name).write_text("x" * size)
    assert "b" in {part.path.name for part in load_corpus(tmp_path).splits["train"]}


@pytest.mark.parametrize("sizes", [[1000] * 3, [1000] * 9, [9000, 9000, *[200] * 10]])
def test_few_or_large_files_leave_most_of_the_text_for_training(sizes: list[int], tmp_path: Path) -> None:
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}.txt").write_text("line\n" * (size // 5))
    corpus = load_corpus(tmp_path)
    read = {split: sum(map(len, documents(corpus, split))) for split in SPLITS}
    assert sum(read.values()) == sum(sizes)
    assert read["train"] >= 0.8 * sum(sizes)
    assert all(0 < read[split] <= 0.1 * sum(sizes) for split in ("validation", "test"))


def test_records_of_many_small_files_are_divided_into_all_splits(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for number in range(400):
        (tmp_path / "train" / f"{number}.jsonl").write_text(f'{{"text": "{number}"}}\n')
    corpus = load_corpus(tmp_path)
    read = {split: documents(corpus, split) for split in SPLITS}
    assert sorted(int(text) for texts in read.values() for text in texts) == list(range(400))
    assert all(10 < len(read[split]) < 40 for split in ("validation", "test"))


def test_what_is_left_of_a_training_file_is_one_part(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{name} {i}"}}\n' for i in range(100)))
    corpus = load_corpus(tmp_path)
    assert len(corpus.sources[0].splits["train"]) == 1  # type: ignore[attr-defined]  # a local corpus
    assert len(documents(corpus, "train")) == 95
    assert documents(corpus, "validation") == [f"train {i}" for i in range(1, 100, 20)]
    (tmp_path / "train.jsonl").unlink()
    (tmp_path / "train.txt").write_text("".join(f"{i}\n" for i in range(1000)))
    texts = load_corpus(tmp_path)
    assert sum(map(len, documents(texts, "train") + documents(texts, "validation"))) == (tmp_path / "train.txt").stat().st_size


def test_a_file_that_is_linked_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text\n" * 100)
    (tmp_path / "b.txt").symlink_to(tmp_path / "a.txt")
    with pytest.raises(LineartimeError, match=r"data has .*a.txt twice: leave one out"):
        load_corpus(tmp_path)


def test_linked_folders_are_read_and_circles_of_links_refused(tmp_path: Path) -> None:
    (tmp_path / "books").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").write_text("text\n" * 100)
    (tmp_path / "books" / "more").symlink_to(tmp_path / "other")
    assert documents(load_corpus(tmp_path / "books"), "all") == ["text\n" * 100]
    (tmp_path / "other" / "back").symlink_to(tmp_path / "books")
    with pytest.raises(LineartimeError, match="is a link to a folder that contains it"):
        load_corpus(tmp_path / "books")


def test_folders_are_read_to_the_bottom_but_hidden_files_are_not(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("a.txt", "sub/b.txt", "sub/c.md", ".git/d", ".hidden"):
        (tmp_path / name).write_text("text\n")
    names = {part.path.name for split in load_corpus(tmp_path).splits.values() for part in split}
    assert names == {"a.txt", "b.txt", "c.md"}


def test_a_run_below_the_folder_that_it_is_trained_on_is_no_part_of_the_text(tmp_path: Path) -> None:
    for name in ("a.txt", "runs/own/metrics.jsonl", "runs/own/run.json", "runs/own/step-00000001/model.json", "other/run.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    parts = load_corpus(tmp_path).splits.values()  # type: ignore[union-attr]
    names = {part.path.relative_to(tmp_path).as_posix() for parts in parts for part in parts}
    assert names == {"a.txt", "other/run.json"}


def test_a_folder_that_cannot_be_read_is_named_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "closed").mkdir()
    read = Path.iterdir

    def refuse(folder: Path) -> Iterator[Path]:
        if folder.name == "closed":
            raise PermissionError(13, "Permission denied", str(folder))
        return read(folder)

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(LineartimeError, match=r"Cannot read .*/closed: Permission denied"):
        load_corpus(tmp_path)


def test_files_and_folders_called_like_splits_are_the_splits(tmp_path: Path) -> None:
    for name in ("train-0.txt", "train-1.txt", "valid.txt", "test/a.txt", "test/b.txt", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    corpus = load_corpus(tmp_path)
    assert documents(corpus, "train") == ["train-0.txt", "train-1.txt"]
    assert documents(corpus, "validation") == ["valid.txt"]
    assert documents(corpus, "test") == ["test/a.txt", "test/b.txt"]


PG19 = {"train/1.txt": 90, "validation/2.txt": 5, "test/training-day.txt": 99}
MODULES = {f"module{number}.py": 10 for number in range(9)}


@pytest.mark.parametrize(
    ("given", "files", "train", "held_out", "left_out"),
    [
        (
            "pg19",
            {**PG19, "metadata.csv": 20},
            ["train/1.txt"],
            ["validation/2.txt", "test/training-day.txt"],
            ["metadata.csv"],
        ),
        ("pg19", {**PG19, "all.txt": 999}, ["train/1.txt"], ["validation/2.txt", "test/training-day.txt"], ["all.txt"]),
        ("a", {"train.txt": 90, "test.txt": 9, "notes.txt": 80}, ["train.txt"], ["test.txt"], ["notes.txt"]),
        ("a", {"train.py": 9, "test_a.py": 999, **MODULES}, ["train.py", *MODULES], ["test_a.py"], []),
        ("a", {"dev-test.txt": 9, "README.md": 99, **MODULES}, [*MODULES], ["dev-test.txt"], []),
        ("a", {"test/1.txt": 90, "metadata.csv": 20}, [], ["test/1.txt"], ["metadata.csv"]),
        ("a", {"lib/a.js": 9, "test/b.js": 99}, ["lib/a.js"], ["test/b.js"], []),
        ("a", {"training/a.py": 9, "test/b.py": 9, "src/c.py": 5}, ["training/a.py", "src/c.py"], ["test/b.py"], []),
        ("a", {"test-run/train.txt": 9, "test-run/valid.txt": 9}, ["test-run/train.txt"], ["test-run/valid.txt"], []),
        ("test", {"training-day.txt": 9, **MODULES}, [], ["training-day.txt", *MODULES], []),
        ("test", {"dev.py": 9, **MODULES}, [], ["dev.py", *MODULES], []),
    ],
)
def test_what_is_named_for_testing_is_never_trained_on(
    tmp_path: Path, given: str, files: dict[str, int], train: list[str], held_out: list[str], left_out: list[str]
) -> None:
    root = tmp_path / given
    for name, size in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x" * size)
    corpus = load_corpus(root)
    assert isinstance(corpus, LocalCorpus)
    found = {split: {part.path.relative_to(root).as_posix() for part in parts} for split, parts in corpus.splits.items()}
    assert found.get("train", set()) == set(train)
    assert (found.get("validation", set()) | found.get("test", set())) - set(train) == set(held_out)
    assert list(corpus.notes) == [
        f"Left out of {root}, because the names of other files state the splits: {name}." for name in left_out
    ]


def test_a_name_for_training_among_others_means_nothing(tmp_path: Path) -> None:
    names = [name.ljust(16) for name in ("training-day.txt", *MODULES)]
    for name in names:
        (tmp_path / name.rstrip()).write_text(name)
    corpus = load_corpus(tmp_path)
    assert sorted(text for split in SPLITS for text in documents(corpus, split)) == sorted(names)
    assert all(documents(corpus, split) for split in SPLITS)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("wikitext2_train.txt.xz", "train"),
        ("wiki.valid.tokens", "validation"),
        ("enwik8-dev.txt", "validation"),
        ("val2.txt", "validation"),
        ("Testing.TXT", "test"),
        ("test/part-0.jsonl", "test"),
        ("wiki_test/en/part-0.jsonl", "test"),
        ("training_notes.txt", "train"),
        ("training_data/test.txt", "test"),
        ("test/train-robbery.txt", "test"),
        ("test-run/train.txt", "train"),
        ("dev-test.txt", "test"),
        ("latest.txt", None),
        ("contest", None),
        ("tests/a.txt", None),
        ("constrain.txt", None),
        ("devices.txt", None),
        ("étest.txt", None),
        ("train-test.txt", None),
    ],
)
def test_a_split_is_a_whole_word_in_the_nearest_name_or_held_out_in_any(name: str, split: Split | None) -> None:
    assert split_of_path(PurePath(name)) == split


@pytest.mark.parametrize("pattern", ["wikitext2_{}.txt", "wiki.{}.tokens", "data-{}/part-0.txt"])
def test_files_with_splits_within_their_names_are_not_dealt_out_by_hash(tmp_path: Path, pattern: str) -> None:
    for word in ("train", "valid", "test"):
        file = tmp_path / pattern.format(word)
        file.parent.mkdir(exist_ok=True)
        file.write_text(word)
    assert [documents(load_corpus(tmp_path), split) for split in SPLITS] == [["train"], ["valid"], ["test"]]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("test.txt", "test.txt"),
        ("folder/test.txt", "folder"),
        ("folder/my_test_0.txt", "folder"),
        ("test/a.txt", "test"),
        ("folder/test/en/a.txt", "folder"),
    ],
)
def test_a_text_that_is_a_test_split_is_all_of_it_and_nothing_else(tmp_path: Path, name: str, given: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("line\n" * 100)
    corpus = load_corpus(tmp_path / given)
    assert documents(corpus, "test") == documents(corpus, "all") == ["line\n" * 100]
    with pytest.raises(LineartimeError, match=r"^data is .*, which, .* file names, has a test split but no train split: give"):
        corpus.identity("train")
    with pytest.raises(LineartimeError, match=r"but no validation split: choose an existing split, or all"):
        list(corpus.documents("validation"))


def test_a_file_called_train_still_has_something_held_out(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for name in ("train.txt", "train/a.txt"):
        (tmp_path / name).write_text("line\n" * 100)
        corpus = load_corpus((tmp_path / name) if name == "train.txt" else tmp_path / "train")
        assert [len(documents(corpus, split)[0]) for split in SPLITS] == [455, 25, 20]


def test_folders_of_splits_may_be_given_one_by_one(tmp_path: Path) -> None:
    for folder in ("train", "test"):
        (tmp_path / folder).mkdir()
        for number in range(3):
            (tmp_path / folder / f"part{number}.txt").write_text(f"{folder} {number}\n" * 100)
    apart = load_corpus([tmp_path / "train", tmp_path / "test"])
    assert documents(apart, "test") == documents(load_corpus(tmp_path), "test")
    assert all("test" in text for text in documents(apart, "test"))
    assert all("train" in text for split in ("train", "validation") for text in documents(apart, split))  # type: ignore[arg-type]


def test_a_folder_that_happens_to_have_test_in_its_name_is_a_text_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "my-test").mkdir()
    (tmp_path / "my-test" / "a.txt").write_text("line\n" * 100)
    assert len(documents(load_corpus(tmp_path / "my-test"), "train")[0]) == 455


def test_a_split_that_is_not_named_is_said_to_be_part_of_the_training_files(tmp_path: Path) -> None:
    for name in ("test.txt", "train.txt"):
        (tmp_path / name).write_text(name)
    assert describe_splits(load_corpus(tmp_path)) == [
        "train:      95% of train.txt",
        "validation: 5% of train.txt",
        "test:       test.txt",
    ]


def test_all_is_every_file_once_and_whole(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).write_text(f"{name}\n" * 50)
    corpus = load_corpus(tmp_path)
    assert sorted(documents(corpus, "all")) == [f"{name}\n" * 50 for name in "abcd"]
    assert documents(load_corpus(tmp_path / "a"), "all") == ["a\n" * 50]
    assert corpus.identity("all") != corpus.identity("train")


def test_several_texts_are_put_together_split_by_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        Path(name).write_text(name[0] * 1000)
    Path("test.txt").write_text("test")
    corpus = load_corpus(["a.txt", Path("b.txt"), "test.txt"])
    assert documents(corpus, "train") == ["a" * 900, "b" * 900]
    assert documents(corpus, "test") == ["test", "a" * 50, "b" * 50]
    assert documents(corpus, "all") == ["test", "a" * 1000, "b" * 1000]
    assert corpus.name == "test.txt, a.txt, b.txt"
    assert describe_splits(corpus)[2] == "test:       test.txt + 5% of a.txt + 5% of b.txt"
    assert corpus.identity("train") != load_corpus("a.txt").identity("train")
    for twice in (["a.txt", "a.txt"], [".", "a.txt"], ["test.txt", Path("test.txt")], ["c4", "c4"]):
        with pytest.raises(LineartimeError, match=r"^data has .*(a.txt|test.txt|c4) twice: leave one out"):
            load_corpus(twice)


def test_files_given_one_by_one_with_the_names_of_splits_are_one_folder(tmp_path: Path) -> None:
    for word in ("train", "valid", "test"):
        (tmp_path / f"wiki.{word}.txt").write_text(word)
    corpus = load_corpus([tmp_path / f"wiki.{word}.txt" for word in ("train", "valid", "test")])
    assert [documents(corpus, split) for split in SPLITS] == [["train"], ["valid"], ["test"]]


def test_a_column_of_a_text_without_columns_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.jsonl").write_text('{"body": "text"}\n')
    with pytest.raises(LineartimeError, match=r"^text_column is body, but .*a.txt has no columns: leave it at text"):
        load_corpus(tmp_path / "a.txt", "body")
    assert documents(load_corpus([tmp_path / "a.txt", tmp_path / "a.jsonl"], "body"), "all") == ["text", "text"]


@pytest.mark.parametrize("given", ["validation", "test"])
def test_a_split_that_is_missing_is_taken_from_the_training_files(tmp_path: Path, given: Split) -> None:
    lines = [f"line {i}\n" for i in range(100)]
    (tmp_path / "train.txt").write_text("".join(lines))
    (tmp_path / f"{given}.txt").write_text("given")
    corpus = load_corpus(tmp_path)
    assert documents(corpus, given) == ["given"]
    other: Split = "test" if given == "validation" else "validation"
    taken = documents(corpus, other)[0].splitlines(keepends=True)
    left = "".join(documents(corpus, "train")).splitlines(keepends=True)
    assert 3 <= len(taken) <= 7
    assert sorted(taken + left) == sorted(lines)


def test_nothing_to_read_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(LineartimeError, match="holds no text: give a text file or a folder"):
        load_corpus(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(LineartimeError, match="holds no text"):
        load_corpus(tmp_path / "empty.txt")
    with pytest.raises(LineartimeError, match=r"^data is .*missing, which is neither a file or folder nor the name of"):
        load_corpus(tmp_path / "missing")


def test_an_unknown_corpus_is_an_error_that_lists_the_names() -> None:
    with pytest.raises(
        LineartimeError, match=r"^data is wiki41b, which is neither .*: c4, enwik8, pg19, text8, trivia_qa, wiki40b"
    ):
        load_corpus("wiki41b")


def test_a_file_that_is_called_like_a_corpus_is_chosen_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c4").write_text("line\n" * 100)
    assert documents(load_corpus("./c4"), "validation")[0].startswith("line")
    assert documents(load_corpus(Path("c4")), "validation")[0].startswith("line")
    assert load_corpus("c4").name == "c4"


@pytest.mark.parametrize("folder", ["here", "mirror"])
def test_enwik8_is_split_by_position_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path if folder == "here" else tmp_path / "empty")
    monkeypatch.setenv("LINEARTIME_MIRROR", str(tmp_path))
    (tmp_path / "enwik8").write_text("ab\n" * 1000)
    corpus = load_corpus("enwik8")
    assert [len(documents(corpus, split)[0]) for split in SPLITS] == [2700, 150, 150]


def test_text8_is_read_from_its_zip_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    monkeypatch.chdir(tmp_path)
    with pytest.raises(LineartimeError, match=r"no file text8 or text8.zip here: download http"):
        load_corpus("text8")
    with zipfile.ZipFile("text8.zip", "w") as archive:
        archive.writestr("text8", "é" * 500)
    assert [len(documents(load_corpus("text8"), split)[0]) for split in SPLITS] == [450, 25, 25]


def test_the_identity_of_a_split_follows_its_files(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("text\n" * 100)
    before = {split: load_corpus(file).identity(split) for split in SPLITS}
    assert len(set(before.values())) == 3
    assert load_corpus(file).identity("train") == before["train"]
    os.utime(file, ns=(1, 1))
    assert load_corpus(file).identity("train") != before["train"]
