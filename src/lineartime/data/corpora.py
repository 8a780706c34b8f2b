"""Corpora and their splits: corpora by name, local files, or the source of the Python standard library."""

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lineartime.data.hub import HUB, datasets_library, mirror
from lineartime.data.readers import SHARES, SPLITS, Part, Split, is_text
from lineartime.errors import ArgumentError, LineartimeError, cannot

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_SPLIT_NAMES = re.compile(r"(train)|(valid|dev)|(test)", re.IGNORECASE)
_NO_TEXT = re.compile(r"(readme|licen[sc]e|dataset_infos?\.json)", re.IGNORECASE)

_HUTTER = ("enwik8", "text8")
"""Files of 10^8 bytes. By convention, the first 90% are for training, then 5% for validation and 5% for testing."""


class Corpus(Protocol):
    """Text in documents, split for training, validation and testing."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    def identity(self, split: Split) -> str:
        """A string that changes when the text of the split does, computed without reading the text."""

    def documents(self, split: Split) -> Iterator[Iterator[str]]:
        """The documents of a split in order, each in blocks of text; an empty document has none.

        Raises:
            LineartimeError: while iterating, for text that cannot be read.
        """

    def examples(self, split: Split) -> Any:
        """The split as an `IterableDataset` of the datasets library; LineartimeError if it cannot be streamed."""

    def texts(self, example: dict[str, Any]) -> list[str]:
        """The documents in one of these examples."""


@dataclass(frozen=True)
class LocalCorpus:
    """Local files.

    Attributes:
        name: its name in messages.
        splits: the files, or parts of files, of each split.
    """

    name: str
    splits: dict[Split, list[Part]]

    def identity(self, split: Split) -> str:
        """The paths, sizes and dates of the files."""
        return "\n".join(part.identity() for part in self.splits[split])

    def documents(self, split: Split) -> Iterator[Iterator[str]]:
        """The documents of a split, file by file."""
        for part in self.splits[split]:
            yield from part.documents()

    def examples(self, split: Split) -> Any:
        """The documents of JSON lines and Parquet as an IterableDataset; each file is a shard."""
        parts = self.splits[split]
        for part in parts:
            if is_text(part.path):
                raise LineartimeError(
                    f"{part.path} is one long text and cannot be streamed, as JSON lines and Parquet can: encode it beforehand."
                )
        if not parts:
            raise LineartimeError(f"There is no {split} split in {self.name}: give more text.")
        return datasets_library(f"Streaming {self.name}").IterableDataset.from_generator(_examples, gen_kwargs={"parts": parts})

    def texts(self, example: dict[str, Any]) -> list[str]:
        """The one document of an example."""
        return [example["text"]]


def _examples(parts: list[Part]) -> Iterator[dict[str, str]]:
    for part in parts:
        for blocks in part.documents():
            yield {"text": "".join(blocks)}


def names_corpus(data: str) -> bool:
    """Whether `load_corpus` reads this as the name of a corpus, not as a path."""
    return data in HUB or data in _HUTTER


def load_corpus(data: str | Path | None) -> Corpus:
    """The corpus of a name, the text at a path, or the standard library's source for None.

    A name takes precedence: choose a file called c4 by ./c4, or by a `Path`.

    Raises:
        LineartimeError: if there is no text.
    """
    if data is None:
        return standard_library()
    if isinstance(data, str):
        if data in HUB:
            return HUB[data]
        if data in _HUTTER:
            return _hutter(data)
        if os.sep not in data and not Path(data).exists():
            names = ", ".join(sorted([*HUB, *_HUTTER]))
            raise ArgumentError("data", f"is {data}, which is neither a file or folder nor the name of a corpus: {names}.")
    return local_text(data)


def standard_library() -> LocalCorpus:
    """The source of the running Python's standard library without its tests: about 12 MB on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in root.rglob("*.py") if not _NOT_LIBRARY & set(file.relative_to(root).parts)]
    if not files:
        raise LineartimeError(f"There is no Python source in {root}, the standard library: give a text of your own.")
    return LocalCorpus("the Python standard library", _split_by_file(root, files))


