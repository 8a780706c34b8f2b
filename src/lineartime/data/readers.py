"""Local files, plain or compressed, read as bytes, and records in them: JSON lines, JSON, CSV, Parquet, and shards of text.

The modules csv and json need no extra. They also do what pyarrow, and datasets with it, does not: another column may hold
values of two types, the line of an error is that of the file, not of a block, and CSV that ends within quotes is an error.
"""

import bz2
import codecs
import csv
import io
import json
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, groupby, islice, pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np

from lineartime.choices import TEXT_COLUMN, Split
from lineartime.errors import ArgumentError, LineartimeError, file_error, first_line, require_packages
from lineartime.files import read_plain

COMPRESSED = (".gz", ".xz", ".lzma", ".bz2", ".zst", ".zstd", ".zip")
TEXT_SHARDS = ("Arrow", "MDS", "WebDataset", "litdata")
RECORDS = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")
BLOCK = 1 << 18  # bytes, or characters, of text in memory at a time
_COMPRESSED_BLOCK = 1 << 8  # few bytes, because they may expand by a factor of thousands

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
"""The splits, which do not overlap."""
SHARES: dict[Split, float] = {"train": 0.9, "validation": 0.05, "test": 0.05}
HEAD = 8192  # bytes in which a binary file has a zero, by the rule of git

Columns = Collection[str] | None
Records = Iterator[tuple[str, Any]]
LEAVE_OUT = "leave the file out."
AGAIN = f"fetch it again, or {LEAVE_OUT}"


@dataclass(frozen=True)
class SourceFile:
    """A file with text, whose suffix indicates the format, or a shard, or a file of token ids; or some splits of it.

    Splits are ranges of a text or of ids, or records by a hash of their text.
    """

    path: Path
    column: str = TEXT_COLUMN  # of records, that holds the text
    shard: str = ""  # the kind of a shard (`lineartime.data.shards.shard_kind`); empty for other files
    raw_ids: str | None = None  # the dtype of token ids where a file does not state it
    splits: tuple[Split, ...] = ()  # empty for the whole file
    at_lines: bool = True  # whether a text is cut at the end of a line; otherwise between any two characters
    is_alone: bool = False  # whether no other file is divided with it, so that few records must be enough for all splits

    @property
    def version(self) -> tuple[int, int]:
        """The size and modification time of the file, which change when its content does."""
        with reporting(self.path):
            facts = self.path.stat()
        return facts.st_size, facts.st_mtime_ns

    @property
    def is_compressed(self) -> bool:
        """Whether the file is compressed, by its name."""
        return self.path.suffix.lower() in COMPRESSED

    @cached_property
    def format_suffix(self) -> str:
        """The suffix of the format, without that of a compression; for a .zip, of the file in it, if that is one of records.

        Of a shard, its kind.
        """
        if self.shard:
            return self.shard
        if self.path.suffix.lower() == ".zip":
            with reporting(self.path), zipfile.ZipFile(self.path) as archive:
                suffix = Path(_member(archive, self.path)).suffix.lower()
            if suffix in RECORDS:
                return suffix
        return Path(self.path.stem if self.is_compressed else self.path).suffix.lower()

    @property
    def has_records(self) -> bool:
        """Whether each record of the file is a document, rather than the whole file. Raises LineartimeError for a bad .zip."""
        return self.format_suffix in (*RECORDS, *TEXT_SHARDS)

    @cached_property
    def has_ids(self) -> bool:
        """Whether the file holds token ids, which of a file with columns the first value tells."""
        if self.shard in ("Arrow", "MDS") or (self.format_suffix == ".parquet" and not self.is_compressed):
            values = (
                next((record[name] for name in self.columns if name in record), "")
                for _, record in read_records(self, self.columns)
            )
            return isinstance(next((value for value in values if value is not None), None), (bytes, list, np.ndarray))
        return bool(self.shard) and not self.has_records

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the column of the text or the ids: the one that was named, or those in use for ids."""
        return (self.column, "input_ids", "tokens") if self.column == TEXT_COLUMN else (self.column,)

    def identity(self) -> str:
        """A string that changes when the file does, or when it is read in another way."""
        read_as = f"{self.format_suffix}:{self.column}:{self.is_alone:d}:{self.at_lines}{self.raw_ids or ''}"
        return f"{self.path.resolve()}:{'+'.join(self.splits)}:{self.version}:{read_as}"

    def documents(self) -> Iterator[Iterator[str]]:
        """Yield the documents, each as blocks of text. Raises LineartimeError, naming file and place, on unreadable text."""
        if self.has_ids:
            found = f"{self.path} holds token ids, and not text"
            raise LineartimeError(f"{found}: give the tokenizer that made them (`tokenizer`), or text.")
        if self.has_records:
            moved = _moved(self) if self.is_alone and self.splits else {}
            for text in read_texts(self):
                if not self.splits or (moved.get(text) or split_of(text)) in self.splits:
                    yield pieces(text)
            return
        next(_decoded(self, 0, None), "")  # what follows the start of UTF-16 could pass for UTF-8
        if not self.splits:
            yield _decoded(self, 0, None)
        for split in self.splits:
            yield _decoded(self, *_cuts(replace(self, splits=()), self.version)[split])

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open the file for reading its decompressed bytes.

        Raises LineartimeError, naming the file, if it cannot be read.
        """
        with reporting(self.path), self.path.open("rb") as raw:
            if self.path.suffix.lower() == ".zip":
                with zipfile.ZipFile(raw) as archive:
                    try:
                        member = archive.open(_member(archive, self.path))
                    except RuntimeError as error:  # a password, or a compression that zipfile cannot read
                        found = f"{self.path} cannot be read ({first_line(error)})"
                        raise LineartimeError(f"{found}: unpack it and give the folder.") from None
                    with member:
                        yield member
            elif self.is_compressed:
                yield io.BufferedReader(_Blocks(decompressed(raw, self.path)), BLOCK)
            else:
                yield raw


