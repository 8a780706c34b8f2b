import bz2
import codecs
import gzip
import json
import lzma
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
from lineartime.data.local_files import SourceFile
from lineartime.data.readers import SPLITS, FilePart
from lineartime.errors import LineartimeError

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".lzma": lambda content: lzma.compress(content, lzma.FORMAT_ALONE),
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
TEXTS = ["one\ntwo", "", "日本 é 🚀\n", "x" * 100]


def part_of(path: Path, split: Split | None = None, **options: Any) -> FilePart:
    return FilePart(SourceFile(path, **options), () if split is None else (split,))


def read(part: FilePart) -> list[str]:
    return ["".join(blocks) for blocks in part.documents()]


def json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()


def write_parquet(file: Path, **columns: list[Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BLOCK", 7)  # cuts lines and characters


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_text_is_read(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a.txt{suffix}"
    text = "".join(f"zeile {i} üöä日\n" for i in range(100))
    file.write_bytes(COMPRESS[suffix](text.encode()))
    assert read(part_of(file)) == [text]
    parts = [read(part_of(file, split)) for split in SPLITS]
    assert "".join(part[0] for part in parts) == text
    assert all(part[0].endswith("\n") for part in parts)
    assert 0.85 < len(parts[0][0]) / len(text) < 0.95


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kind", [".jsonl", ".json"])
def test_json_lines_are_documents(tmp_path: Path, kind: str, suffix: str) -> None:
    file = tmp_path / f"a{kind}{suffix}"
    file.write_bytes(COMPRESS[suffix](json_lines(TEXTS) + b"\n"))
    assert read(part_of(file)) == TEXTS


def test_other_json_is_text(tmp_path: Path) -> None:
    for content in ('{\n"text": 1}', '{"name": "x"}', '{"paths": ["a", "b"]}', '"a"', "{oops"):
        (tmp_path / "a.json").write_text(content)
        assert read(part_of(tmp_path / "a.json")) == [content]


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_of_json_is_no_text_with_braces_in_it(tmp_path: Path, indent: int | None, suffix: str) -> None:
    file = tmp_path / f"a.json{suffix}"
    file.write_bytes(COMPRESS[suffix](b"\n" + json.dumps([{"text": text} for text in TEXTS], indent=indent).encode()))
    assert read(part_of(file)) == TEXTS
    file.write_bytes(COMPRESS[suffix](json.dumps(TEXTS, indent=indent).encode()))
    assert read(part_of(file)) == TEXTS


@pytest.mark.parametrize("start", [codecs.BOM_UTF8, b" ", codecs.BOM_UTF8 + b"\n"])
def test_records_may_begin_with_the_mark_of_utf_8_or_a_blank(tmp_path: Path, start: bytes) -> None:
    records = [{"text": text} for text in TEXTS]
    (tmp_path / "a.json").write_bytes(start + json.dumps(records).encode())
    assert read(part_of(tmp_path / "a.json")) == TEXTS
    (tmp_path / "b.jsonl").write_bytes(codecs.BOM_UTF8 + json_lines(TEXTS))
    assert read(part_of(tmp_path / "b.jsonl")) == TEXTS


def test_one_object_of_json_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"id": 1, "text": "one\ntwo"}, indent=1))
    assert read(part_of(tmp_path / "a.json")) == ["one\ntwo"]


def test_an_array_is_encoded_again_where_an_earlier_version_took_it_for_text(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('["a"]')
    assert part_of(tmp_path / "a.json").identity().endswith(":json")
    (tmp_path / "b.json").write_text('{"text": "a"}\n')
    fact = (tmp_path / "b.json").stat()
    assert (
        part_of(tmp_path / "b.json").identity().endswith(f"/b.json:None:True:({fact.st_size}, {fact.st_mtime_ns})")
    )  # as ever


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", r"a.json, record 1, is 1, but must be an object with a \"text\""),
        ('[{"body": "b"}, {"text": "a"}]', "text_column is text, but .*a.json, record 1, has the columns body: name"),
        ('[{"text": "a"}, {"body": "b"}]', 'a.json, record 2, has no "text": correct it, or leave it out'),
        ('[{"text": [null]}]', r'a.json, record 1, has \[None\] in "text" instead of a text'),
        ('[{"text": "a"},', r"a.json is not JSON \(.+\): correct it"),
        (
            '{"version": 1, "data": [{"text": "a"}]}',
            'a.json is a JSON object with its records in "data": write that list',
        ),
        ('{"version": 1,\n "data": [{"text": "a"}]}', 'a.json is a JSON object with its records in "data": write that list'),
        ('{"body": "a"}\n{"body": "b"}\n', "text_column is text, but .*a.json, line 1, has the columns body: name the one"),
    ],
)
def test_json_that_holds_text_where_it_is_not_looked_for_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(LineartimeError, match=message):
        read(part_of(tmp_path / "a.json"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "b.json", "a.parquet"])
