"""Local files, plain or compressed, read as bytes; and the errors of reading."""

import bz2
import gzip
import io
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, cast

from lineartime.choices import MAX_EXPANSION, TEXT_COLUMN
from lineartime.errors import Argument, ArgumentError, LineartimeError, MessagePart, file_error, first_line, require_packages

_SMALL = 1 << 26
"""The bytes to which any compressed file may expand, however small it is."""
COMPRESSED = (".gz", ".xz", ".lzma", ".bz2", ".zst", ".zstd", ".zip")
CSV = (".csv", ".tsv")
RECORDS = (".jsonl", ".ndjson", ".json", ".parquet", *CSV)
_TAR = (".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tzst")
_BUFFER = 1 << 18

LEAVE_OUT: tuple[MessagePart, ...] = ("in a folder leave the file out by ", Argument("exclude"), ".")
"""The end of a message about a file that cannot be read, which may be given by itself."""


def file_version(path: Path) -> tuple[int, int]:
    """The size and modification time of a file, which change when the file does."""
    try:
        facts = path.stat()
    except OSError as error:
        raise file_error("read", path, error) from None
    return facts.st_size, facts.st_mtime_ns


@dataclass(frozen=True)
class SourceFile:
    """A file with text, and how it is read.

    Attributes:
        path: the file; its suffix indicates the format.
        column: the column of records that holds the text.
        max_expansion: the maximum number of bytes of text per byte of the file, if it is compressed.
        as_text: whether it is read as one text, although its name is that of records.
    """

    path: Path
    column: str = TEXT_COLUMN
    max_expansion: int = MAX_EXPANSION
    as_text: bool = False

    @property
    def version(self) -> tuple[int, int]:
        """The size and modification time of the file, which change when its content does."""
        return file_version(self.path)

    @property
    def named_suffix(self) -> str:
        """The suffix of the format by the file's own name, without that of its compression."""
        name = Path(self.path.stem) if self.path.suffix.lower() in COMPRESSED else self.path
        return name.suffix.lower()

    @property
    def format_suffix(self) -> str:
        """The suffix of the format; for a .zip, that of the file in it, if it is one of records.

        Raises:
            LineartimeError: for a tar archive, and for a .zip that cannot be read.
        """
        named = self.named_suffix
        if is_tar(self.path):
            raise LineartimeError(f"{self.path} is a tar archive, which is not read: unpack it and give the folder.")
        member = _member_suffix(self.path, self.version) if self.path.suffix.lower() == ".zip" else ""
        return member if member in RECORDS else named

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open the file for reading its decompressed bytes.

        Raises:
            LineartimeError: naming the file, if it cannot be read.
            ArgumentError: naming `max_expansion`, while reading, if a compressed file holds more than `max_expansion` times
                its size. Up to 64 MiB are always allowed.
        """
        with _open_bytes(self.path) as stream:
            if self.path.suffix.lower() in COMPRESSED:
                stream = cast("IO[bytes]", io.BufferedReader(_Bounded(stream, Expansion(self)), _BUFFER))
            yield stream


def missing_column(column: str, where: str, columns: Iterable[str], *otherwise: MessagePart) -> ArgumentError:
    """The error for records of which the first lacks the column of the text, so that none is expected to have it."""
    names = ", ".join(columns)
    found = f"is {column}, but {where} has the columns {names}"
    return ArgumentError("text_column", f"{found}: name the one that holds the text", *(otherwise or (", or ", *LEAVE_OUT)))


def is_tar(path: Path) -> bool:
    """Whether a file is a tar archive by its name."""
    return SourceFile(path).named_suffix in _TAR or path.with_suffix("").suffix.lower() == ".tar"


class Expansion:
    """Counts the decompressed bytes of a file, so that a tiny compressed file cannot fill a disk."""

    def __init__(self, file: SourceFile) -> None:
        self._path = file.path
        self._most = file.max_expansion
        self._left = max(_SMALL, file.max_expansion * file.version[0])

    def count(self, n_bytes: int) -> None:
        """Count `n_bytes` more bytes. Raises ArgumentError if there are too many in total."""
        self._left -= n_bytes
        if self._left < 0:
            raise ArgumentError(
                "max_expansion",
                f"is {self._most:,}, but {self._path} expands to more than that many times its size: give a larger number if "
                "the file is correct, or leave it out.",
            )


@contextmanager
def _reporting(path: Path) -> Iterator[None]:
    """Raise LineartimeError, naming the file, where it cannot be read or decompressed."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, zipfile.BadZipFile) as error:
        raise damaged(path, error) from None
    except OSError as error:
        raise file_error("read", path, error) from None