class _Blocks(io.RawIOBase):
    """An iterator of byte blocks as a file; empty blocks are skipped."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = filter(None, blocks)
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._ready = self._ready or next(self._blocks, b"")
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def decompressed(raw: IO[bytes], path: Path) -> Iterator[bytes]:
    """Decompress a file stream by stream, each with a new decoder.

    The readers of lzma and bz2 end at padding between streams, and that of zstandard takes a file that is cut off for whole.
    """
    decoder: Any = None
    has_streams = False
    while compressed := raw.read(_COMPRESSED_BLOCK):
        while compressed := compressed if decoder else compressed.lstrip(b"\0"):
            decoder, has_streams = decoder or _decoder(path), True
            try:
                yield decoder.decompress(compressed)
            except Exception as error:  # each library has its own
                raise EOFError(first_line(error)) from None
            compressed = decoder.unused_data if decoder.eof else b""
            decoder = None if decoder.eof else decoder
    if decoder is not None or not has_streams:
        raise EOFError("it ends within a stream" if has_streams else "it has only zeros")


def _decoder(path: Path) -> Any:
    match path.suffix.lower():
        case ".gz":
            return zlib.decompressobj(16 + zlib.MAX_WBITS)  # the format of gzip
        case ".xz" | ".lzma":
            return lzma.LZMADecompressor()
        case ".bz2":
            return bz2.BZ2Decompressor()
    require_packages("zstandard", extra="data", purpose=f"Reading {path}")
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


def _member(archive: zipfile.ZipFile, path: Path) -> str:
    """The name of the only file in an archive."""
    names = [name for name in archive.namelist() if not name.endswith("/")]  # the others are folders
    if len(names) != 1:
        raise LineartimeError(f"{path} holds {len(names)} files: unpack it and give the folder, or {LEAVE_OUT}")
    return names[0]


@contextmanager
def reporting(path: Path) -> Iterator[None]:
    """Raise LineartimeError, naming the file, where it cannot be read or decoded."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise damaged(path, first_line(error)) from None
    except OSError as error:
        raise (damaged(path, first_line(error)) if error.errno is None else file_error("read", path, error)) from None


def damaged(path: Path, what: str) -> LineartimeError:
    """The error for a file that does not hold what its format promises."""
    return LineartimeError(f"{path} is damaged or cut off ({what}): {AGAIN}")


