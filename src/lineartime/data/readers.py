"""Local files as documents: text, JSON lines and Parquet, plain or compressed, one block or document in memory at a time."""

import gzip
import io
import json
import lzma
import zipfile
import zlib
from codecs import getincrementaldecoder
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, cast

from lineartime.choices import Split
from lineartime.errors import LineartimeError, cannot, missing_extra

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
SHARES: dict[Split, float] = {"train": 0.9, "validation": 0.05, "test": 0.05}

BLOCK = 1 << 18  # characters, or bytes, of text in memory at a time
_COMPRESSED = (".gz", ".xz", ".zst", ".zip")
_JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Part:
    """A file, or a part of one.

    Attributes:
        path: the file; its name says which format it has.
        split: only this split: of text, by position; of JSON lines and Parquet, by the number of the document.
        at_lines: whether text is cut at the end of a line, or between any two characters.
    """

    path: Path
    split: Split | None = None
    at_lines: bool = True

    def identity(self) -> str:
        """A string that changes when the file does."""
        return f"{self.path.resolve()}:{self.split}:{self.at_lines}:{_version(self.path)}"

    def documents(self) -> Iterator[Iterator[str]]:
        """Its documents, each in blocks of text; LineartimeError, naming file and place, for what cannot be read."""
        if is_text(self.path):
            cuts = None if self.split is None else _cuts(self.path, self.at_lines, _version(self.path))[self.split]
            yield _decoded(self.path, *(cuts or (0, None)))
            return
        texts = _parquet(self.path) if _suffix(self.path) == ".parquet" else _json_lines(self.path)
        for number, text in enumerate(texts):
            if self.split in (None, split_of(number)):
                yield pieces(text)


def split_of(number: int) -> Split:
    """The split of a document by its number in a file: of every twenty, one is for validation and one for testing."""
    held_out: dict[int, Split] = {1: "validation", 2: "test"}
    return held_out.get(number % 20, "train")


def pieces(text: str) -> Iterator[str]:
    """A text in blocks."""
    return (text[start : start + BLOCK] for start in range(0, len(text), BLOCK))


def is_text(path: Path) -> bool:
    """Whether a file is one document, rather than one in each line or row.

    A .json file holds JSON lines if its first line is an object with a text, and is one text otherwise.
    """
    suffix = _suffix(path)
    if suffix == ".json":
        try:
            with open_bytes(path) as stream:
                first = json.loads(stream.readline())
        except (ValueError, RecursionError):
            return True
        return not (isinstance(first, dict) and "text" in first)
    return suffix not in (*_JSON_LINES, ".parquet")


def _suffix(path: Path) -> str:
    """The suffix of a file's format, without that of its compression."""
    name = Path(path.stem) if path.suffix.lower() in _COMPRESSED else path
    return name.suffix.lower()


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The decompressed bytes of a file; LineartimeError, naming it, if they cannot be read."""
    try:
        with path.open("rb") as raw:
            match path.suffix.lower():
                case ".gz":
                    yield cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
                case ".xz":
                    with lzma.LZMAFile(raw) as stream:
                        yield stream
                case ".zst":
                    yield io.BufferedReader(_Reader(_zstandard(raw, path)), BLOCK)
                case ".zip":
                    with zipfile.ZipFile(raw) as archive:
                        names = archive.namelist()
                        if len(names) != 1:
                            raise LineartimeError(f"{path} holds {len(names)} files: unpack it and give the folder.")
                        with archive.open(names[0]) as member:
                            yield member
                case _:
                    yield raw
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, zipfile.BadZipFile) as error:
        raise _damaged(path, error) from None
    except OSError as error:
        raise cannot("read", path, error) from None


def _damaged(path: Path, error: Exception) -> LineartimeError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return LineartimeError(f"{path} is damaged or cut off ({reason}): fetch it again, or leave it out.")


def _zstandard(raw: IO[bytes], path: Path) -> Iterator[bytes]:
    """Decompress frame after frame, and notice a file that is cut off, as the zstandard package's own reader does not."""
    try:
        import zstandard
    except ImportError:
        raise missing_extra("zstandard", "data", f"Reading {path}") from None
    frame: Any = None
    compressed = b""
    while compressed := compressed or raw.read(1 << 14):  # few, because they may expand by a factor of thousands
        frame = frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        try:
            yield frame.decompress(compressed)
        except zstandard.ZstdError as error:
            raise EOFError(str(error)) from None
        compressed = frame.unused_data if frame.eof else b""
        frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it ends within a frame")