@contextmanager
def _open_bytes(path: Path) -> Iterator[IO[bytes]]:
    with _reporting(path), path.open("rb") as raw:
        match path.suffix.lower():
            case ".gz":
                yield cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
            case ".xz" | ".lzma":
                yield io.BufferedReader(_Reader(_streams(raw, lzma.LZMADecompressor)), _BUFFER)
            case ".bz2":
                yield io.BufferedReader(_Reader(_streams(raw, bz2.BZ2Decompressor)), _BUFFER)
            case ".zst" | ".zstd":
                yield io.BufferedReader(_Reader(_zstandard(raw, path)), _BUFFER)
            case ".zip":
                with zipfile.ZipFile(raw) as archive, _open_member(archive, _member(archive, path), path) as member:
                    yield member
            case _:
                yield raw


@lru_cache(maxsize=4096)
def _member_suffix(path: Path, version: tuple[int, int]) -> str:
    """The suffix of the file in a .zip of this version."""
    with _reporting(path), zipfile.ZipFile(path) as archive:
        return Path(_member(archive, path)).suffix.lower()


def _member(archive: zipfile.ZipFile, path: Path) -> str:
    """The name of the only file in an archive."""
    names = [name for name in archive.namelist() if not name.endswith("/")]  # the others are folders
    if len(names) != 1:
        raise LineartimeError(f"{path} holds {len(names)} files: unpack it and give the folder, or ", *LEAVE_OUT)
    return names[0]


def _open_member(archive: zipfile.ZipFile, name: str, path: Path) -> IO[bytes]:
    try:
        return archive.open(name)
    except (RuntimeError, NotImplementedError) as error:  # a password, or a compression that zipfile cannot read
        raise LineartimeError(f"{path} cannot be read ({first_line(error)}): unpack it and give the folder.") from None


def skip(stream: IO[bytes], count: int) -> None:
    """Skip the first `count` bytes of a stream."""
    if stream.seekable():
        stream.seek(count)
        return
    while count > 0 and (block := stream.read(min(_BUFFER, count))):
        count -= len(block)


def damaged(path: Path, error: Exception) -> LineartimeError:
    """The error for a file that a library cannot decode."""
    return LineartimeError(f"{path} is damaged or cut off ({first_line(error)}): fetch it again, or ", *LEAVE_OUT)


def not_utf8(where: str, content: bytes, place: int, offset: int) -> LineartimeError:
    """The error for a byte that is not UTF-8, `place` in some content of a file and `offset` in the file.

    A file that starts like the mark of UTF-16 is taken for UTF-16, and other content with zeros for that of a binary file.
    """
    byte = content[place]
    found = f"{where} is not UTF-8 text (byte 0x{byte:02x} at offset {offset})"
    encoding = "utf-16" if offset == 0 and byte in (0xFE, 0xFF) else "latin1"
    if encoding == "latin1" and b"\0" in content:
        return LineartimeError(f"{found}, but looks like a binary file: give its text, or ", *LEAVE_OUT)
    convert = f"convert the file, for example by `iconv -f {encoding} -t utf-8`, or "
    return LineartimeError(f"{found}: {convert}", *LEAVE_OUT)


def _streams(raw: IO[bytes], new: Callable[[], Any]) -> Iterator[bytes]:
    """Decompress stream by stream, also after padding with zeros, at which the readers of lzma and bz2 stop."""
    decoder: Any = new()
    if (compressed := raw.read(1 << 14)).startswith(bytes(5)):  # which lzma takes for an empty file
        raise EOFError("it starts with zeros")
    while compressed := compressed or raw.read(1 << 14):
        if decoder is None:
            compressed = compressed.lstrip(b"\0")
            decoder = new() if compressed else None
            continue
        try:
            yield decoder.decompress(compressed, _BUFFER)
            while not (decoder.eof or decoder.needs_input):
                yield decoder.decompress(b"", _BUFFER)
        except (lzma.LZMAError, OSError) as error:  # bz2 has no error of its own
            raise EOFError(str(error)) from None
        compressed = decoder.unused_data if decoder.eof else b""
        decoder = None if decoder.eof else decoder
    if decoder is not None:
        raise EOFError("it ends within a stream")


def _zstandard(raw: IO[bytes], path: Path) -> Iterator[bytes]:
    """Decompress frame by frame. Unlike the zstandard package's own reader, this detects a file that is cut off."""
    require_packages("zstandard", extra="data", purpose=f"Reading {path}")
    import zstandard

    frame: Any = None
    compressed = b""
    while compressed := compressed or raw.read(1 << 14):  # few bytes, because they may expand by a factor of thousands
        frame = frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        try:
            yield frame.decompress(compressed)
        except zstandard.ZstdError as error:
            raise EOFError(str(error)) from None
        compressed = frame.unused_data if frame.eof else b""
        frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it ends within a frame")


class _Bounded(io.RawIOBase):
    """A stream whose bytes are counted as they are read."""

    def __init__(self, stream: IO[bytes], expansion: Expansion) -> None:
        self._stream: Any = stream
        self._expansion = expansion

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._stream.readinto(buffer)
        self._expansion.count(count)
        return count


class _Reader(io.RawIOBase):
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
