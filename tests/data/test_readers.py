"""Local files as documents: text, JSON lines, JSON, CSV and Parquet, plain or compressed, whole or one split of them."""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from lineartime.choices import Split
from lineartime.data import load_corpus, readers
from lineartime.data.readers import BLOCK, SPLITS, SourceFile
from lineartime.errors import ArgumentError, LineartimeError


def zipped(content: bytes, name: str = "folder/inner") -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("folder/", b"")  # which is not a file
        archive.writestr(name, content)
    return stream.getvalue()


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".lzma": lambda content: lzma.compress(content, lzma.FORMAT_ALONE),
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    ".zip": zipped,
}
STREAMS = [".gz", ".xz", ".bz2", ".zst"]
PADDING = {".zst": b"\x50\x2a\x4d\x18" + (20_000).to_bytes(4, "little") + bytes(20_000)}  # a skippable frame
TEXTS = ["one\ntwo, three", "", 'four "five"\r\nsix', "日本 é 🚀\n", "x" * 200_000]


def read(path: Path, split: Split | None = None, column: str = "text") -> list[str]:
    part = SourceFile(path, column, splits=() if split is None else (split,))
    return ["".join(blocks) for blocks in part.documents()]


def json_lines(texts: list[str]) -> bytes:
    rows = [{"id": i if i else "zero", "text": text} for i, text in enumerate(texts)]  # another column may have two types
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def csv_of(texts: list[str]) -> bytes:
    stream = io.StringIO(newline="")
    csv.writer(stream).writerows([["id", "text", "label"], *([i, text, "a"] for i, text in enumerate(texts))])
    return stream.getvalue().encode()


