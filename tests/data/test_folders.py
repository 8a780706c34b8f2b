"""The files of a folder that hold text: patterns, binary files, shards, and JSON that is no text."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

import pytest

from lineartime.data import Corpus, LocalCorpus, load_corpus
from lineartime.data.folders import matches
from lineartime.errors import ArgumentError, LineartimeError

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
IDS = bytes(range(256)) * 8


def write(root: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, {name: name.encode() for name in ("a.md", "b.txt", "src/c.py", "src/deep/d.py", "notes/e.md")})
    return tmp_path


def files_of(corpus: Corpus, folder: Path) -> set[str]:
    (source,) = corpus.sources
    assert isinstance(source, LocalCorpus)
    return {part.path.relative_to(folder).as_posix() for parts in source.splits.values() for part in parts}


def chosen(folder: Path, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> set[str]:
    return files_of(load_corpus(folder, include=include, exclude=exclude), folder)


def read(corpus: Corpus) -> list[str]:
    return ["".join(document) for document in corpus.documents("all")]


def test_a_pattern_matches_names_or_paths_from_the_folder_on() -> None:
    cases = {
        "*.md": ("a.md notes/e.md", "a.mdx"),
        "notes/": ("notes/e.md", "my-notes/e.md"),
        "src/*.py": ("src/c.py", "src/deep/d.py other/src/c.py"),
        "src/**/*.py": ("src/deep/d.py src/c.py", "c.py"),
        "**/deep/**/*.py": ("src/deep/d.py deep/d.py", "src/c.py"),
        "src/*": ("src/deep/d.py", "c.py"),  # the folder src/deep
        "./src": ("src/c.py", "other/src/c.py"),
        "/c.py": ("c.py", "src/c.py"),
        "**/c.py": ("c.py src/c.py", "cc.py"),
        "a*.md": ("a.md", "archive/b.md"),
        "[ab].*": ("b.txt", "c.txt"),
    }
    for pattern, (wanted, others) in cases.items():
        assert all(matches(PurePath(path), pattern) for path in wanted.split()), pattern
        assert not any(matches(PurePath(path), pattern) for path in others.split()), pattern


def test_patterns_choose_files_and_exclude_counts_last(folder: Path) -> None:
    assert chosen(folder, include=["*.md", "*.txt"]) == {"a.md", "b.txt", "notes/e.md"}
    assert chosen(folder, exclude=["src", "*.txt"]) == {"a.md", "notes/e.md"}
    assert chosen(folder, include=["*.py"], exclude=["deep"]) == {"src/c.py"}
    (folder / "loop").symlink_to(folder)
    with pytest.raises(LineartimeError, match=r"is a link to a folder that contains it"):
        chosen(folder)
    assert chosen(folder, exclude=["loop", "src"]) == {"a.md", "b.txt", "notes/e.md"}  # an excluded folder is not read
    notes = load_corpus(folder, exclude=["*.pgn", "loop"]).notes
    assert notes == ("No file matches *.pgn, a pattern of exclude.",)


def test_patterns_that_cannot_be_meant_are_errors(folder: Path) -> None:
    with pytest.raises(ArgumentError, match=r"which holds no text with these patterns: change `include` or `exclude`"):
        load_corpus(folder, include=["*.rs"])
    with pytest.raises(ArgumentError, match=r"^exclude has an empty pattern"):
        load_corpus(folder, exclude=["/"])
    with pytest.raises(ArgumentError, match=r"^exclude is '\*.md', but must be a list, each item of which is a text"):
        load_corpus(folder, exclude="*.md")
    with pytest.raises(ArgumentError, match=r"^include is for folders, but the text is the Python standard library"):
        load_corpus(None, include=["*.py"])


def test_what_is_no_text_is_left_out_and_named(folder: Path) -> None:
    write(folder, {"b.txt": b"text " * 5000, "old.tar.gz": b"\x1f\x8b", "picture.png": PNG, "b.csv": PNG, ".git/d": b"hidden"})
    write(folder, {"src/__pycache__/c.pyc": PNG * 999})
    write(folder, {"paper.pdf": b"%PDF-1.7\n" + b"text " * 4000 + b"\xe9"})  # without a zero at its beginning
    corpus = load_corpus(folder)
    assert files_of(corpus, folder) == {"a.md", "b.txt", "src/c.py", "src/deep/d.py", "notes/e.md"}
    assert list(corpus.notes) == [
        f"Left out of {folder}, because binary files are not read: 3 files (b.csv, paper.pdf, picture.png).",
        f"Left out of {folder}, because tar archives are not read: old.tar.gz.",
    ]


def test_a_binary_file_alone_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, {"picture.png": PNG * 10})
    with pytest.raises(LineartimeError, match=r"is not UTF-8 text .* looks like a binary file"):
        read(load_corpus(tmp_path / "picture.png"))
    message = r"holds no text \(Left out of .*, because binary files are not read: picture.png\): give a text file"
    with pytest.raises(ArgumentError, match=message):
        load_corpus(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match=r"pipe, a pipe or a device, which is read only once: write it to a file"):
        load_corpus(tmp_path / "pipe")


def test_an_index_of_something_else_says_nothing_about_its_neighbours(tmp_path: Path) -> None:
    for name, content in (("index.json", b'{"a": 1}'), ("x.npy", IDS[:99]), ("book.txt", b"a text\n" * 99)):
        (tmp_path / name).write_bytes(content)
    assert "book.txt" in files_of(load_corpus(tmp_path), tmp_path)


def test_utf_16_is_not_taken_for_binary(folder: Path) -> None:
    (folder / "windows.txt").write_text("some text", encoding="utf-16")
    with pytest.raises(LineartimeError, match=r"windows.txt is not UTF-8 .*iconv -f utf-16 .* leave the file out by"):
        read(load_corpus(folder))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"train.bin": IDS, "val.bin": IDS[:99], "prepare.py": b"# encodes\n" * 99, "readme.md": b"## tokens\n" * 999},
            r"such as token files \(train.bin\): give the text that the tokens were made from, or choose files by `include`",
        ),
        ({"doc.bin": IDS, "doc.idx": b"MMIDIDX\0\0", "vocab.json": b'{"a": 1}'}, r"such as token files \(doc.bin\)"),
        (
            {"index.json": b'{"shards": []}', "shard.0.mds": IDS},
            r"such as shards of records \(shard.0.mds\): write the texts",
        ),
        (
            {"state.json": b'{"_data_files": []}', "data.arrow": IDS},
            r"such as files of save_to_disk \(data.arrow\): write",
        ),
        (
            {"00.tar": IDS, "sizes.json": b'{"00.tar": 2048}'},
            r"such as tar archives \(00.tar\): unpack them and give",
        ),
        (
            {"a.md": b"text", "img/a.png": PNG},
            r"such as binary files \(img/a.png\): leave them out, or choose files by",
        ),
    ],
)
def test_side_files_of_shards_are_not_taken_for_the_text(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    write(tmp_path, files)
    with pytest.raises(ArgumentError, match=rf"^data is .*, most of which is not read, {message}"):
        load_corpus(tmp_path)
    write(tmp_path, {"notes.rst": b"text"})
    assert chosen(tmp_path, include=["*.rst"]) == {"notes.rst"}


def test_shards_given_alone_are_an_error(tmp_path: Path) -> None:
    write(
        tmp_path, {"train.bin": IDS, "old.tar": IDS, "mds/index.json": b"{}", "mds/a.mds": IDS[:9], "mds/args.yaml": b"a: 1\n"}
    )
    with pytest.raises(ArgumentError, match=r"^data is .*mds, most of which is not read, such as shards of records \(a.mds\)"):
        load_corpus(tmp_path / "mds")
    with pytest.raises(ArgumentError, match=r"^data is .*train.bin, but token files are not read: give the text that the"):
        load_corpus(tmp_path / "train.bin")
    with pytest.raises(ArgumentError, match=r"^data is .*old.tar, but tar archives are not read: unpack them"):
        load_corpus(tmp_path / "old.tar")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("settings.json", '{"settings": [{"a": 1}, {"b": 2}], "version": 3}'),
        ("numbers.json", "[1, 2, 3]"),
        ("rows.json", '[{"a": 1}]'),
        ("rows.csv", "x,y\n1,2\n"),
    ],
)
def test_rows_without_text_are_plain_text_in_a_folder_of_other_text(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    corpus = load_corpus(folder)
    assert content in read(corpus)
    assert corpus.notes == (f'Read as plain text in {folder}, for want of records with "text": {name}.',)


def test_a_column_that_no_file_has_is_an_error(tmp_path: Path) -> None:
    """The wrong column must not train a model on braces and quotes."""
    for name, content in (("rows.json", b'[{"body": "some text"}]'), ("rows.csv", b"body\nsome text\n")):
        write(tmp_path / name, {"README.md": b"About these files.", name: content})
        with pytest.raises(ArgumentError, match=rf"^text_column is text, but .*{name}, (record|line) 1, has the columns body"):
            load_corpus(tmp_path / name)
        assert read(load_corpus(tmp_path / name, "body", include=["rows.*"])) == ["some text"]
    with pytest.raises(ArgumentError, match=r"^text_column is bodi, but .*rows.csv, line 1, has the columns body"):
        load_corpus(tmp_path, "bodi")  # also beside other text


def test_the_first_record_of_a_long_array_is_found_beyond_the_beginning(tmp_path: Path) -> None:
    text = "x" * 200_000
    (tmp_path / "books.json").write_text(json.dumps([{"text": text}, {"text": "short"}]))
    assert read(load_corpus(tmp_path)) == [text, "short"]


@pytest.mark.parametrize("name", ["a.txt", "a.parquet", "a.txt.xz"])
def test_a_pointer_of_git_lfs_is_not_text(folder: Path, name: str) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    for given in (folder, folder / name):
        with pytest.raises(LineartimeError, match=rf"{name} is a pointer of Git LFS: fetch the file itself by `git lfs pull`"):
            load_corpus(given)


def test_a_run_below_the_folder_that_it_is_trained_on_is_no_part_of_the_text(tmp_path: Path) -> None:
    for name in ("a.txt", "runs/own/metrics.jsonl", "runs/own/run.json", "runs/own/step-00000001/model.json", "other/run.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert chosen(tmp_path) == {"a.txt", "other/run.json"}


def test_a_folder_that_cannot_be_read_is_named_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Path.iterdir

    def refuse(path: Path) -> Iterator[Path]:
        if path.name == "notes":
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(LineartimeError, match=r"Cannot read .*/notes: Permission denied"):
        load_corpus(folder)
