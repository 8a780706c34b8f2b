"""Local files as documents: text and records, plain or compressed, whole or one split of them."""

from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import IO

from lineartime.choices import TEXT_COLUMN, Split
from lineartime.data.local_files import BLOCK, SourceFile, not_utf8
from lineartime.data.records import file_format, read_records

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
"""The splits, which do not overlap."""
SHARES: dict[Split, float] = {"train": 0.9, "validation": 0.05, "test": 0.05}


@dataclass(frozen=True)
class FilePart:
    """A file, or one split of it.

    Attributes:
        file: the file.
        splits: the splits to read: ranges of a text, or sets of document numbers in records. Empty for the whole file.
        at_lines: whether a text is cut at the end of a line; otherwise between any two characters.
        first_number: the number of the first document of records. With the same for all, the first documents of many small
            files would all be in the same split.
    """

    file: SourceFile
    splits: tuple[Split, ...] = ()
    at_lines: bool = True
    first_number: int = 0

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self.file.path

    @property
    def is_text(self) -> bool:
        """Whether the file is a single document, rather than one per record. Raises as `file_format`."""
        return file_format(self.file) == "text"

    def identity(self) -> str:
        """A string that changes when the file does, or when it is read in another way."""
        kind, column = file_format(self.file), self.file.column
        # Files that earlier versions read in the same way keep their identity.
        marks = [f":{kind}"] if kind in ("json", "csv") else []
        marks += [f":{self.file.format_suffix}"] if self.file.format_suffix != self.file.named_suffix else []
        marks += [f":{column}"] if kind != "text" and column != TEXT_COLUMN else []
        marks += [f":from {self.first_number}"] if kind != "text" and self.first_number else []
        splits = "+".join(self.splits) or None
        return f"{self.path.resolve()}:{splits}:{self.at_lines}:{self.file.version}{''.join(marks)}"

    def portable_identity(self) -> str:
        """Like `identity`, but the same for a copy of the file elsewhere: by its name and size."""
        kind = ":csv" if file_format(self.file) == "csv" else ""  # which earlier versions read as text
        return f"{self.path.name}:{'+'.join(self.splits)}:{self.first_number}:{self.file.column}:{self.file.version[0]}{kind}"

    def documents(self) -> Iterator[Iterator[str]]:
        """Yield the documents, each as blocks of text. Raises LineartimeError, naming file and place, on unreadable text."""
        if self.is_text and not self.splits:
            yield _decoded(self.file, 0, None)
        elif self.is_text:
            cuts = _cuts(self.file, self.at_lines, self.file.version)
            yield from (_decoded(self.file, *cuts[split]) for split in self.splits)
        else:
            for number, text in enumerate(read_records(self.file), self.first_number):
                if not self.splits or split_of(number) in self.splits:
                    yield pieces(text)


def split_of(number: int) -> Split:
    """The split of a document by its number in a file: of every 20 documents, one is for validation and one for test."""
    held_out: dict[int, Split] = {1: "validation", 2: "test"}
    return held_out.get(number % 20, "train")


def pieces(text: str) -> Iterator[str]:
    """Divide a text into blocks."""
    return (text[start : start + BLOCK] for start in range(0, len(text), BLOCK))


def _decoded(file: SourceFile, start: int, stop: int | None) -> Iterator[str]:
    """Decode the text between two byte offsets of a file, in blocks. Raises LineartimeError if it is not UTF-8."""
    decoder = getincrementaldecoder("utf-8")()
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
                if start > 0:
                    deque(_decoded(file, 0, None), maxlen=0)  # raises if the file has such a byte before `start`
                offset = position - held_back + error.start
                raise not_utf8(f"{file.path}", error.object, error.start, offset) from None
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
def _cuts(file: SourceFile, at_lines: bool, version: tuple[int, int]) -> dict[Split, tuple[int, int]]:
    """The bounds of the three splits of a text, in bytes. A compressed file, whose length is unknown, is read several times."""
    length = version[0]
    if file.is_compressed:
        with file.open() as stream:
            length = sum(map(len, iter(lambda: stream.read(BLOCK), b"")))
    shares = [SHARES["train"], SHARES["train"] + SHARES["validation"], 1]
    offsets = [round(length * share) for share in shares]
    first, second = (_cut(file, start, stop, at_lines) for start, stop in pairwise(offsets))
    return {"train": (0, first), "validation": (first, second), "test": (second, length)}


def _cut(file: SourceFile, offset: int, stop: int, at_line: bool) -> int:
    """The offset after the next line end; if no line ends soon, of the next character, or else of the one around `offset`.

    Line ends and characters are searched in the first half of the range from `offset` to `stop`, and at most 64 KiB from
    `offset`.
    """
    searched = min(1 << 16, (stop - offset) // 2)
    earliest = max(0, offset - 3)  # a character has at most 4 bytes
    with file.open() as stream:
        _skip(stream, earliest)
        before = stream.read(offset - earliest)
        following = stream.read(max(1, searched))
    newline = following.find(b"\n", 0, searched) if at_line else -1
    if newline >= 0:
        return offset + newline + 1
    starts = [place for place, byte in enumerate(before + following[:4], earliest) if byte & 0xC0 != 0x80]
    if not following or not starts:  # the end of the file, or bytes that are not UTF-8
        return offset
    return next((place for place in starts if place >= offset), starts[-1])