def column_of(columns: Collection[str], file: SourceFile) -> str:
    """The column that holds the text or the token ids. Raises ArgumentError if there is none."""
    if found := [name for name in file.columns if name in columns]:
        return found[0]
    raise missing_column(file.column, str(file.path), columns)


def missing_column(column: str, where: str, columns: Iterable[str], otherwise: str = f", or {LEAVE_OUT}") -> ArgumentError:
    """The error for records of which the first lacks the column of the text, so that none is expected to have it."""
    found = f"is {column}, but {where} has the columns {', '.join(columns)}"
    return ArgumentError("text_column", f"{found}: name the one that holds the text{otherwise}")


def not_utf8(where: str, byte: int, offset: int) -> LineartimeError:
    """The error for a byte that is not UTF-8, or a zero, at an offset in a file."""
    encoding = "utf-16" if byte in (0, 0xFE, 0xFF) and offset < 2 else "latin1"
    advice = f"convert a text, for example by `iconv -f {encoding} -t utf-8`, or {LEAVE_OUT}"
    return LineartimeError(f"{where} is not UTF-8 text (byte 0x{byte:02x} at offset {offset}): {advice}")


# Text -------------------------------------------------------------------------------------------------------------------


def split_of(text: str) -> Split:
    """The split of a record by a hash of its text, wherever it stands: 5% are for validation, and as many for testing."""
    held_out: dict[int, Split] = {1: "validation", 2: "test"}
    return held_out.get(zlib.crc32(text.encode()) % 20, "train")


def _moved(file: SourceFile) -> dict[str, Split]:
    """Texts of a file of few records that have another split than `split_of`, so that none is empty if there are enough."""
    found = {text: split_of(text) for text in islice(filter(None, read_texts(file)), 200)}  # of more, each split has some
    moved: dict[str, Split] = {}
    for split in SPLITS:
        givers = [text for text, own in found.items() if (own == "train") != (split == "train")]
        if split not in found.values() and len(givers) > (split != "train"):
            text = max(givers, key=lambda each: zlib.crc32(each.encode()))
            found[text] = moved[text] = split
    return moved


def pieces(text: str) -> Iterator[str]:
    """Divide a text into blocks."""
    return (text[start : start + BLOCK] for start in range(0, len(text), BLOCK))