class _Reader(io.RawIOBase):
    """Blocks of bytes, of which empty ones are skipped, as a file."""

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


def _decoded(path: Path, start: int, stop: int | None) -> Iterator[str]:
    """The text between two bytes of a file, in blocks; LineartimeError if it is not UTF-8."""
    decoder = getincrementaldecoder("utf-8")()
    position = start
    with open_bytes(path) as stream:
        _skip(stream, start)
        block = b"-"
        while block:
            block = stream.read(BLOCK if stop is None else min(BLOCK, stop - position))
            held_back = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                offset = position - held_back + error.start
                raise _not_utf8(f"{path}", error.object[error.start], offset) from None
            position += len(block)
            if text:
                yield text


def _not_utf8(where: str, byte: int, offset: int) -> LineartimeError:
    return LineartimeError(
        f"{where} is not UTF-8 text (byte 0x{byte:02x} at offset {offset}): convert it to UTF-8, or leave it out."
    )


def _skip(stream: IO[bytes], count: int) -> None:
    """Skip `count` bytes."""
    if stream.seekable():
        stream.seek(count)
        return
    while count > 0 and (block := stream.read(min(BLOCK, count))):
        count -= len(block)


def _json_lines(path: Path) -> Iterator[str]:
    position = 0
    with open_bytes(path) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield _text_of_line(f"{path}, line {number},", line, position)
            position += len(line)


def _text_of_line(where: str, line: bytes, position: int) -> str:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _not_utf8(where, line[error.start], position + error.start) from None
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise LineartimeError(f'{where} is not JSON ({reason}): every line must be an object with a "text".') from None
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise LineartimeError(f'{where} has no text: every line must be an object with a "text", which is a string.')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = error.reason
        raise LineartimeError(f"{where} has half a character in its text ({reason}): correct or delete the line.") from None
    return text


def _parquet(path: Path) -> Iterator[str]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise missing_extra("pyarrow", "data", f"Reading {path}") from None
    number = 0
    try:
        with path.open("rb") as raw, parquet.ParquetFile(raw) as file:
            names = file.schema_arrow.names
            if "text" not in names:
                raise LineartimeError(f"{path} has no column text, but {', '.join(names)}: rename the one that holds the text.")
            # Few rows at a time: a row may be a whole book.
            for batch in file.iter_batches(batch_size=16, columns=["text"]):
                for value in batch.column(0):
                    text = value.as_py()
                    if not isinstance(text, str):
                        raise LineartimeError(
                            f"{path}, row {number}, has no text, but {text!r:.40}: correct or delete the row."
                        )
                    yield text
                    number += 1
    except UnicodeDecodeError as error:
        raise _not_utf8(f"{path}, row {number},", error.object[error.start], error.start) from None
    except OSError as error:
        raise (_damaged(path, error) if error.errno is None else cannot("read", path, error)) from None
    except arrow.ArrowException as error:
        raise _damaged(path, error) from None


def _version(path: Path) -> tuple[int, int]:
    """The size and date of a file, which change when it does."""
    try:
        facts = path.stat()
    except OSError as error:
        raise cannot("read", path, error) from None
    return facts.st_size, facts.st_mtime_ns


@lru_cache(maxsize=64)
def _cuts(path: Path, at_lines: bool, version: tuple[int, int]) -> dict[Split, tuple[int, int]]:
    """The bounds of the three splits of a text, in bytes.

    For a compressed file, whose length is unknown, this reads the file several times.
    """
    length = version[0]
    if path.suffix.lower() in _COMPRESSED:
        with open_bytes(path) as stream:
            length = sum(map(len, iter(lambda: stream.read(BLOCK), b"")))
    shares = [SHARES["train"], SHARES["train"] + SHARES["validation"], 1]
    offsets = [round(length * share) for share in shares]
    first, second = (_cut(path, start, stop, at_lines) for start, stop in pairwise(offsets))
    return {"train": (0, first), "validation": (first, second), "test": (second, length)}


def _cut(path: Path, offset: int, stop: int, at_line: bool) -> int:
    """The offset after the next end of line, or of the next character if no line ends in the first half up to `stop`."""
    with open_bytes(path) as stream:
        _skip(stream, offset)
        following = stream.read(min(1 << 16, (stop - offset) // 2))
    newline = following.find(b"\n") if at_line else -1
    if newline >= 0:
        return offset + newline + 1
    return offset + next((i for i, byte in enumerate(following) if byte & 0xC0 != 0x80), len(following))
