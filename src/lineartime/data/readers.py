"""Local files, plain or compressed, read as bytes, and records in them: JSON lines, JSON, CSV and Parquet.

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
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal

from lineartime.choices import TEXT_COLUMN
from lineartime.errors import ArgumentError, LineartimeError, file_error, first_line, missing_extra, require_packages

COMPRESSED = (".gz", ".xz", ".lzma", ".bz2", ".zst", ".zstd", ".zip")
CSV = (".csv", ".tsv")
RECORDS = (".jsonl", ".ndjson", ".json", ".parquet", *CSV)
BLOCK = 1 << 18  # bytes, or characters, of text in memory at a time
_COMPRESSED_BLOCK = 1 << 12  # few bytes, because they may expand by a factor of thousands
_Inflater = type(zlib.decompressobj())

LEAVE_OUT = "leave the file out."
_SEPARATORS = ",;\t|"
"""Of CSV; the first that makes one of the column that is read."""
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class SourceFile:
    """A file with text, and how it is read.

    Attributes:
        path: the file; its suffix indicates the format.
        column: the column of records that holds the text.
    """

    path: Path
    column: str = TEXT_COLUMN

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

    @property
    def format_suffix(self) -> str:
        """The suffix of the format, without that of a compression; for a .zip, of the file in it, if that is one of records."""
        member = _member_suffix(self.path, self.version) if self.path.suffix.lower() == ".zip" else ""
        return member if member in RECORDS else Path(self.path.stem if self.is_compressed else self.path).suffix.lower()

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open the file for reading its decompressed bytes.

        Raises LineartimeError, naming the file, if it cannot be read.
        """
        with reporting(self.path), self.path.open("rb") as raw:
            if self.is_compressed:
                yield io.BufferedReader(_Decompressed(_blocks(raw, self.path)), BLOCK)
            else:
                yield raw


class _Decompressed(io.RawIOBase):
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


def _blocks(raw: IO[bytes], path: Path) -> Iterator[bytes]:
    """The decompressed bytes of a file."""
    match path.suffix.lower():
        case ".gz":
            yield from _streams(raw, partial(zlib.decompressobj, 16 + zlib.MAX_WBITS))  # the format of gzip
        case ".xz" | ".lzma":
            yield from _streams(raw, lzma.LZMADecompressor)
        case ".bz2":
            yield from _streams(raw, bz2.BZ2Decompressor)
        case ".zst" | ".zstd":
            require_packages("zstandard", extra="data", purpose=f"Reading {path}")
            import zstandard

            yield from _streams(raw, lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj())
        case ".zip":
            with zipfile.ZipFile(raw) as archive:
                try:
                    member = archive.open(_member(archive, path))
                except (RuntimeError, NotImplementedError) as error:  # a password, or a compression that zipfile cannot read
                    found = f"{path} cannot be read ({first_line(error)})"
                    raise LineartimeError(f"{found}: unpack it and give the folder.") from None
                with member:
                    yield from iter(partial(member.read, BLOCK), b"")


def _streams(raw: IO[bytes], new: Callable[[], Any]) -> Iterator[bytes]:
    """Decompress stream by stream, with new decoders.

    The readers of lzma and bz2 end at padding between streams, and that of zstandard takes a file that is cut off for whole.
    """
    decoder: Any = None
    compressed = raw.read(_COMPRESSED_BLOCK)
    if compressed.startswith(bytes(5)):  # which lzma takes for an empty file
        raise EOFError("it starts with zeros")
    while compressed:
        if decoder is None:
            compressed = compressed.lstrip(b"\0")
            decoder = new() if compressed else None
        if decoder is not None:
            try:
                yield from _pieces(decoder, compressed)
            except Exception as error:  # each library has its own
                raise EOFError(first_line(error)) from None
            compressed = decoder.unused_data if decoder.eof else b""
            decoder = None if decoder.eof else decoder
        compressed = compressed or raw.read(_COMPRESSED_BLOCK)
    if decoder is not None:
        raise EOFError("it ends within a stream")


def _pieces(decoder: Any, compressed: bytes) -> Iterator[bytes]:
    """What a decoder makes of some bytes; at most BLOCK at a time, but for zstandard, whose decoder has no limit."""
    if isinstance(decoder, _Inflater):
        yield decoder.decompress(compressed, BLOCK)
        while decoder.unconsumed_tail and not decoder.eof:  # at the end, what was left before stays there
            yield decoder.decompress(decoder.unconsumed_tail, BLOCK)
    elif isinstance(decoder, bz2.BZ2Decompressor | lzma.LZMADecompressor):
        yield decoder.decompress(compressed, BLOCK)
        while not (decoder.eof or decoder.needs_input):
            yield decoder.decompress(b"", BLOCK)
    else:
        yield decoder.decompress(compressed)