def _decoded(file: SourceFile, start: int, stop: int | None) -> Iterator[str]:
    """Decode the text between two byte offsets of a file, in blocks. Raises LineartimeError if it is not UTF-8.

    Zeros in the first bytes of a file are those of UTF-16 without a mark, or of no text.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = start
    with file.open() as stream:
        _skip(stream, start)
        block = b"-"
        while block:
            block = stream.read(BLOCK if stop is None else min(BLOCK, stop - position))
            held_back = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise not_utf8(str(file.path), error.object[error.start], position - held_back + error.start) from None
            if position == 0 and b"\0" in block[:HEAD]:
                raise not_utf8(str(file.path), 0, block.index(b"\0"))
            if position == 0:
                text = text.removeprefix("\ufeff")  # which some programs write at the beginning of a UTF-8 file
            position += len(block)
            if text:
                yield text


def _skip(stream: IO[bytes], count: int) -> None:
    """Skip the first `count` bytes of a stream."""
    if stream.seekable():
        stream.seek(count)
    while not stream.seekable() and count > 0 and (block := stream.read(min(BLOCK, count))):
        count -= len(block)


@lru_cache(maxsize=64)
def _cuts(file: SourceFile, version: tuple[int, int]) -> dict[Split, tuple[int, int]]:
    """The bounds of the three splits of a text, in bytes. A compressed file, whose length is unknown, is read several times."""
    length = version[0]
    if file.is_compressed:
        with file.open() as stream:
            length = sum(map(len, iter(lambda: stream.read(BLOCK), b"")))
    offsets = [round(length * share) for share in (SHARES["train"], SHARES["train"] + SHARES["validation"], 1)]
    first, second = (_cut(file, start, stop) for start, stop in pairwise(offsets))
    return {"train": (0, first), "validation": (first, second), "test": (second, length)}


def _cut(file: SourceFile, offset: int, stop: int) -> int:
    """The offset after the next line end; if no line ends soon, of the next character, or else of the one around `offset`.

    Soon is in the first half of the range from `offset` to `stop`, and at most 64 KiB from `offset`.
    """
    searched = min(1 << 16, (stop - offset) // 2)
    earliest = max(0, offset - 3)  # a character has at most 4 bytes
    with file.open() as stream:
        _skip(stream, earliest)
        before = stream.read(offset - earliest)
        following = stream.read(max(1, searched))
    newline = following.find(b"\n", 0, searched) if file.at_lines else -1
    if newline >= 0:
        return offset + newline + 1
    starts = [place for place, byte in enumerate(before + following[:4], earliest) if byte & 0xC0 != 0x80]
    if not following or not starts:  # the end of the file, or bytes that are not UTF-8
        return offset
    return next((place for place in starts if place >= offset), starts[-1])


# Records ----------------------------------------------------------------------------------------------------------------


def read_texts(file: SourceFile) -> Iterator[str]:
    """Yield the text of each record, empty for null. Raises LineartimeError, naming file and place, on unreadable text."""
    column, is_first = file.column, True
    for place, record in read_records(file, (column,)):
        where = f"{file.path}, {place},"
        if is_first and column not in record:
            raise missing_column(column, where, record)
        text, is_first = record.get(column, False), False  # False is no text, but None is an empty one
        try:
            ("" if text is None else text).encode()
        except (AttributeError, UnicodeEncodeError):  # of half a surrogate pair, which JSON can spell
            found = f'{text!r:.40} in "{column}" instead of a text' if column in record else f'no "{column}"'
            raise LineartimeError(f"{where} has {found}: correct it, or leave it out.") from None
        yield text or ""


def read_records(file: SourceFile, columns: Columns = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each record of a file with its place, such as "line 3". All commands read records by this function.

    `columns` are the columns to read; None for all. Others are read as well where leaving them out would save nothing.

    Raises LineartimeError, naming file and place, for what cannot be read, and ArgumentError for a file without records.
    """
    if not file.has_records:
        raise ArgumentError("data", f"is {file.path}, but must be a file of records: {', '.join(RECORDS)}.")
    read = _READERS.get(file.format_suffix, _json)
    for place, record in read(file, columns):
        if not isinstance(record, dict):
            where = f"{file.path}, {place},"
            raise LineartimeError(f"{where} is {record!r:.40}, but must be an object: correct it, or leave it out.")
        yield place, record


