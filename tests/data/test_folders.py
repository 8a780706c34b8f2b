"""The files of a folder that hold text: patterns, binary files, and JSON that is no text."""

import json
import os
from collections.abc import Sequence
from pathlib import Path, PurePath

import pytest

from lineartime.data import LocalCorpus, describe_splits, load_corpus
from lineartime.data.folders import matches
from lineartime.errors import ArgumentError, LineartimeError

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.md", "b.txt", "src/c.py", "src/deep/d.py", "notes/e.md"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return tmp_path


def files_of(folder: Path, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> set[str]:
    corpus = load_corpus(folder, include=include, exclude=exclude)
    assert isinstance(corpus, LocalCorpus)
    return {part.path.relative_to(folder).as_posix() for parts in corpus.splits.values() for part in parts}


def notes_of(folder: Path, **options: Sequence[str]) -> list[str]:
    return [line for line in describe_splits(load_corpus(folder, **options)) if not line.startswith(("train", "val", "test"))]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("*.md", "a.md", True),
        ("*.md", "notes/e.md", True),
        ("*.md", "a.mdx", False),
        ("notes", "notes/e.md", True),
        ("notes/", "notes/e.md", True),
        ("notes", "my notes/e.md", False),
        ("src/*.py", "src/c.py", True),
        ("a*.md", "archive/b.md", False),
        ("con*.md", "config/readme.md", False),
        ("src/*.py", "src/deep/d.py", False),
        ("src/**/*.py", "src/deep/d.py", True),
        ("src/**/*.py", "src/c.py", True),
        ("**/deep/**/*.py", "src/deep/d.py", True),
        ("src/*", "src/deep/d.py", True),  # the folder src/deep
        ("src/**", "src/deep/d.py", True),
        ("src/*.py", "other/src/c.py", False),
        ("./src", "src/c.py", True),
        ("/src", "src/c.py", True),
        ("/c.py", "src/c.py", False),
        ("src/deep", "src/deep/d.py", True),
        ("**/c.py", "c.py", True),
        ("**/deep/d.py", "src/deep/d.py", True),
        ("**/deep/d.py", "deep/d.py", True),
        ("[ab].*", "b.txt", True),
    ],
)
def test_a_pattern_matches_names_or_paths_from_the_folder_on(pattern: str, path: str, expected: bool) -> None:
    assert matches(PurePath(path), pattern) == expected


def test_include_reads_only_the_files_that_match(folder: Path) -> None:
    assert files_of(folder, include=["*.md", "*.txt"]) == {"a.md", "b.txt", "notes/e.md"}
    assert files_of(folder, include=["src"]) == {"src/c.py", "src/deep/d.py"}


def test_exclude_leaves_files_and_whole_folders_out_and_counts_after_include(folder: Path) -> None:
    assert files_of(folder, exclude=["src", "*.txt"]) == {"a.md", "notes/e.md"}
    assert files_of(folder, include=["*.py"], exclude=["deep"]) == {"src/c.py"}


def test_an_excluded_folder_is_not_read(folder: Path) -> None:
    (folder / "loop").symlink_to(folder)
    with pytest.raises(LineartimeError, match=r"is a link to a folder that contains it"):
        files_of(folder)
    assert files_of(folder, exclude=["loop", "src"]) == {"a.md", "b.txt", "notes/e.md"}


def test_a_pattern_that_matches_nothing_is_reported(folder: Path) -> None:
    assert notes_of(folder, exclude=["*.pgn", "*.txt"]) == ["No file matches *.pgn, a pattern of exclude."]


def test_patterns_that_leave_no_text_are_an_error(folder: Path) -> None:
    with pytest.raises(ArgumentError, match=r"which holds no text with these patterns: change include or exclude"):
        load_corpus(folder, include=["*.rs"])


@pytest.mark.parametrize("pattern", ["", "/"])
def test_an_empty_pattern_is_an_error(folder: Path, pattern: str) -> None:
    with pytest.raises(ArgumentError, match=r"^exclude has an empty pattern"):
        load_corpus(folder, exclude=[pattern])


def test_a_pattern_alone_is_an_error_and_not_a_list_of_letters(folder: Path) -> None:
    with pytest.raises(ArgumentError, match=r"^exclude is '\*.md', but must be a list, each item of which is a text"):
        load_corpus(folder, exclude="*.md")


