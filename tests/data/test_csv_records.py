"""CSV and TSV files."""

import csv
import gzip
import zipfile
from itertools import chain
from pathlib import Path

import pytest

from lineartime.data import load_corpus
from lineartime.data.local_files import SourceFile
from lineartime.data.readers import FilePart
from lineartime.errors import ArgumentError, LineartimeError

NAMES = [("a.csv", ","), ("a.csv", ";"), ("a.csv", "|"), ("a.tsv", "\t"), ("A.CSV", "\t")]
TEXTS = ["one, two", 'three "four"', "", "five\nsix\r\nseven", "日本 é 🚀", "x" * 200_000]


def write(file: Path, delimiter: str = ",", mark: str = "") -> Path:
    with file.open("w", encoding="utf-8", newline="") as stream:
        stream.write(mark)
        rows = csv.writer(stream, delimiter=delimiter)
        rows.writerow(["id", "text", "label"])
        rows.writerows([number, text, "a"] for number, text in enumerate(TEXTS))
    return file


def read(file: Path, column: str = "text") -> list[str]:
    return ["".join(blocks) for blocks in FilePart(SourceFile(file, column)).documents()]


@pytest.mark.parametrize(
    ("name", "delimiter"), [("a.csv", ","), ("a.csv", ";"), ("a.csv", "|"), ("a.tsv", "\t"), ("A.CSV", "\t")]
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_each_row_is_a_document(tmp_path: Path, name: str, delimiter: str, mark: str) -> None:
    file = write(tmp_path / name, delimiter, mark)
    assert read(file) == TEXTS
    assert read(file, "id") == [str(number) for number in range(len(TEXTS))]  # the mark is not part of its name


def test_compressed_files_are_read(tmp_path: Path) -> None:
    plain = write(tmp_path / "a.csv")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(plain.read_bytes()))
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        archive.write(plain, "inner.csv")
    for name in ("b.csv.gz", "c.zip"):
        assert read(tmp_path / name) == TEXTS


def test_a_file_without_the_column_names_those_it_has(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv")
    with pytest.raises(ArgumentError, match=r"^text_column is body, but .*a.csv, line 1, has the columns id, text, label"):
        list(load_corpus(file, "body").documents("all"))


def test_numbers_beside_other_text_are_plain_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.csv").write_text("x,y\n1,2\n")
    corpus = load_corpus(tmp_path)
    assert "x,y\n1,2\n" in ["".join(document) for document in corpus.documents("all")]
    (tmp_path / "a.txt").unlink()
    with pytest.raises(ArgumentError, match=r"^text_column is text, but .*b.csv, line 1, has the columns x, y"):
        load_corpus(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"id,text\n1,a\n2\n", r'a.csv, line 3, has no "text"'),
        (b'id,text\n1,"a\n2,b\n', r"a.csv, line 3, is not CSV \(unexpected end of data\)"),
        (b"id,text\n1,a\n2,caf\xe9\n", r"a.csv, line 3, is not UTF-8 text \(byte 0xe9 at offset 17\)"),
    ],
)
def test_a_damaged_row_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(content)
    with pytest.raises(LineartimeError, match=message):
        read(file)


def test_a_row_is_in_one_split(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("text\n" + "".join(f"row {number}\n" for number in range(40)))
    corpus = load_corpus(file)
    splits = {split: ["".join(each) for each in corpus.documents(split)] for split in ("train", "validation", "test")}
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 36, "validation": 2, "test": 2}
    assert sorted(chain.from_iterable(splits.values())) == sorted(f"row {number}" for number in range(40))
