import os
from pathlib import Path

import pytest

from lineartime.data import ByteTokenizer, Corpus, load_corpus, local_text, standard_library, token_stream
from lineartime.data.readers import SPLITS, Split
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
    before = {part.path for part in local_text(tmp_path).splits["train"]}
    (tmp_path / "new.txt").write_text("x" * 100)
    after = {part.path for part in local_text(tmp_path).splits["train"]}
    assert len(before ^ after) <= 3


def test_one_file_is_split_by_position_at_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("".join(f"line {i}\n" for i in range(1000)))
    parts = [documents(local_text(file), split) for split in SPLITS]
    assert [len(part) for part in parts] == [1, 1, 1]
    texts = [part[0] for part in parts]
    assert "".join(texts) == file.read_text()
    assert all(text.endswith("\n") for text in texts)
    assert 0.89 < len(texts[0]) / file.stat().st_size < 0.91


def test_text_without_lines_is_cut_between_characters(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("日" * 1000)
    texts = [documents(local_text(tmp_path / "text.txt"), split)[0] for split in SPLITS]
    assert "".join(texts) == "日" * 1000
    assert min(map(len, texts)) > 40


def test_one_long_line_is_cut_between_characters_too(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("x" * 10_000 + "\n")
    assert min(len(documents(local_text(tmp_path / "text.txt"), split)[0]) for split in SPLITS) > 400


def test_empty_files_and_names_that_are_no_text_do_no_harm(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).touch()
    (tmp_path / os.fsdecode(b"\xff.txt")).write_text("line\n" * 1000)
    corpus = local_text(tmp_path)
    assert all(documents(corpus, split)[0] for split in SPLITS)
    token_stream(corpus, "train", ByteTokenizer(), tmp_path / "cache")


def test_a_file_with_most_of_the_bytes_is_for_training(tmp_path: Path) -> None:
    for name, size in (("a", 10), ("b", 10_000), ("c", 10), ("d", 10)):
        (tmp_path / name).write_text("x" * size)
    assert "b" in {part.path.name for part in local_text(tmp_path).splits["train"]}


def test_folders_are_read_to_the_bottom_but_hidden_files_are_not(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("a.txt", "sub/b.txt", "sub/c.md", ".git/d", ".hidden"):
        (tmp_path / name).write_text("text\n")
    names = {part.path.name for split in local_text(tmp_path).splits.values() for part in split}
    assert names == {"a.txt", "b.txt", "c.md"}


def test_files_and_folders_called_like_splits_are_the_splits(tmp_path: Path) -> None:
    for name in ("train-0.txt", "train-1.txt", "valid.txt", "test/a.txt", "test/b.txt", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    corpus = local_text(tmp_path)
    assert documents(corpus, "train") == ["train-0.txt", "train-1.txt"]
    assert documents(corpus, "validation") == ["valid.txt"]
    assert documents(corpus, "test") == ["test/a.txt", "test/b.txt"]


def test_one_other_name_makes_the_names_mean_nothing(tmp_path: Path) -> None:
    for name in ("train.py", "test_loop.py", "loop.py"):
        (tmp_path / name).write_text(name)
    corpus = local_text(tmp_path)
    assert sorted(text for split in SPLITS for text in documents(corpus, split)) == ["loop.py", "test_loop.py", "train.py"]


@pytest.mark.parametrize("given", ["validation", "test"])
def test_a_split_that_is_missing_is_taken_from_the_training_files(tmp_path: Path, given: Split) -> None:
    lines = [f"line {i}\n" for i in range(100)]
    (tmp_path / "train.txt").write_text("".join(lines))
    (tmp_path / f"{given}.txt").write_text("given")
    corpus = local_text(tmp_path)
    assert documents(corpus, given) == ["given"]
    other: Split = "test" if given == "validation" else "validation"
    taken = documents(corpus, other)[0].splitlines(keepends=True)
    left = "".join(documents(corpus, "train")).splitlines(keepends=True)
    assert 3 <= len(taken) <= 7
    assert sorted(taken + left) == sorted(lines)


def test_nothing_to_read_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(LineartimeError, match="holds no text: give a text file or a folder"):
        local_text(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(LineartimeError, match="holds no text"):
        local_text(tmp_path / "empty.txt")
    with pytest.raises(LineartimeError, match=r"Cannot read .*missing.*No such file"):
        local_text(tmp_path / "missing")


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
    before = {split: local_text(file).identity(split) for split in SPLITS}
    assert len(set(before.values())) == 3
    assert local_text(file).identity("train") == before["train"]
    os.utime(file, ns=(1, 1))
    assert local_text(file).identity("train") != before["train"]