def test_patterns_without_a_folder_are_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"^include is for folders, but the text is the Python standard library"):
        load_corpus(None, include=["*.py"])


def test_binary_files_of_a_folder_are_left_out_and_named(folder: Path) -> None:
    (folder / "picture.png").write_bytes(PNG)
    (folder / "old.tar.gz").write_bytes(b"\x1f\x8b")
    assert files_of(folder) == {"a.md", "b.txt", "src/c.py", "src/deep/d.py", "notes/e.md"}
    assert notes_of(folder) == [
        f"Left out of {folder}, because tar archives are not read: old.tar.gz.",
        f"Left out of {folder}, because binary files are not read: picture.png.",
    ]


def test_a_binary_file_given_by_its_own_path_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(PNG * 10)
    corpus = load_corpus(tmp_path / "picture.png")
    with pytest.raises(LineartimeError, match=r"is not UTF-8 text .* looks like a binary file"):
        list(map(list, corpus.documents("all")))


def test_a_folder_of_binary_files_holds_no_text(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(PNG)
    with pytest.raises(
        ArgumentError,
        match=r"holds no text \(Left out of .*, because binary files are not read: picture.png\): give a text file",
    ):
        load_corpus(tmp_path)


def test_utf_16_is_not_taken_for_binary(folder: Path) -> None:
    (folder / "windows.txt").write_text("some text", encoding="utf-16")
    corpus = load_corpus(folder)
    with pytest.raises(LineartimeError, match=r"windows.txt is not UTF-8 .*iconv -f utf-16 .* leave the file out by"):
        list(map(list, corpus.documents("all")))


OTHER_JSON = {
    "settings.json": {"settings": [{"a": 1}, {"b": 2}], "version": 3},
    "tokenizer.json": {"added_tokens": [{"id": 0}]},
    "numbers.json": [1, 2, 3],
    "rows.json": [{"a": 1}],
}


@pytest.mark.parametrize("name", OTHER_JSON)
def test_json_without_records_is_plain_text_in_a_folder_of_other_text(folder: Path, name: str) -> None:
    content = json.dumps(OTHER_JSON[name])
    (folder / name).write_text(content)
    corpus = load_corpus(folder)
    assert content in ["".join(document) for document in corpus.documents("all")]
    assert notes_of(folder) == [f'Read as plain text in {folder}, for want of records with "text": {name}.']


def test_json_of_which_no_file_has_the_column_is_an_error(tmp_path: Path) -> None:
    """The wrong column must not train a model on braces and quotes."""
    (tmp_path / "README.md").write_text("About these files.")
    for number in range(3):
        (tmp_path / f"{number}.json").write_text(json.dumps([{"content": "some text"}]))
    with pytest.raises(ArgumentError, match=r"^text_column is text, but .*0.json, record 1, has the columns content"):
        load_corpus(tmp_path)


def test_a_column_that_no_file_has_is_an_error_beside_other_text(folder: Path) -> None:
    (folder / "records.json").write_text(json.dumps([{"body": "some text"}]))
    with pytest.raises(ArgumentError, match=r"^text_column is bodi, but .*records.json, record 1, has the columns body"):
        load_corpus(folder, "bodi")
    corpus = load_corpus(folder, "body")
    assert "some text" in ["".join(document) for document in corpus.documents("all")]


def test_the_first_record_of_a_long_array_is_found_beyond_the_beginning(tmp_path: Path) -> None:
    text = "x" * 200_000
    (tmp_path / "books.json").write_text(json.dumps([{"text": text}, {"text": "short"}]))
    corpus = load_corpus(tmp_path)
    assert ["".join(document) for document in corpus.documents("all")] == [text, "short"]


def test_a_pipe_is_named_and_not_called_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match=r"pipe, a pipe or a device, which is read only once: write it to a file"):
        load_corpus(tmp_path / "pipe")


