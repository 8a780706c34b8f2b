"""Local files, plain or compressed, read as bytes; and the errors of reading."""

import bz2
import io
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any

from lineartime.choices import TEXT_COLUMN
from lineartime.errors import ArgumentError, LineartimeError, file_error, first_line, require_packages

COMPRESSED = (".gz", ".xz", ".lzma", ".bz2", ".zst", ".zstd", ".zip")
CSV = (".csv", ".tsv")
RECORDS = (".jsonl", ".ndjson", ".json", ".parquet", *CSV)
BLOCK = 1 << 18  # bytes, or characters, of text in memory at a time
_COMPRESSED_BLOCK = 1 << 12  # few bytes, because they may expand by a factor of thousands
_Inflater = type(zlib.decompressobj())

LEAVE_OUT: tuple[str, ...] = ("in a folder leave the file out by ", "`exclude`", ".")
"""The end of a message about a file that cannot be read, which may be given by itself."""


@dataclass(frozen=True)
class SourceFile:
    """A file with text, and how it is read.

    Attributes:
        path: the file; its suffix indicates the format.
        column: the column of records that holds the text.
        as_text: whether it is read as one text, although its name is that of records.
    """

    path: Path
    column: str = TEXT_COLUMN
    as_text: bool = False

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
    def named_suffix(self) -> str:
        """The suffix of the format by the file's own name, without that of its compression."""
        name = Path(self.path.stem) if self.is_compressed else self.path
        return name.suffix.lower()

    @property
    def format_suffix(self) -> str:
        """The suffix of the format; for a .zip, that of the file in it, if it is one of records."""
        member = _member_suffix(self.path, self.version) if self.path.suffix.lower() == ".zip" else ""
        return member if member in RECORDS else self.named_suffix

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
        raise LineartimeError(f"{path} holds {len(names)} files: unpack it and give the folder, or ", *LEAVE_OUT)
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
    return LineartimeError(f"{path} is damaged or cut off ({first_line(error)}): fetch it again, or ", *LEAVE_OUT)


def missing_column(column: str, where: str, columns: Iterable[str], *otherwise: str) -> ArgumentError:
    """The error for records of which the first lacks the column of the text, so that none is expected to have it."""
    found = f"is {column}, but {where} has the columns {', '.join(columns)}"
    return ArgumentError("text_column", f"{found}: name the one that holds the text", *(otherwise or (", or ", *LEAVE_OUT)))


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
