"""Which text to learn from: local files, or the source of the running Python's standard library; and how it is split."""

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from lineartime.errors import LineartimeError, cannot

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

_SHARES = {"train": 0.9, "validation": 0.05, "test": 0.05}
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Document:
    """A file, or a part of one: the bytes from `start` to `stop`."""

    path: Path
    start: int
    stop: int


@dataclass(frozen=True)
class Corpus:
    """Text split into documents for training, validation and testing.

    Attributes:
        name: what to call it in messages.
        splits: the documents of each split.
    """

    name: str
    splits: dict[Split, list[Document]]


def standard_library() -> Corpus:
    """The source text of the running Python's standard library, tests left out: about 12 MB on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in root.rglob("*.py") if not _NOT_LIBRARY & set(file.relative_to(root).parts)]
    if not files:
        raise LineartimeError(f"There is no Python source in {root}, the standard library: give text of your own with --data.")
    return Corpus("the Python standard library", _split_by_file(root, files))


def local_text(path: Path) -> Corpus:
    """A text file, or all files of a folder and its subfolders, hidden ones left out.

    A folder of three files or more is split by file, anything smaller by position.

    Raises:
        LineartimeError: if there is nothing to read.
    """
    try:
        if path.is_dir():
            files = [
                file
                for file in path.rglob("*")
                if file.is_file() and file.stat().st_size and not any(p.startswith(".") for p in file.relative_to(path).parts)
            ]
        else:
            files = [path] if path.stat().st_size else []
    except OSError as error:
        raise cannot("read", path, error) from None
    if not files:
        raise LineartimeError(f"--data {path} holds no text: give a text file or a folder of text files.")
    if path.is_dir() and len(files) >= len(SPLITS):
        return Corpus(str(path), _split_by_file(path, files))
    splits: dict[Split, list[Document]] = {split: [] for split in SPLITS}
    for file in sorted(files):
        for split, document in _split_by_position(file).items():
            splits[split].append(document)
    return Corpus(str(path), splits)


def load_corpus(path: Path | None) -> Corpus:
    """The text at `path`, or the standard library's for None."""
    return standard_library() if path is None else local_text(path)


def _split_by_file(root: Path, files: list[Path]) -> dict[Split, list[Document]]:
    """Deal files out in an order that depends on their names alone, filling test and validation to their shares of bytes."""
    documents = [Document(file, 0, file.stat().st_size) for file in files]
    total = sum(document.stop for document in documents)

    def order(document: Document) -> tuple[bool, bytes]:
        name = os.fsencode(document.path.relative_to(root).as_posix())
        return document.stop <= total / 2, hashlib.sha256(name).digest()  # a giant stands first, for training

    documents.sort(key=order)
    splits: dict[Split, list[Document]] = {split: [] for split in SPLITS}
    for split in ("test", "validation"):
        size = 0
        # One file each at the least, and at least one is left for training.
        while not splits[split] or (size < _SHARES[split] * total and len(documents) > len(files) // 2 + 1):
            document = documents.pop()
            splits[split].append(document)
            size += document.stop
    splits["train"] = documents
    return splits


def _split_by_position(file: Path) -> dict[Split, Document]:
    """Cut a file at the ends of lines: the beginning for training, then validation, then test."""
    size = file.stat().st_size
    cuts = [int(size * share) for share in (_SHARES["train"], _SHARES["train"] + _SHARES["validation"], 1)]
    first, second = (_line_end(file, start, stop) for start, stop in pairwise(cuts))
    return {
        "train": Document(file, 0, first),
        "validation": Document(file, first, second),
        "test": Document(file, second, size),
    }


def _line_end(file: Path, offset: int, stop: int) -> int:
    """The offset just after the next line end, or, if there is none halfway to `stop`, that of the next character."""
    try:
        with file.open("rb") as stream:
            stream.seek(offset)
            following = stream.read(min(1 << 16, (stop - offset) // 2))
    except OSError as error:
        raise cannot("read", file, error) from None
    newline = following.find(b"\n")
    if newline >= 0:
        return offset + newline + 1
    within = next((i for i, byte in enumerate(following) if byte & 0xC0 != 0x80), len(following))
    return offset + within