IDS = bytes(range(256)) * 8
SHARDS: dict[str, dict[str, bytes]] = {
    "such as token files (train.bin): give the text that the tokens were made from, or choose other files by include='*.py'.": {
        "train.bin": IDS,
        "val.bin": IDS[:99],
        "prepare.py": b"# encodes\n" * 99,
        "readme.md": b"## tokens\n" * 999,
    },
    "such as token files of Megatron-LM (c_document.idx): give the text that the tokens were made from, or choose other files "
    "by include='*.json'.": {
        "c_document.bin": IDS,
        "c_document.idx": b"MMIDIDX\0\0" + bytes(200),
        "vocab.json": b'{"a": 1}',
    },
    "such as shards of MosaicML Streaming (index.json): write the texts to Parquet or JSON lines and give those files.": {
        "index.json": b'{"shards": [{"column_names": ["text"], "format": "mds"}], "version": 2}',
        "shard.00000.mds": IDS[:40],
        "args.yaml": b"concat_tokens: 2048\n" * 99,
    },
    "such as chunks of litdata (index.json): write the texts to Parquet or JSON lines and give those files.": {
        "index.json": b'{"chunks": [{"chunk_bytes": 40, "filename": "chunk-0-0.bin"}], "config": {}}',
        "chunk-0-0.bin": IDS,
    },
    "such as tar archives (00.tar): unpack them and give the folder, or choose other files by include='*.json'.": {
        "00.tar": IDS,
        "sizes.json": b'{"00.tar": 2048}',
    },
    "such as files of save_to_disk (state.json): write each split by to_parquet and give those files.": {
        "state.json": b'{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}',
        "dataset_info.json": b"{}",
        "data-00000-of-00001.arrow": IDS,
    },
    "such as files of save_to_disk (dataset_dict.json): write each split by to_parquet and give those files.": {
        "dataset_dict.json": b'{"splits": ["test"]}',
        "test/state.json": b'{"_data_files": [{"filename": "data.arrow"}]}',
        "test/data.arrow": IDS,
    },
    "such as binary files (img/a.png): choose the files to read, for example by include='*.md'.": {
        "a.md": b"text",
        "b.txt": b"-",
        "img/a.png": PNG,
    },
}


@pytest.mark.parametrize("message", SHARDS)
def test_the_side_files_of_shards_are_not_taken_for_the_text(tmp_path: Path, message: str) -> None:
    for name, content in SHARDS[message].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ArgumentError) as caught:
        load_corpus(tmp_path)
    assert str(caught.value) == f"data is {tmp_path}, most of which is not read, {message}"
    (tmp_path / "notes.rst").write_text("text")
    assert files_of(tmp_path, include=["*.rst"]) == {"notes.rst"}


def test_shards_within_a_folder_of_text_are_left_out_with_all_that_is_theirs(folder: Path) -> None:
    (folder / "b.txt").write_text("text " * 9999)
    (folder / "notes" / "index.json").write_text('{"shards": [{"format": "mds"}]}')
    assert files_of(folder) == {"a.md", "b.txt", "src/c.py", "src/deep/d.py"}
    names = "2 files (notes/e.md, notes/index.json)"
    assert notes_of(folder) == [f"Left out of {folder}, because shards of MosaicML Streaming are not read: {names}."]
    with pytest.raises(ArgumentError, match=r"data is .*index.json, but shards of MosaicML Streaming are not read: write the"):
        load_corpus(folder / "notes" / "index.json")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.txt.xz"])
def test_a_pointer_of_git_lfs_is_not_text(folder: Path, name: str) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    for given in (folder, folder / name):
        with pytest.raises(LineartimeError, match=rf"{name} is a pointer of Git LFS: fetch the file itself by `git lfs pull`"):
            load_corpus(given)


def test_markers_of_wiki_40b_in_a_file_are_reported(folder: Path) -> None:
    (folder / "src" / "wiki.jsonl").write_text(json.dumps({"text": "\n_START_ARTICLE_\nTitle\n_START_PARAGRAPH_\nA."}))
    (note,) = notes_of(folder / "src" / "wiki.jsonl")  # type: ignore[misc]
    assert note.endswith(
        "wiki.jsonl has the markers of Wiki-40B, such as _START_ARTICLE_, which are read as text: the corpus "
        "wiki40b replaces them."
    )
    assert notes_of(folder / "src" / "c.py") == []


def test_caches_of_python_are_not_text(folder: Path) -> None:
    (folder / "src" / "__pycache__").mkdir()
    (folder / "src" / "__pycache__" / "c.pyc").write_bytes(PNG * 999)
    assert notes_of(folder) == []


def test_a_pdf_is_binary_also_without_a_zero_at_its_beginning(folder: Path) -> None:
    (folder / "paper.pdf").write_bytes(b"%PDF-1.7\n" + b"text " * 4000 + b"\xe9")
    (folder / "b.txt").write_text("text " * 5000)
    assert notes_of(folder) == [f"Left out of {folder}, because binary files are not read: paper.pdf."]
