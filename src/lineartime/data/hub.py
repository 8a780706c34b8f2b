"""Corpora of the Hugging Face hub, read by the datasets library over the network or from a local mirror.

A mirror is a folder with copies of repositories, for instance google/wiki40b/en/train-00000-of-00001.parquet.
The environment variable LINEARTIME_MIRROR holds its path.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from lineartime.choices import Split
from lineartime.data.hub_files import newest_file
from lineartime.data.readers import SPLITS, pieces
from lineartime.errors import LineartimeError, require_packages, typed_first_line

Example = dict[str, Any]


def mirror() -> Path | None:
    """The folder with copies of repositories, if LINEARTIME_MIRROR is set."""
    folder = os.environ.get("LINEARTIME_MIRROR")
    return Path(folder) if folder else None


def datasets_library(purpose: str) -> Any:
    """Import the datasets library, configured to retry for half a minute if the network is unreliable."""
    require_packages("datasets", extra="data", purpose=purpose)
    import datasets

    datasets.config.STREAMING_READ_MAX_RETRIES = 6
    datasets.config.STREAMING_READ_RETRY_INTERVAL = 5
    datasets.disable_progress_bars()
    return datasets


def _wiki40b(example: Example) -> list[str]:
    """Remove an article's markers: each title, heading and paragraph gets its own line, a heading an empty line before it."""
    text = example["text"]
    for marker, instead in (("_START_ARTICLE_\n", ""), ("_START_SECTION_\n", "\n"), ("_START_PARAGRAPH_\n", "")):
        text = text.replace(marker, instead)
    return [text.replace("_NEWLINE_", "\n").lstrip("\n") + "\n"]


def _evidence(example: Example) -> list[str]:
    """The pages for a question: first from Wikipedia, then from the web."""
    return [*example["entity_pages"]["wiki_context"], *example["search_results"]["search_context"]]


@dataclass(frozen=True)
class HubCorpus:
    """A dataset repository on the hub.

    Attributes:
        name: its name in this library.
        repository: its name on the hub.
        files: a pattern for the files of each split.
        columns: the columns to read; None for formats without columns.
        texts_of: a function that returns the documents in an example.
        lines: whether an example is a line of a document, rather than one or more documents.
        halves: whether validation and test share files: validation takes the documents with even numbers, test the others.
    """

    name: str
    repository: str
    files: dict[Split, str]
    columns: tuple[str, ...] | None = ("text",)
    texts_of: Callable[[Example], list[str]] = lambda example: [example["text"]]
    lines: bool = False
    halves: bool = False

    @property
    def sources(self) -> "Sequence[HubCorpus]":
        """The corpus itself."""
        return (self,)

    def describe(self, split: Split) -> str:
        """The files of a split."""
        half = "half the documents of " if self.halves and split != "train" else ""
        return f"{half}{self.files[split]} of {self.repository}"

    def identity(self, split: Split) -> str:
        """The repository and its revision; for a mirror, the paths, sizes and modification times of the files."""
        if split == "all":
            return "\n".join(map(self.identity, SPLITS))
        folder, pattern = self._folder, self.files[split]
        if folder is None:
            return f"{self.repository}:{split}:{pattern}:{self._revision}"
        files = sorted(folder.glob(pattern))
        if not files:
            raise LineartimeError(f"There is no file {pattern} in {folder}: complete the mirror, or unset LINEARTIME_MIRROR.")
        return files_identity(files, split)

    def documents(self, split: Split) -> Iterator[Iterator[str]]:
        """The documents of a split in the order of the files."""
        if split == "all":
            for each in SPLITS:
                yield from self.documents(each)
            return
        if self.lines:
            yield from (article for _, article in groupby(self._lines(split), _ArticleNumber()))
            return
        with reporting_read_errors(self.name):
            for example in self.examples(split):
                yield from map(pieces, self.texts(example))

    def _lines(self, split: Split) -> Iterator[str]:
        """The lines of a split; every error of reading is a LineartimeError, also where an article consumes them."""
        with reporting_read_errors(self.name):
            for example in self.examples(split):
                yield example["text"] or " \n"  # the hub has "" for an empty line

    def examples(self, split: Split) -> Any:
        """The rows of a split as an IterableDataset."""
        self.identity(split)  # raises a clear error for missing files
        datasets = datasets_library(f"Reading {self.name}")
        folder = self._folder
        options: dict[str, Any] = {"revision": self._revision} if folder is None else {}
        if self.columns is not None:
            options["columns"] = list(self.columns)
        with reporting_read_errors(self.name):
            dataset = datasets.load_dataset(
                str(folder or self.repository), data_files={split: self.files[split]}, split=split, streaming=True, **options
            )
        if self.halves and split != "train":
            parity = int(split == "test")
            dataset = dataset.filter(lambda _, index: index % 2 == parity, with_indices=True)
        return dataset

    def texts(self, example: Example) -> list[str]:
        """The documents in an example."""
        if self.lines:
            raise LineartimeError(f"{self.name} cannot be streamed: encode it beforehand.")
        return self.texts_of(example)

    @property
    def _folder(self) -> Path | None:
        return in_mirror(self.repository)

    @cached_property
    def _revision(self) -> str:
        return newest_revision(self.repository, "README.md")