def local_text(path: str | Path) -> LocalCorpus:
    """A file, or all files of a folder and its subfolders but hidden ones: text, JSON lines or Parquet.

    If every file of a folder is called train..., valid..., dev... or test..., or is in a subfolder called that, these are
    the splits. Otherwise a folder of at least three files is split by file, and a smaller one within its files.

    Raises:
        LineartimeError: if there is no text.
    """
    path = Path(path)
    try:
        files = [path]
        if path.is_dir():
            shown = (file for file in path.rglob("*") if not re.search(r"(^|/)\.", file.relative_to(path).as_posix()))
            files = [file for file in shown if file.is_file()]
        files = sorted(file for file in files if file.stat().st_size)
    except OSError as error:
        raise cannot("read", path, error) from None
    if not files:
        raise ArgumentError("data", f"is {path}, which holds no text: give a text file or a folder of text files.")
    if path.is_dir() and (named := _split_by_name(path, files)):
        return LocalCorpus(str(path), named)
    if path.is_dir() and len(files) >= len(SPLITS):
        return LocalCorpus(str(path), _split_by_file(path, files))
    return LocalCorpus(str(path), {split: [Part(file, split) for file in files] for split in SPLITS})


def _split_by_name(root: Path, files: list[Path]) -> dict[Split, list[Part]] | None:
    """The splits by the names of files or folders, or None; missing ones are taken from the training files."""
    splits: dict[Split, list[Part]] = {split: [] for split in SPLITS}
    for file in files:
        relative = file.relative_to(root)
        found = _SPLIT_NAMES.match(relative.parts[0])
        if found:
            splits[SPLITS[(found.lastindex or 1) - 1]].append(Part(file))
        elif not _NO_TEXT.match(relative.name):
            return None
    if not splits["train"]:
        return None
    missing = [split for split in SPLITS if not splits[split]]
    if missing:
        whole = [part.path for part in splits["train"]]
        splits["train"] = [Part(path, split) for path in whole for split in SPLITS if split not in missing]
        splits |= {split: [Part(path, split) for path in whole] for split in missing}
    return splits


def _split_by_file(root: Path, files: list[Path]) -> dict[Split, list[Part]]:
    """Distribute files in an order that depends only on their names, up to the shares of bytes of test and validation."""
    sizes = {file: file.stat().st_size for file in files}
    total = sum(sizes.values())

    def order(file: Path) -> tuple[bool, bytes]:
        name = os.fsencode(file.relative_to(root).as_posix())
        small = sizes[file] <= total / 2  # a file with most of the bytes comes first, for training
        return small, hashlib.sha256(name).digest()

    left = sorted(files, key=order)
    splits: dict[Split, list[Part]] = {split: [] for split in SPLITS}
    for split in ("test", "validation"):
        size = 0
        # At least one file for each split, training included.
        while not splits[split] or (size < SHARES[split] * total and len(left) > len(files) // 2 + 1):
            file = left.pop()
            splits[split].append(Part(file))
            size += sizes[file]
    splits["train"] = [Part(file) for file in left]
    return splits


def _hutter(name: str) -> LocalCorpus:
    """enwik8 or text8, from a file of that name, or NAME.zip, in the mirror folder or the working directory."""
    candidates = (folder / f"{name}{suffix}" for folder in (mirror(), Path()) if folder for suffix in ("", ".zip"))
    file = next(filter(Path.is_file, candidates), None)
    if file is None:
        raise LineartimeError(
            f"There is no file {name} or {name}.zip here: download http://mattmahoney.net/dc/{name}.zip into this folder, or "
            "into the folder that LINEARTIME_MIRROR names."
        )
    return LocalCorpus(name, {split: [Part(file, split, at_lines=False)] for split in SPLITS})