def _lines(file: SourceFile, stream: IO[bytes]) -> Iterator[str]:
    """The lines of a file. Raises LineartimeError, naming line and byte, for text that is not UTF-8."""
    position = 0
    for number, line in enumerate(stream, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            wrong = line.find(b"\0") if number == 1 else -1  # UTF-16 without a mark
        except UnicodeDecodeError as error:
            wrong = len(line) - len(error.object) + error.start
        if wrong >= 0:
            raise not_utf8(f"{file.path}, line {number:,},", line[wrong], position + wrong)
        yield text
        position += len(line)


def _json(file: SourceFile, _: Columns) -> Iterator[tuple[str, Any]]:
    """The objects of JSON lines. A .json file may also hold an array of objects or texts, or one object on several lines."""
    with file.open() as stream:
        lines = ((number, line) for number, line in enumerate(_lines(file, stream), 1) if line.strip())
        place, first = next(lines, (1, ""))
        is_object = first.lstrip().startswith("{") and first.rstrip().endswith("}")
        if file.format_suffix == ".json" and not is_object:
            value = _parsed(str(file.path), first + "".join(line for _, line in lines))
            for number, item in enumerate(value if isinstance(value, list) else [value], 1):
                yield f"record {number:,}", {file.column: item} if isinstance(item, str) else item
            return
        for number, line in chain([(place, first)] if first else [], lines):
            yield f"line {number:,}", _parsed(f"{file.path}, line {number:,},", line)


def _parsed(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise LineartimeError(f"{where} is not JSON ({reason.removesuffix(' at')}): correct it, or leave it out.") from None


def _csv(file: SourceFile, _: Columns) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(max(1 << 30, csv.field_size_limit()))  # of the whole process; a field may be a book
    with file.open() as stream:
        if file.format_suffix == ".tsv":  # by its standard, without quotes
            rows = csv.reader(_lines(file, stream), delimiter="\t", quoting=csv.QUOTE_NONE, strict=True)
        else:
            rows = csv.reader(_lines(file, stream), strict=True)
        try:
            names = [name.strip() for name in next(rows, [])]
            for row in rows:
                if row and len(row) != len(names):  # an empty line is no record
                    fields = "1 field" if len(row) == 1 else f"{len(row)} fields"
                    found = f"{file.path}, line {rows.line_num:,}, has {fields}, but line 1 names {len(names)}"
                    raise LineartimeError(f"{found}: quote fields that have separators in them, or {LEAVE_OUT}")
                if row:
                    yield f"line {rows.line_num:,}", dict(zip(names, row, strict=True))
        except csv.Error as error:
            where = f"{file.path}, line {rows.line_num:,},"
            raise LineartimeError(f"{where} is not CSV ({error}): correct it, or leave it out.") from None


def _rows(file: SourceFile, columns: Columns) -> Records:
    number = 0
    try:
        for batch in batches(file, 16, columns):  # few rows at a time: one may be a book
            for row in batch.to_pylist():
                number += 1
                yield f"row {number:,}", row
    except UnicodeDecodeError:
        found = f"{file.path}, after row {number:,}, is not UTF-8 text"
        raise LineartimeError(f"{found}: write it anew, or leave it out.") from None


def batches(file: SourceFile, rows: int, columns: Columns) -> Iterator[Any]:
    """The record batches of Parquet, or of Arrow by memory map, of at most so many rows; with all columns if none is there."""
    path = file.path
    if file.is_compressed:
        raise LineartimeError(f"{path} is Parquet in a compressed file, which cannot be read: unpack it.")
    require_packages("pyarrow", extra="data", purpose=f"Reading {path}")
    import pyarrow
    import pyarrow.parquet

    try:
        with file.open() as stream:
            table: Any = _arrow(file, stream).read_all() if file.shard else pyarrow.parquet.ParquetFile(stream)
            every = table.schema.names if file.shard else table.schema_arrow.names
            names = [name for name in every if columns is None or name in columns] or every
            yield from table.select(names).to_batches(rows) if file.shard else table.iter_batches(rows, columns=names)
    except pyarrow.ArrowException as error:
        raise damaged(path, first_line(error)) from None


def _arrow(file: SourceFile, stream: IO[bytes]) -> Any:
    """Open the Arrow that a file is, as a file or a stream of Arrow, or that follows the offsets in a chunk of litdata."""
    import pyarrow

    if file.shard == "litdata":
        content = stream.read()
        found = content[content.index(b"ARROW1") : content.rindex(b"ARROW1") + 6]
        return pyarrow.ipc.open_file(pyarrow.BufferReader(found))
    source, is_file = pyarrow.memory_map(str(file.path)), stream.read(6) == b"ARROW1"
    stream.seek(max(0, file.version[0] - 8))
    if not is_file and stream.read() != b"\xff" * 4 + bytes(4):
        raise EOFError("the mark of the end of a stream of Arrow is missing")
    return (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(source)


# Shards of text ----------------------------------------------------------------------------------------------------------


def _samples(file: SourceFile, columns: Columns) -> Records:
    """The samples of a shard of MDS (mosaicml-streaming) or a chunk of litdata: texts as such, other fields as their bytes.

    A shard begins with the number n of its samples and n + 1 offsets, and a sample with the sizes of its fields without a fixed
    size, all uint32. MDS describes the fields before the first sample, and litdata in its index.json.
    """
    with file.open() as stream:
        count = int.from_bytes(stream.read(4), "little")
        places = np.frombuffer(stream.read(4 * count + 4).ljust(4), "<u1")
        offsets = places[: len(places) // 4 * 4].view("<u4").astype(np.int64)
        if len(offsets) <= count or (np.diff(offsets, prepend=4 * count + 8) < 0).any():
            raise EOFError("its offsets do not ascend")
        if file.shard == "litdata" and count and offsets[0] == offsets[-1]:
            yield from _rows(file, columns)
            return
        fields = _fields(file, stream.read(int(offsets[0]) - 4 * count - 8))
        fixed = [size for *_, size in fields]
        for number, size in enumerate(np.diff(offsets).tolist(), 1):
            data, free = stream.read(size), 4 * fixed.count(None)
            given = iter(np.frombuffer(data[:free].ljust(free), "<u4").tolist())
            bounds = np.cumsum([free, *(next(given) if own is None else own for own in fixed)]).tolist()
            if len(data) != size or bounds[-1] != size:
                raise EOFError(f"sample {number:,} has another size than its fields")
            place, record = f"sample {number:,}", {}
            for (name, kind, _), (start, stop) in zip(fields, pairwise(bounds), strict=True):
                if columns is None or name in columns:
                    record[name] = _field(file, place, kind, data[start:stop])
            yield place, record


_NUMBERS = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}  # dtypes in an array of MDS


def _field(file: SourceFile, place: str, kind: str, value: bytes) -> Any:
    """A field of a sample: a text; an array of numbers, whose dtype and shape its kind states, or else its first bytes."""
    if kind == "str":
        return _text(file, place, value)
    if kind == "bytes" and file.raw_ids is None:
        return value
    try:
        _, dtype, shape = (*kind.split(":"), "", "")[:3] if kind != "bytes" else ("", file.raw_ids, "?")
        if not dtype:
            dtype, value = _NUMBERS[value[0]], value[1:]
        if not shape:  # the number of sizes, times 4, plus the power of two of their width
            value = value[1 + (value[0] >> 2 << (value[0] & 3)) :]
        return np.frombuffer(value, dtype)
    except (IndexError, KeyError, TypeError, ValueError):
        raise damaged(file.path, f"{place} does not hold {kind} of whole numbers") from None


def _fields(file: SourceFile, header: bytes) -> list[tuple[str, str, int | None]]:
    """The name, the encoding and the fixed size of each field of a sample, from the header of MDS or the index of litdata."""
    try:
        if file.shard == "MDS":
            config = read_plain(file.path, AGAIN, header)
            return list(zip(config["column_names"], config["column_encodings"], config["column_sizes"], strict=True))
        config = read_plain(file.path.with_name("index.json"), AGAIN)["config"]
        kinds = config["data_format"]
    except (KeyError, TypeError, ValueError):
        raise damaged(file.path, f"its fields are not described as {file.shard} does") from None
    if config.get("compression") or config.get("encryption") or kinds.count("str") != 1:
        found = f"{file.path} has the fields {', '.join(kinds)} and the compression {config.get('compression')}"
        raise LineartimeError(f"{found}, but must have one str, uncompressed: write it anew, or {LEAVE_OUT}")
    return [(file.column if kind == "str" else str(place), kind, None) for place, kind in enumerate(kinds)]


def _webdataset(file: SourceFile, _: Columns) -> Records:
    """The samples of a tar archive: files of one name, of which .txt is the text, or .json has it in a column."""
    with file.open() as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        members = (member for member in archive if member.isfile())
        for key, files in groupby(members, lambda member: re.sub(r"\.[^/]*$", "", member.name)):
            place, parts = f"sample {key}", {}
            for member in files:  # each has to be read before the next one is looked for
                opened, suffix = archive.extractfile(member), Path(member.name).suffix
                parts[suffix] = opened.read() if opened and suffix in (".txt", ".json") else b""
            if ".txt" in parts:
                yield place, {file.column: _text(file, place, parts[".txt"])}
            elif ".json" in parts:
                yield place, _parsed(f"{file.path}, {place},", _text(file, place, parts[".json"]))
            else:
                found = f"{file.path}, {place}, has the parts {', '.join(sorted(parts))}, but must have .txt or .json"
                raise LineartimeError(f"{found}: correct it, or {LEAVE_OUT}")
    if not file.is_compressed:
        with file.path.open("rb") as stream:
            stream.seek(-1024, io.SEEK_END)
            if any(stream.read()):
                raise damaged(file.path, "the two blocks of zeros at its end are missing")


def _text(file: SourceFile, place: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise LineartimeError(f"{file.path}, {place}, is not UTF-8 text: write it anew, or leave it out.") from None


_READERS: dict[str, Callable[[SourceFile, Columns], Records]] = {
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _rows,
    "Arrow": _rows,
    "MDS": _samples,
    "WebDataset": _webdataset,
    "litdata": _samples,
}