def in_mirror(repository: str) -> Path | None:
    """The folder of a repository in the mirror, if it exists."""
    root = mirror()
    return root / repository if root and (root / repository).is_dir() else None


def files_identity(files: list[Path], split: Split) -> str:
    """A string that changes when the files of a mirror do."""
    facts = [(file, file.stat()) for file in files]
    return "\n".join(f"{file.resolve()}:{split}:{fact.st_size}:{fact.st_mtime_ns}" for file, fact in facts)


def newest_revision(repository: str, name: str) -> str:
    """The newest commit of a repository; without a network, the last known one. `name` is a small file in it."""
    datasets_library(f"Reading {repository}")
    try:
        return newest_file(repository, name, "dataset").parent.name  # the cache keeps files in snapshots/COMMIT
    except Exception as error:  # any network error
        raise LineartimeError(
            f"Cannot reach {repository} on the Hugging Face hub ({typed_first_line(error)}): check the name and the network, "
            "or set LINEARTIME_MIRROR to a folder with a copy of that repository."
        ) from None


@contextmanager
def reporting_read_errors(name: str) -> Iterator[None]:
    """Turn any error while reading a corpus of this name into a LineartimeError."""
    try:
        yield
    except LineartimeError:
        raise
    except Exception as error:  # network, compression, Parquet and JSON errors of several libraries
        raise LineartimeError(
            f"Cannot read {name} ({typed_first_line(error)}): check its files or the network, then try again."
        ) from None


class _ArticleNumber:
    """Counts the titles of WikiText, which look like ` = Title = `, so that lines can be grouped into articles."""

    _TITLE = re.compile(r" = (?!= ).+ = \n?")

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, line: str) -> int:
        self._count += self._TITLE.fullmatch(line) is not None
        return self._count


def _files(pattern: str) -> dict[Split, str]:
    """A file pattern for each split, from a common pattern with a placeholder for the split."""
    return {split: pattern.format(split) for split in SPLITS}


HUB: dict[str, HubCorpus] = {
    corpus.name: corpus
    for corpus in (
        HubCorpus("wiki40b", "google/wiki40b", _files("en/{}-*.parquet"), texts_of=_wiki40b),
        # One book per row. deepmind/pg19 is a loading script, which datasets no longer runs.
        HubCorpus("pg19", "emozilla/pg19", _files("data/{}-*.parquet")),
        HubCorpus(
            "c4",
            "allenai/c4",
            {**_files("en/c4-validation.*.json.gz"), "train": "en/c4-train.*.json.gz"},
            columns=None,
            halves=True,
        ),
        HubCorpus(
            "trivia_qa",
            "mandarjoshi/trivia_qa",
            _files("rc/{}-*.parquet"),
            columns=("entity_pages", "search_results"),
            texts_of=_evidence,
        ),
        HubCorpus("wikitext", "Salesforce/wikitext", _files("wikitext-103-raw-v1/{}-*.parquet"), lines=True),
    )
}