def _member(archive: zipfile.ZipFile, path: Path) -> str:
    """The name of the only file in an archive."""
    names = [name for name in archive.namelist() if not name.endswith("/")]  # the others are folders
    if len(names) != 1:
        raise LineartimeError(f"{path} holds {len(names)} files: unpack it and give the folder, or {LEAVE_OUT}")
    return names[0]


@lru_cache(maxsize=4096)
def _member_suffix(path: Path, version: tuple[int, int]) -> str:
    """The suffix of the file in a .zip of this version."""
    with reporting(path), zipfile.ZipFile(path) as archive:
        return Path(_member(archive, path)).suffix.lower()


@contextmanager
def reporting(path: Path) -> Iterator[None]:
    """Raise LineartimeError, naming the file, where it cannot be read or decoded."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
        raise damaged(path, error) from None
    except OSError as error:
        raise (damaged(path, error) if error.errno is None else file_error("read", path, error)) from None


def damaged(path: Path, error: Exception) -> LineartimeError:
    """The error for a file that a library cannot decode."""
    return LineartimeError(f"{path} is damaged or cut off ({first_line(error)}): fetch it again, or {LEAVE_OUT}")


def missing_column(column: str, where: str, columns: Iterable[str], otherwise: str = f", or {LEAVE_OUT}") -> ArgumentError:
    """The error for records of which the first lacks the column of the text, so that none is expected to have it."""
    found = f"is {column}, but {where} has the columns {', '.join(columns)}"
    return ArgumentError("text_column", f"{found}: name the one that holds the text", *(otherwise or (", or {LEAVE_OUT}")))


def not_utf8(where: str, content: bytes, place: int, offset: int) -> LineartimeError:
    """The error for a byte that is not UTF-8, `place` in some content of a file and `offset` in the file."""
    byte = content[place]
    found = f"{where} is not UTF-8 text (byte 0x{byte:02x} at offset {offset})"
    without_mark = f"utf-16{'le' if offset % 2 else 'be'}" if byte == 0 else "latin1"
    encoding = "utf-16" if offset == 0 and byte in (0xFE, 0xFF) else without_mark
    return LineartimeError(f"{found}: convert a text, for example by `iconv -f {encoding} -t utf-8`, or {LEAVE_OUT}")


Format = Literal["text", "json lines", "json", "csv", "parquet"]


def file_format(file: SourceFile) -> Format:
    """The format of a file; all formats except "text" hold records.

    A .json file holds an array of objects or texts, or one object; or JSON lines, if its first line is an object.

    Raises LineartimeError for a .json or .zip file that cannot be read, and Parquet in a compressed file.
    """
    match file.format_suffix:
        case ".parquet":
            if file.is_compressed:
                raise LineartimeError(f"{file.path} is Parquet in a compressed file, which cannot be read: unpack it.")
            return "parquet"
        case ".jsonl" | ".ndjson":
            return "json lines"
        case ".csv" | ".tsv":
            return "csv"
        case ".json":
            return _json_format(file, file.version)
    return "text"


def read_texts(file: SourceFile) -> Iterator[str]:
    """Yield the text of each record, empty for null. Raises LineartimeError, naming file and place, on unreadable text."""
    column, is_first = file.column, True
    for place, record in read_records(file, (column,)):
        where, wrong, text = f"{file.path}, {place},", "", record.get(column)
        if column not in record and is_first:
            raise missing_column(column, where, record)
        if column not in record:
            wrong = f'has no "{column}"'  # but the records before it have: another column would not help
        elif not isinstance(text, str | None):
            wrong = f'has {text!r:.40} in "{column}" instead of a text'
        else:
            try:
                (text or "").encode()
            except UnicodeEncodeError as error:
                wrong = f"has an incomplete character in its text ({error.reason})"
        if wrong:
            raise LineartimeError(f"{where} {wrong}: correct it, or leave it out.")
        yield text or ""
        is_first = False


def read_records(file: SourceFile, columns: Collection[str] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each record of a file with its place, such as "line 3". All commands read records by this function.

    Args:
        file: the file, whose column decides the separator of CSV.
        columns: the columns to read; None for all. Others are read as well where leaving them out would save nothing.

    Raises LineartimeError, naming file and place, for what cannot be read, and ArgumentError for a file without records.
    """
    readers = {"json lines": _json_lines, "json": _json, "csv": _csv, "parquet": _parquet}
    read = readers.get(file_format(file))
    if read is None:
        raise ArgumentError("data", f"is {file.path}, but must be a file of records: {', '.join(RECORDS)}.")
    for place, record in read(file, columns):
        if not isinstance(record, dict):
            raise LineartimeError(
                f"{file.path}, {place}, is {record!r:.40}, but must be an object: correct it, or leave it out."
            )
        yield place, record