def write_parquet(file: Path, **columns: list[Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file


WRITERS: dict[str, Callable[[list[str]], bytes]] = {
    ".jsonl": json_lines,
    ".ndjson": lambda texts: json_lines(texts) + b"\n",
    ".json": json_lines,
    ".json of an array": lambda texts: json.dumps([{"id": 0, "text": text} for text in texts], indent=2).encode(),
    ".json of texts": lambda texts: b"\n" + json.dumps(texts).encode(),
    ".csv": csv_of,
    ".CSV": csv_of,
    ".json of an object": lambda texts: json.dumps({"id": 1, "text": texts[0]}, indent=1).encode(),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BLOCK", 7)  # cuts lines and characters


def test_a_compressed_file_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    text = b"".join(b"this is line %d of a text\n" % i for i in range(1 << 18)) * 3
    for suffix in STREAMS:
        file = tmp_path / f"a{suffix}"
        file.write_bytes(COMPRESS[suffix](text) + COMPRESS[suffix](b"end"))
        with file.open("rb") as raw:
            sizes = [len(block) for block in readers.decompressed(raw, file)]
        assert max(sizes) < len(text) // 10
        assert sum(sizes) == len(text) + 3


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_text_is_read_whole_and_split(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a.txt{suffix}"
    text = "".join(f"zeile {i} üöä日\ufeff\n" for i in range(100))
    file.write_bytes(COMPRESS[suffix](codecs.BOM_UTF8 + text.encode()))
    assert read(file) == [text]
    parts = [read(file, split)[0] for split in SPLITS]
    assert "".join(parts) == text
    assert all(part.endswith("\n") for part in parts)
    assert 0.85 < len(parts[0]) / len(text) < 0.95


@pytest.mark.parametrize(("kind", "suffix"), [*zip(WRITERS, [*COMPRESS, ""], strict=True)])
def test_each_record_is_a_document(tmp_path: Path, kind: str, suffix: str) -> None:
    file = tmp_path / f"a{kind.split()[0]}{suffix}"
    for mark in (b"", codecs.BOM_UTF8):
        file.write_bytes(COMPRESS[suffix](mark + WRITERS[kind](TEXTS)))
        assert read(file) == (TEXTS[:1] if "an object" in kind else TEXTS)
    if "texts" not in kind:
        with pytest.raises(ArgumentError, match=r"^text_column is body, but .* has the columns (id, )?text"):
            read(file, column="body")


def test_rows_of_parquet_are_documents(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", text=[*TEXTS, None] * 20, id=list(range(120)))
    assert read(file) == [*TEXTS, ""] * 20
    message = r"^text_column is body, but .*a.parquet, row 1, has the columns text, id: name the one"
    with pytest.raises(ArgumentError, match=message):
        read(file, column="body")
    with pytest.raises(LineartimeError, match=r'a.parquet, row 1, has 0 in "id" instead of a text'):
        read(file, column="id")


def test_a_tsv_file_knows_no_quotes_and_names_of_csv_may_be_anything(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('id\ttext\n1\t"Yes" he said\n2\t"no, he did not\n')
    assert read(tmp_path / "a.tsv") == ['"Yes" he said', '"no, he did not']
    for header in ('"a;b;c",text', "id, text", ",,text"):
        (tmp_path / "a.csv").write_text(f"{header}\n{header.replace('text', 'x')}\n", encoding="utf-8-sig")
        assert [text.strip() for text in read(tmp_path / "a.csv")] == ["x"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '[{"text": "a"}, {"body": "b"}]', 'a.json, record 2, has no "text": correct it, or leave it out'),
        ("a.json", '[{"text": "a"},', r"a.json is not JSON \(.+\): correct it"),
        ("a.json", '{\n"text": "a"}\n{\n"text": "b"}', r"a.json is not JSON \(Extra data\): correct it"),
        ("a.json", '{"text": {"0": "a", "1": "b"}}', r"a.json, line 1, has {'0': 'a', .* in \"text\" instead of a text"),
        ("a.json", '{"a": 1,\n "data": [{"text": "a"}]}', "a.json, record 1, has the columns a, data: name the one"),
        ("a.json", '{"body": "a"}\n{"body": "b"}\n', "text_column is text, but .*a.json, line 1, has the columns body: name"),
        ("a.jsonl", '{"text": "a"}\n{oops', r"a.jsonl, line 2, is not JSON \(Expecting property name.*\): correct it"),
        ("a.jsonl", '{"text": "\\ud800"}', r"line 1, has '.ud800' in .text. instead of a text"),
        ("a.jsonl", '{"text": "a"}\n3\n', r"line 2, is 3, but must be an object: correct it"),
        ("a.jsonl", "[" * 5_000, r"line 1, is not JSON"),
        ("a.jsonl", '{"text": "a"}\n{"text": "caf\xe9"}', r"line 2, is not UTF-8 text \(byte 0xe9 at offset 27\)"),
        ("a.csv", "id;body\n1;a\n", "has the columns id;body: name the one that holds the text"),
        ("a.csv", "t\0e\0x\0t\0\n\0", r"a.csv, line 1, is not UTF-8 text \(byte 0x00 at offset 1\): .*iconv -f utf-16"),
        ("a.csv", "id,text\n1,a\n2\n", r"a.csv, line 3, has 1 field, but line 1 names 2: quote fields"),
        ("a.csv", 'id,text\n1,"a\n2,b\n', r"a.csv, line 3, is not CSV \(unexpected end of data\)"),
    ],
)
def test_a_record_that_is_no_document_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, encoding="latin1")
    with pytest.raises(LineartimeError, match=message):
        read(tmp_path / name)


@pytest.mark.parametrize("kind", [".jsonl", ".csv"])
def test_records_are_split_by_their_text_wherever_they_stand(tmp_path: Path, kind: str) -> None:
    """Held out in file order, a file of five sources in turn has one source alone in each held-out split."""
    texts = [f"document {i}" for i in range(400)]

    def divided(texts: list[str]) -> dict[Split, list[str]]:
        (tmp_path / f"a{kind}").write_bytes(WRITERS[kind](texts))
        corpus = load_corpus(tmp_path / f"a{kind}")
        return {split: ["".join(blocks) for blocks in corpus.documents(split)] for split in SPLITS}

    splits, turned = divided(texts), divided(texts[::-1])
    assert turned == {split: found[::-1] for split, found in splits.items()}
    assert sorted(text for split in splits.values() for text in split) == sorted(texts)
    for split in ("validation", "test"):
        assert {int(text.split()[1]) % 5 for text in splits[split]} == set(range(5))
    assert all(all(divided([f"{tag} {i}" for i in range(3)]).values()) for tag in "abcdefgh")  # few, and some in each


def test_text_is_the_same_however_it_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [character * length for character in "é日🚀" for length in range(1, 60, 6)]
    texts += ["".join("aé日🚀\nb"[i * i % 7 % 6] for i in range(length)) for length in range(1, 81, 4)]
    for name in ("a.txt", "enwik8"):  # at ends of lines, and between characters
        for text in texts:
            Path(name).write_text(text, encoding="utf-8")
            splits = ["".join("".join(blocks) for blocks in load_corpus(name).documents(split)) for split in SPLITS]
            assert "".join(splits) == text
            assert len(splits[0]) >= 0.85 * len(text) - 1


def test_the_file_in_a_zip_tells_the_format(tmp_path: Path) -> None:
    for name, inner, content, documents in (
        ("corpus.zip", "corpus.jsonl", json_lines(TEXTS), TEXTS),
        ("corpus.jsonl.zip", "part", json_lines(TEXTS), TEXTS),
        ("book.zip", "book.txt", b"{}\n", ["{}\n"]),
    ):
        (tmp_path / name).write_bytes(zipped(content, inner))
        assert read(tmp_path / name) == documents
    with zipfile.ZipFile(tmp_path / "book.zip", "a") as archive:
        archive.writestr("b.txt", b"b")
    with pytest.raises(LineartimeError, match=r"book.zip holds 2 files: unpack it and give the folder"):
        read(tmp_path / "book.zip")
    (tmp_path / "a.zip").write_bytes(zipped(b"content", "a.parquet"))
    with pytest.raises(LineartimeError, match=r"a.zip is Parquet in a compressed file, which cannot be read: unpack it"):
        read(tmp_path / "a.zip")


@pytest.mark.parametrize("suffix", STREAMS)
def test_all_streams_of_a_file_are_read_with_padding_or_not(tmp_path: Path, suffix: str) -> None:
    compress, file = COMPRESS[suffix], tmp_path / f"a.txt{suffix}"
    first, last = compress(b"first "), compress(b"second" * 5_000)
    for padding in (b"", PADDING.get(suffix, bytes(20_000))):
        file.write_bytes(first + padding + compress(b"") + last + padding)
        assert read(file) == ["first " + "second" * 5_000]
        file.write_bytes(first + padding + last[:-5])
        with pytest.raises(LineartimeError, match="is damaged or cut off"):
            read(file)
    file.write_bytes(bytes(100))
    with pytest.raises(LineartimeError, match="is damaged or cut off"):
        read(file)


@pytest.mark.parametrize("name", [*(f"a.txt{suffix}" for suffix in COMPRESS if suffix), "a.parquet"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    file = write_parquet(tmp_path / name, text=[f"document {i} " * 20 for i in range(1000)])
    if name != "a.parquet":
        file.write_bytes(COMPRESS[file.suffix](bytes(i * i % 251 % 96 + 32 for i in range(5000))))
    data = file.read_bytes()
    for changed in (data[:-9], b"garbage" * 10, data[:40] + b"\xff" * 900 + data[940:]):
        file.write_bytes(changed)
        with pytest.raises(LineartimeError, match=rf"{name} is damaged or cut off \(.+\): fetch it again"):
            read(file)


def test_a_long_line_is_a_document_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    text = "word " * 200_000
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    (tmp_path / "a.txt").write_text(text)
    for file in ("a.jsonl", "a.txt"):
        (document,) = SourceFile(tmp_path / file).documents()
        lengths = [len(block) for block in document]
        assert sum(lengths) == len(text)
        assert max(lengths) <= BLOCK


@pytest.mark.parametrize(
    ("content", "offset", "encoding"),
    [
        (b"a text" + bytes(i * i % 96 + 32 for i in range(10_000)) + b"caf\xe9 au lait\n" * 1000, 10_009, "latin1"),
        ("It was dark\r\n".encode("utf-16-le") * 400, 1, "utf-16"),  # what follows its start passes for UTF-8
        ("It was dark\r\n".encode("utf-16-be") * 400, 0, "utf-16"),
        ("It was dark\r\n".encode("utf-16") * 400, 0, "utf-16"),
        ("日".encode() + b"caf\xe9 au lait", 6, "latin1"),
        (b"cafe au lait\n" * 1000 + b"\xe9", 13_000, "latin1"),
        (codecs.BOM_UTF8 + b"caf\xe9", 6, "latin1"),
        ("日".encode()[:2], 0, "latin1"),
    ],
)
def test_the_first_byte_of_a_file_that_is_not_utf_8_is_named(
    tmp_path: Path, content: bytes, offset: int, encoding: str
) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(content)
    for split in (None, *SPLITS) if offset < 2 and len(content) > 2 else (None,):
        message = rf"a.txt is not UTF-8 text \(byte 0x.. at offset {offset}\): .* `iconv -f {encoding} -t"
        with pytest.raises(LineartimeError, match=message):
            read(file, split)


def test_a_file_that_vanished_is_named(tmp_path: Path) -> None:
    for name in ("a.txt", "a.json", "a.parquet"):
        (tmp_path / name).write_text('{"text": "abc"}\n' * 10)
        corpus = load_corpus(tmp_path / name)
        (tmp_path / name).unlink()
        for ask in (corpus.identity, lambda split, corpus=corpus: list(corpus.documents(split))):
            with pytest.raises(LineartimeError, match=rf"Cannot read .*{name}: No such file"):
                ask("train")


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, name in (("pyarrow", "a.parquet"), ("zstandard", "a.txt.zst")):
        (tmp_path / name).write_bytes(b"content")
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(LineartimeError, match=rf"{name} needs {package}.*pip install 'lineartime\[data\]'"):
            read(tmp_path / name)
