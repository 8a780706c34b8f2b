"""The files of a folder that hold text: patterns, binary files, and columns that no file has."""

import os
from collections.abc import Sequence
from pathlib import Path, PurePath

import pytest

from lineartime.data import LocalCorpus, load_corpus
from lineartime.data.folders import matches
from lineartime.errors import ArgumentError, LineartimeError

from .conftest import documents, write

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
IDS = bytes(range(256)) * 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path, {name: name for name in ("a.md", "b.txt", "src/c.py", "src/deep/d.py", "notes/e.md")})


def chosen(folder: Path, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> set[str]:
    (source,) = load_corpus(folder, include=include, exclude=exclude).sources
    assert isinstance(source, LocalCorpus)
    return {part.path.relative_to(folder).as_posix() for parts in source.splits.values() for part in parts}


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
        "[ab]*.md": ("a.md", "c.md archive/c.txt"),
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
    with pytest.raises(ArgumentError, match=r"which holds no text with these patterns: give a text file"):
        load_corpus(folder, include=["*.rs"])
    with pytest.raises(ArgumentError, match=r"^exclude has an empty pattern"):
        load_corpus(folder, exclude=["/"])
    with pytest.raises(ArgumentError, match=r"^exclude is '\*.md', but must be a list, each item of which is a text"):
        load_corpus(folder, exclude="*.md")
    with pytest.raises(ArgumentError, match=r"^include is for folders, but the text is wiki40b"):
        load_corpus("wiki40b", include=["*.py"])


def test_what_is_no_text_is_left_out_and_named(folder: Path) -> None:
    texts = {*chosen(folder), "other/run.json"}  # which is no run
    write(folder, {"b.txt": b"text " * 5000, "other/run.json": b"{}", "old.tar": PNG, "picture.png": PNG, ".git/d": b"hidden"})
    write(folder, {"paper.pdf": b"%PDF-1.7\n" + b"text " * 400 + b"\xe9"})  # without a zero at its beginning
    write(folder, {"src/__pycache__/c.pyc": PNG * 999, "runs/a/run.json": b"{}", "runs/a/step-00000001/model.json": b"{}"})
    assert chosen(folder) == texts
    assert load_corpus(folder).notes == (
        f"Left out of {folder}, because binary files are not read: 3 files (old.tar, paper.pdf, picture.png).",
    )


def test_a_binary_file_alone_or_most_of_a_folder_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, {"alone/picture.png": PNG * 10, "ids/train.bin": IDS, "ids/prepare.py": b"# encodes\n"})
    write(tmp_path, {"ids/README.md": b"## about\n" * 999})
    os.mkfifo(tmp_path / "pipe")
    for name, message in {
        "alone/picture.png": r"is not UTF-8 text .*: convert a text",
        "alone": r"holds no text \(Left out of .*, because binary files are not read: picture.png\): give a text file",
        "ids": r"^data is .*, most of which is binary, such as train.bin: give text, or choose files by `include`",
        "pipe": r"pipe, which is neither a file nor a folder: write the text to a file",
    }.items():
        with pytest.raises(LineartimeError, match=message):
            documents(load_corpus(tmp_path / name))
    assert chosen(tmp_path / "ids", include=["*.md"]) == {"README.md"}


def test_utf_16_is_not_taken_for_binary(folder: Path) -> None:
    (folder / "windows.txt").write_text("some text", encoding="utf-16")
    with pytest.raises(LineartimeError, match=r"windows.txt is not UTF-8 .*iconv -f utf-16 .* leave the file out"):
        documents(load_corpus(folder))
