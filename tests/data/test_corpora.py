import os
from itertools import pairwise
from pathlib import Path

import pytest

from lineartime.data import ByteTokenizer, local_text, standard_library, token_stream
from lineartime.data.corpora import SPLITS
from lineartime.errors import LineartimeError


def test_the_embedded_corpus_is_large_split_by_file_and_always_the_same() -> None:
    corpus, again = standard_library(), standard_library()
    assert corpus == again
    paths = {split: {document.path for document in corpus.splits[split]} for split in SPLITS}
    assert not paths["train"] & paths["validation"]
    assert not paths["train"] & paths["test"]
    assert not paths["validation"] & paths["test"]
    sizes = {split: sum(document.stop for document in corpus.splits[split]) for split in SPLITS}
    total = sum(sizes.values())
    assert total > 5_000_000
    assert 0.85 < sizes["train"] / total < 0.91
    assert all(0.04 < sizes[split] / total < 0.08 for split in ("validation", "test"))


def test_adding_a_file_moves_hardly_any_other(tmp_path: Path) -> None:
    for i in range(100):
        (tmp_path / f"{i}.txt").write_text("x" * 100)
    before = {d.path for d in local_text(tmp_path).splits["train"]}
    (tmp_path / "new.txt").write_text("x" * 100)
    after = {d.path for d in local_text(tmp_path).splits["train"]}
    assert len(before ^ after) <= 3


def test_one_file_is_split_by_position_at_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("".join(f"line {i}\n" for i in range(1000)))
    parts = [local_text(file).splits[split][0] for split in SPLITS]
    text = file.read_bytes()
    assert (parts[0].start, parts[-1].stop) == (0, len(text))
    for left, right in pairwise(parts):
        assert left.stop == right.start
        assert text[: left.stop].endswith(b"\n")
    assert 0.89 < parts[0].stop / len(text) < 0.91


def test_text_without_lines_is_cut_between_characters(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("日" * 1000)
    for split in SPLITS:
        document = local_text(file).splits[split][0]
        file.read_bytes()[document.start : document.stop].decode()


def test_one_long_line_is_cut_between_characters_too(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("x" * 10_000 + "\n")
    sizes = [d.stop - d.start for split in SPLITS for d in local_text(file).splits[split]]
    assert min(sizes) > 400


def test_empty_files_and_names_that_are_no_text_do_no_harm(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).touch()
    (tmp_path / os.fsdecode(b"\xff.txt")).write_text("line\n" * 1000)
    corpus = local_text(tmp_path)
    assert all(corpus.splits[split][0].stop for split in SPLITS)
    token_stream(corpus, "train", ByteTokenizer(), tmp_path / "cache")


def test_a_giant_among_few_files_is_for_training(tmp_path: Path) -> None:
    for name, size in (("a", 10), ("b", 10_000), ("c", 10), ("d", 10)):
        (tmp_path / name).write_text("x" * size)
    assert "b" in {document.path.name for document in local_text(tmp_path).splits["train"]}


def test_folders_are_read_to_the_bottom_but_hidden_files_are_not(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("a.txt", "sub/b.txt", "sub/c.md", ".git/d", ".hidden"):
        (tmp_path / name).write_text("text\n")
    names = {document.path.name for split in local_text(tmp_path).splits.values() for document in split}
    assert names == {"a.txt", "b.txt", "c.md"}


def test_nothing_to_read_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(LineartimeError, match="holds no text: give a text file or a folder"):
        local_text(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(LineartimeError, match="holds no text"):
        local_text(tmp_path / "empty.txt")
    with pytest.raises(LineartimeError, match=r"Cannot read .*missing.*No such file"):
        local_text(tmp_path / "missing")
