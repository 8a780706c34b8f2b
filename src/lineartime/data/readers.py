"""Local files, plain or compressed, read as bytes, and records in them: JSON lines, JSON, CSV and Parquet.

The modules csv and json need no extra. They also do what pyarrow, and datasets with it, does not: another column may hold
values of two types, the line of an error is that of the file, not of a block, and CSV that ends within quotes is an error.
"""

import bz2
import csv
import io
import json
import lzma
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import IO, Any

from lineartime.choices import TEXT_COLUMN
from lineartime.errors import ArgumentError, LineartimeError, file_error, first_line, require_packages

COMPRESSED = (".gz", ".xz", ".lzma", ".bz2", ".zst", ".zstd", ".zip")
RECORDS = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")
BLOCK = 1 << 18  # bytes, or characters, of text in memory at a time
_COMPRESSED_BLOCK = 1 << 8  # few bytes, because they may expand by a factor of thousands

LEAVE_OUT = "leave the file out."


@dataclass(frozen=True)
class SourceFile:
    """A file with text, whose suffix indicates the format."""

    path: Path
    column: str = TEXT_COLUMN  # of records, that holds the text

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
        """The suffix of the format, without that of a compression; for a .zip, of the file in it, if that is one of records."""
        if self.path.suffix.lower() == ".zip":
            with reporting(self.path), zipfile.ZipFile(self.path) as archive:
                suffix = Path(_member(archive, self.path)).suffix.lower()
            if suffix in RECORDS:
                return suffix
        return Path(self.path.stem if self.is_compressed else self.path).suffix.lower()

    @property
    def has_records(self) -> bool:
        """Whether each record of the file is a document, rather than the whole file. Raises LineartimeError for a bad .zip."""
        return self.format_suffix in RECORDS

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
    except (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
        raise _damaged(path, error) from None
    except OSError as error:
        raise (_damaged(path, error) if error.errno is None else file_error("read", path, error)) from None


def _damaged(path: Path, error: Exception) -> LineartimeError:
    return LineartimeError(f"{path} is damaged or cut off ({first_line(error)}): fetch it again, or {LEAVE_OUT}")


def missing_column(column: str, where: str, columns: Iterable[str], otherwise: str = f", or {LEAVE_OUT}") -> ArgumentError:
    """The error for records of which the first lacks the column of the text, so that none is expected to have it."""
    found = f"is {column}, but {where} has the columns {', '.join(columns)}"
    return ArgumentError("text_column", f"{found}: name the one that holds the text{otherwise}")


def not_utf8(where: str, byte: int, offset: int) -> LineartimeError:
    """The error for a byte that is not UTF-8, or a zero, at an offset in a file."""
    encoding = "utf-16" if byte in (0, 0xFE, 0xFF) and offset < 2 else "latin1"
    advice = f"convert a text, for example by `iconv -f {encoding} -t utf-8`, or {LEAVE_OUT}"
    return LineartimeError(f"{where} is not UTF-8 text (byte 0x{byte:02x} at offset {offset}): {advice}")


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


def read_records(file: SourceFile, columns: Collection[str] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each record of a file with its place, such as "line 3". All commands read records by this function.

    `columns` are the columns to read; None for all. Others are read as well where leaving them out would save nothing.

    Raises LineartimeError, naming file and place, for what cannot be read, and ArgumentError for a file without records.
    """
    if not file.has_records:
        raise ArgumentError("data", f"is {file.path}, but must be a file of records: {', '.join(RECORDS)}.")
    if file.format_suffix == ".parquet":
        yield from _parquet(file, columns)
    elif file.format_suffix in (".csv", ".tsv"):
        yield from _csv(file)
    else:
        for place, record in _json(file):
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


def _json(file: SourceFile) -> Iterator[tuple[str, Any]]:
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


def _csv(file: SourceFile) -> Iterator[tuple[str, dict[str, Any]]]:
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


def _parquet(file: SourceFile, columns: Collection[str] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    path, number = file.path, 0
    if file.is_compressed:
        raise LineartimeError(f"{path} is Parquet in a compressed file, which cannot be read: unpack it.")
    require_packages("pyarrow", extra="data", purpose=f"Reading {path}")
    import pyarrow
    import pyarrow.parquet

    try:
        with file.open() as stream, pyarrow.parquet.ParquetFile(stream) as table:
            names = [name for name in table.schema_arrow.names if columns is None or name in columns]
            for batch in table.iter_batches(batch_size=16, columns=names or None):  # few rows at a time: one may be a book
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number:,}", row
    except UnicodeDecodeError:
        raise LineartimeError(f"{path}, after row {number:,}, is not UTF-8 text: write it anew, or leave it out.") from None
    except pyarrow.ArrowException as error:
        raise _damaged(path, error) from None