def test_the_text_may_be_in_a_column_of_another_name(tmp_path: Path, name: str) -> None:
    rows = [{"id": i, "text": "other", "body": text} for i, text in enumerate(TEXTS)]
    if name == "a.parquet":
        write_parquet(tmp_path / name, body=TEXTS, text=["other"] * len(TEXTS))
    elif name == "b.json":
        (tmp_path / name).write_text(json.dumps(rows))
    else:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    part = part_of(tmp_path / name, column="body")
    assert read(part) == TEXTS
    assert part.identity() != part_of(tmp_path / name).identity()
    with pytest.raises(LineartimeError, match=r"^text_column is txt, but .* has the columns .*body"):
        read(part_of(tmp_path / name, column="txt"))


def test_rows_of_parquet_are_documents(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", text=TEXTS * 20, id=list(range(80)))
    assert read(part_of(file)) == TEXTS * 20


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_single_file_of_documents_is_split_by_their_numbers(tmp_path: Path, kind: str) -> None:
    texts = [f"document {i}" for i in range(100)]
    file = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        file.write_bytes(json_lines(texts))
    else:
        write_parquet(file, text=texts)
    corpus = load_corpus(file)
    splits = [["".join(blocks) for blocks in corpus.documents(split)] for split in SPLITS]
    assert [len(split) for split in splits] == [90, 5, 5]
    assert sorted(text for split in splits for text in split) == sorted(texts)


@pytest.mark.parametrize("character", ["é", "日", "🚀"])
@pytest.mark.parametrize("name", ["a.txt", "enwik8"])
def test_a_short_text_of_long_characters_is_not_cut_within_one(
    tmp_path: Path, name: str, character: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for length in range(1, 81):
        text = character * length
        Path(name).write_text(text, encoding="utf-8")
        corpus = load_corpus(name)
        splits = [["".join(blocks) for blocks in corpus.documents(split)] for split in SPLITS]
        assert "".join(document for split in splits for document in split) == text
        assert len(splits[0][0]) >= 0.9 * length - 1


def test_text_of_mixed_characters_is_the_same_however_it_is_cut(tmp_path: Path) -> None:
    for length in range(1, 81):
        text = "".join("aé日🚀\nb"[i * i % 7 % 6] for i in range(length))
        (tmp_path / "a.txt").write_text(text, encoding="utf-8")
        assert "".join("".join(read(part_of(tmp_path / "a.txt", split))) for split in SPLITS) == text


@pytest.mark.parametrize("suffix", COMPRESS)
def test_the_mark_of_utf_8_is_no_part_of_a_text(tmp_path: Path, suffix: str) -> None:
    text = "日 \ufeff\n" * 30  # within a text, the character is one like any other
    file = tmp_path / f"a.txt{suffix}"
    file.write_bytes(COMPRESS[suffix](codecs.BOM_UTF8 + text.encode()))
    assert read(part_of(file)) == [text]
    assert "".join(read(part_of(file, split))[0] for split in SPLITS) == text
    file.write_bytes(COMPRESS[suffix](codecs.BOM_UTF8 + b"caf\xe9"))
    with pytest.raises(LineartimeError, match="byte 0xe9 at offset 6"):
        read(part_of(file))


def write_zip(file: Path, **members: bytes) -> Path:
    """A .zip of these members, whose names have / for __ and . for _."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name.replace("__", "/").replace("_", "."), content)
    return file


def test_records_in_a_zip_file_are_documents_though_its_own_name_does_not_say_so(tmp_path: Path) -> None:
    for name in ("corpus_jsonl", "corpus_ndjson", "corpus_json"):
        file = write_zip(tmp_path / f"{name}.zip", **{name: json_lines(TEXTS)})
        assert read(part_of(file)) == TEXTS
        assert part_of(file).identity().endswith(f":.{name[7:]}")  # encoded again where an earlier version took it for text
    named = write_zip(tmp_path / "corpus.jsonl.zip", part=json_lines(TEXTS))
    assert read(part_of(named)) == TEXTS
    assert part_of(named).identity().endswith(")")  # as ever
    text = write_zip(tmp_path / "book.zip", book_txt=b"{}\n")
    assert read(part_of(text)) == ["{}\n"]


def test_folders_in_a_zip_file_are_no_files(tmp_path: Path) -> None:
    file = write_zip(tmp_path / "books.zip", books__=b"", books__a_txt=b"text")
    assert read(part_of(file)) == ["text"]
    with pytest.raises(LineartimeError, match=r"books.zip holds 2 files: unpack it and give the folder"):
        read(part_of(write_zip(tmp_path / "books.zip", books__=b"", books__a_txt=b"a", books__bc_txt=b"b")))


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.TAR.zst", "a.tar.bz2", "a.tgz"])
def test_a_tar_archive_is_no_text_that_begins_with_a_header(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"content")
    with pytest.raises(LineartimeError, match=rf"{name} is a tar archive, which is not read: unpack it and give the folder.$"):
        read(part_of(tmp_path / name))


@pytest.mark.parametrize("name", ["a.parquet.gz", "a.zip"])
def test_parquet_in_a_compressed_file_is_not_called_damaged(tmp_path: Path, name: str) -> None:
    write_zip(tmp_path / name, a_parquet=b"content")
    with pytest.raises(LineartimeError, match=rf"{name} is Parquet in a compressed file, which cannot be read: unpack it"):
        read(part_of(tmp_path / name))


PADDING = {".zst": b"\x50\x2a\x4d\x18" + (20_000).to_bytes(4, "little") + bytes(20_000)}  # a skippable frame


@pytest.mark.parametrize("suffix", [suffix for suffix in COMPRESS if suffix])
def test_all_streams_of_a_file_are_read_with_padding_or_not(tmp_path: Path, suffix: str) -> None:
    compress, file = COMPRESS[suffix], tmp_path / f"a.txt{suffix}"
    first, last = compress(b"first "), compress(b"second" * 5_000)
    for padding in (b"", PADDING.get(suffix, bytes(20_000))):
        file.write_bytes(first + padding + compress(b"") + last + padding)
        assert read(part_of(file)) == ["first " + "second" * 5_000]
        file.write_bytes(first + padding + last[:-5])
        with pytest.raises(LineartimeError, match="is damaged or cut off"):
            read(part_of(file))
    file.write_bytes(bytes(100))
    with pytest.raises(LineartimeError, match="is damaged or cut off"):
        read(part_of(file))


def test_a_line_of_fifty_megabytes_is_a_document_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    text = "word " * 10_000_000
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    (tmp_path / "a.txt").write_text(text)
    for file in ("a.jsonl", "a.txt"):
        (document,) = part_of(tmp_path / file).documents()
        lengths = [len(block) for block in document]
        assert sum(lengths) == len(text)
        assert max(lengths) <= readers.BLOCK


@pytest.mark.parametrize("suffix", [suffix for suffix in COMPRESS if suffix])
@pytest.mark.parametrize("damage", ["cut", "garbage", "within"])
def test_a_damaged_archive_is_named(tmp_path: Path, suffix: str, damage: str) -> None:
    data = COMPRESS[suffix](bytes(i * i % 251 % 128 for i in range(5000)))
    changed = {"cut": data[:-9], "garbage": b"garbage" * 10, "within": data[:40] + b"\xff" * 20 + data[60:]}[damage]
    file = tmp_path / f"a.txt{suffix}"
    file.write_bytes(changed)
    with pytest.raises(LineartimeError, match=rf"a.txt{suffix} is damaged or cut off \(.+\): fetch it again"):
        read(part_of(file))


@pytest.mark.parametrize(("place", "value"), [("flags", 1), ("method", 9)])
def test_a_zip_file_that_python_cannot_unpack_is_named(tmp_path: Path, place: str, value: int) -> None:
    file = tmp_path / "a.zip"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", "text")
    content = bytearray(file.read_bytes())
    for header, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # bit 0 of the flags: a password; method 9: Deflate64
        content[content.index(header) + flags + (0 if place == "flags" else 2)] = value
    file.write_bytes(content)
    with pytest.raises(LineartimeError, match=r"a.zip cannot be read \(.+\): unpack it and give the folder"):
        read(part_of(file))


@pytest.mark.parametrize("damage", ["cut", "garbage", "within"])
def test_damaged_parquet_is_named(tmp_path: Path, damage: str) -> None:
    file = write_parquet(tmp_path / "a.parquet", text=[f"document {i} " * 20 for i in range(1000)])
    data = file.read_bytes()
    file.write_bytes({"cut": data[:-9], "garbage": b"garbage" * 10, "within": data[:10] + b"\xff" * 900 + data[910:]}[damage])
    with pytest.raises(LineartimeError, match=r"a.parquet is damaged or cut off \(.+\): fetch it again"):
        read(part_of(file))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{oops", r"line 3, is not JSON \(Expecting property name.*\): correct it, or leave it out"),
        (b'["text"]', r"line 3, is \['text'\], but must be an object"),
        (b'{"txt": "a", "id": 1}', 'line 3, has no "text": correct it, or leave it out'),
        (b'{"text": 3}', 'line 3, has 3 in "text" instead of a text'),
        (b'{"text": "\\ud800"}', "line 3, has an incomplete character in its text"),
        (b"[" * 5_000, r"line 3, is not JSON"),
        (b'{"text": "caf\xe9"}', r"line 3, is not UTF-8 text \(byte 0xe9 at offset 45\)"),
    ],
)
def test_a_line_that_is_no_document_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "bcdef"}\n' + line + b"\n")
    with pytest.raises(LineartimeError, match=f"a.jsonl, {message}"):
        read(part_of(tmp_path / "a.jsonl"))


def test_parquet_without_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(LineartimeError, match=r"text_column is text, but .*a.parquet has the columns body, id: name the one"):
        read(part_of(write_parquet(tmp_path / "a.parquet", body=["x"], id=[1])))
    with pytest.raises(LineartimeError, match=r'b.parquet, row 0, has 3 in "text" instead of a text'):
        read(part_of(write_parquet(tmp_path / "b.parquet", text=[3, None])))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_a_document_without_a_value_is_empty(tmp_path: Path, name: str) -> None:
    texts = ["one", None, "two"]
    if name == "a.parquet":
        write_parquet(tmp_path / name, text=texts)
    elif name == "a.json":
        (tmp_path / name).write_text(json.dumps([{"text": text} for text in texts]))
    else:
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert read(part_of(tmp_path / name)) == ["one", "", "two"]


def test_the_byte_that_is_named_is_the_first_of_the_file_whatever_is_read_first(tmp_path: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9 au lait\n" * 1000)
    for split in SPLITS:
        with pytest.raises(LineartimeError, match=r"byte 0xe9 at offset 3\): convert the file, .* `iconv -f latin1 -t utf-8`"):
            read(part_of(tmp_path / "latin1.txt", split))
    (tmp_path / "late.txt").write_bytes(b"cafe au lait\n" * 1000 + b"\xe9")
    with pytest.raises(LineartimeError, match=r"byte 0xe9 at offset 13000\)"):
        read(part_of(tmp_path / "late.txt", "test"))


@pytest.mark.parametrize("prefix", [b"", b"x" * 20, "日".encode()])
def test_a_byte_that_is_not_utf8_is_named_with_its_place(tmp_path: Path, prefix: bytes) -> None:
    (tmp_path / "latin1.txt").write_bytes(prefix + b"caf\xe9 au lait")
    with pytest.raises(LineartimeError, match=rf"latin1.txt is not UTF-8 text \(byte 0xe9 at offset {len(prefix) + 3}\)"):
        read(part_of(tmp_path / "latin1.txt"))


def test_files_of_mixed_encodings_are_named_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "train-utf8.txt").write_text("é" * 10)
    (tmp_path / "train-utf16.txt").write_text("é" * 10, encoding="utf-16")
    with pytest.raises(
        LineartimeError, match=r"train-utf16.txt is not UTF-8 text \(byte 0xff at offset 0\): .*iconv -f utf-16"
    ):
        [list(blocks) for blocks in load_corpus(tmp_path).documents("train")]


def test_text_that_ends_within_a_character_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "cut.txt").write_bytes("日".encode()[:2])
    with pytest.raises(LineartimeError, match="byte 0xe6 at offset 0"):
        read(part_of(tmp_path / "cut.txt"))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.json", "a.txt.gz"])
def test_a_file_that_vanished_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"text": "abc"}\n' * 10)
    corpus = load_corpus(tmp_path / name)
    (tmp_path / name).unlink()
    for ask in (lambda: corpus.identity("train"), lambda: [list(blocks) for blocks in corpus.documents("train")]):
        with pytest.raises(LineartimeError, match=rf"Cannot read .*{name}: No such file"):
            ask()


@pytest.mark.parametrize(("package", "name"), [("pyarrow", "a.parquet"), ("zstandard", "a.txt.zst")])
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, package: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(b"content")
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(LineartimeError, match=rf"{name} needs {package}.*pip install 'lineartime\[data\]'"):
        read(part_of(tmp_path / name))


def test_a_binary_file_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "module.pyc").write_bytes(b"\xa7\r\r\n" + bytes(60) + b"\xe3")
    with pytest.raises(LineartimeError, match="looks like a binary file: give its text, or in a folder leave the file out"):
        [list(blocks) for blocks in load_corpus(tmp_path / "module.pyc").documents("train")]
