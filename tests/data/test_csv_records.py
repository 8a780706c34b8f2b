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

NAMES = [("a.csv", ","), ("a.csv", ";"), ("a.csv", "|"), ("A.CSV", "\t")]
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


@pytest.mark.parametrize(("name", "delimiter"), NAMES)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_each_row_is_a_document(tmp_path: Path, name: str, delimiter: str, mark: str) -> None:
    file = write(tmp_path / name, delimiter, mark)
    assert read(file) == TEXTS
    assert read(file, "id") == [str(number) for number in range(len(TEXTS))]  # the mark is not part of its name


def test_a_tsv_file_knows_no_quotes(tmp_path: Path) -> None:
    file = tmp_path / "a.tsv"
    file.write_text('id\ttext\n1\t"Yes" he said\n2\t"no, he did not\n')
    assert read(file) == ['"Yes" he said', '"no, he did not']


@pytest.mark.parametrize("header", ['"a;b;c",text', 'text,"size (w;h;d)"', "id, text"])
def test_names_of_columns_may_hold_other_separators_or_begin_with_a_space(tmp_path: Path, header: str) -> None:
    file = tmp_path / "a.csv"
    file.write_text(f"{header}\nx,x\n")
    assert read(file) == ["x"]


def test_a_binary_file_is_left_out_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text" * 999)
    (tmp_path / "b.csv").write_bytes(b"PK\x03\x04\0\0" * 99)
    assert ["".join(document) for document in load_corpus(tmp_path).documents("all")] == ["text" * 999]


def test_rows_are_told_from_the_plain_text_that_a_file_was_before(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv")
    rows, text = (FilePart(SourceFile(file, as_text=as_text)) for as_text in (False, True))
    assert rows.identity() != text.identity()
    assert rows.portable_identity() != text.portable_identity()


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
        (b"id,text\n1,a\n2\n", r"a.csv, line 3, has 1 field, but line 1 names 2: quote fields"),
        (b"id,text\n1,Hello, world\n", r"a.csv, line 2, has 3 fields, but line 1 names 2: quote fields"),
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