def _json_lines(file: SourceFile, _: Collection[str] | None) -> Iterator[tuple[str, Any]]:
    position = 0
    with file.open() as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                for value in _values(f"{file.path}, line {number},", line, position):
                    yield f"line {number:,}", value
            position += len(line)


def _json(file: SourceFile, _: Collection[str] | None) -> Iterator[tuple[str, Any]]:
    """An array of objects or texts, or objects one after another."""
    with file.open() as stream:
        values = _values(str(file.path), stream.read(), 0)
    if len(values) == 1 and isinstance(values[0], list):
        values = [{file.column: value} if isinstance(value, str) else value for value in values[0]]
    yield from ((f"record {number:,}", value) for number, value in enumerate(values, 1))


@lru_cache(maxsize=4096)
def _json_format(file: SourceFile, version: tuple[int, int]) -> Format:
    """The format of a .json file of this version."""
    with file.open() as stream:
        first = next((line for line in stream if not line.removeprefix(codecs.BOM_UTF8).isspace()), b"")
    try:
        return "json lines" if isinstance(json.loads(first.removeprefix(codecs.BOM_UTF8)), dict) else "json"
    except (ValueError, RecursionError):
        return "json"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise json.JSONDecodeError("an object has one name twice", "", 0)
    return found


def _values(where: str, content: bytes, position: int) -> list[Any]:
    """The values of a JSON text, one after another, which is `position` bytes after the beginning of its file."""
    if position == 0 and content.startswith(codecs.BOM_UTF8):
        position, content = len(codecs.BOM_UTF8), content.removeprefix(codecs.BOM_UTF8)
    values: list[Any] = []
    try:
        text, decoder, end = content.decode().strip(), json.JSONDecoder(object_pairs_hook=_object), 0
        while end < len(text) or not values:
            value, end = decoder.raw_decode(text, end)
            values.append(value)
            end = _SPACE.match(text, end).end()  # type: ignore[union-attr]  # which matches anything
        return values
    except UnicodeDecodeError as error:
        raise not_utf8(where, content, error.start, position + error.start) from None
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise LineartimeError(f"{where} is not JSON ({reason.removesuffix(' at')}): correct it, or leave it out.") from None


def _csv(file: SourceFile, columns: Collection[str] | None) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(max(1 << 30, csv.field_size_limit()))  # of the whole process; a field may be a book
    with file.open() as stream:
        lines = _lines(file, stream)
        header = next(lines, "").removeprefix("\ufeff")
        if "\0" in header:  # UTF-16 without a mark
            raise not_utf8(f"{file.path}, line 1,", header.encode(), header.index("\0"), header.index("\0"))

        def named(separator: str) -> list[str]:
            return [name.strip() for name in next(csv.reader([header], delimiter=separator), [])]

        if file.format_suffix == ".tsv":  # by its standard, without quotes
            rows = csv.reader(chain([header], lines), delimiter="\t", quoting=csv.QUOTE_NONE, strict=True)
        else:
            separator = next((each for each in _SEPARATORS if file.column in named(each)), ",")
            rows = csv.reader(chain([header], lines), delimiter=separator, strict=True)
        try:
            names = [name.strip() for name in next(rows, [])]
            _check_once(names, columns, f"{file.path}, line 1,")
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


def _check_once(names: Sequence[str], columns: Collection[str] | None, where: str) -> None:
    """Raise LineartimeError for a column, of those that are read, that a file names twice."""
    for name in names:
        if name and names.count(name) > 1 and (columns is None or name in columns):
            raise LineartimeError(f"{where} names the column {name} twice: rename one, or {LEAVE_OUT}")


def _lines(file: SourceFile, stream: IO[bytes]) -> Iterator[str]:
    position = 0
    for number, line in enumerate(stream, 1):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            where = f"{file.path}, line {number:,},"
            raise not_utf8(where, line, error.start, position + error.start) from None
        position += len(line)


def _parquet(file: SourceFile, columns: Collection[str] | None) -> Iterator[tuple[str, Any]]:
    path, number = file.path, 0
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise missing_extra("pyarrow", "data", f"Reading {path}") from None
    try:
        with reporting(path), path.open("rb") as raw, parquet.ParquetFile(raw) as table:
            names = table.schema_arrow.names
            _check_once(names, columns, str(path))
            names = [name for name in names if columns is None or name in columns] or names
            for batch in table.iter_batches(batch_size=16, columns=names):  # few rows at a time: a row may be a whole book
                for row in range(batch.num_rows):
                    number += 1
                    yield f"row {number:,}", {name: each[row].as_py() for name, each in zip(names, batch.columns, strict=True)}
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x} at offset {error.start}"
        raise LineartimeError(f"{path}, row {number:,}, is not UTF-8 text ({byte}): write it anew, or leave it out.") from None
    except arrow.ArrowException as error:
        raise damaged(path, error) from None
