"""The data sets of the Hugging Face hub that have a name here, as documents in the sense of the papers that use them."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from lineartime.choices import Split
from lineartime.data.hub import PREFIX, Example, HubDataset, Repository, files_identity
from lineartime.data.readers import SPLITS, pieces
from lineartime.errors import ArgumentError, LineartimeError

_TITLE = re.compile(r" = (?!= ).+ = \n?")


@dataclass(frozen=True)
class HubCorpus(Repository):
    """A data set that has a name in this library, and published splits.

    Attributes:
        files: a pattern for the files of each split.
        columns: the columns to read; None for formats without columns.
        texts_of: a function that returns the documents in an example.
        lines: whether an example is a line of a document, rather than one or more documents.
        halves: whether validation and test share files: validation takes the documents with even numbers, test the others.
    """

    files: dict[Split, str]
    columns: tuple[str, ...] | None = ("text",)
    texts_of: Callable[[Example], list[str]] = lambda example: [example["text"]]
    lines: bool = False
    halves: bool = False
    _small_file = "README.md"

    def describe(self, split: Split) -> str:
        """The files of a split."""
        half = "half the documents of " if self.halves and split != "train" else ""
        return f"{half}{self.files[split]} of {self.repository}"

    def identity(self, split: Split) -> str:
        """The repository and its revision; for a mirror, the paths, sizes and modification times of the files."""
        if split == "all":
            return "\n".join(map(self.identity, SPLITS))
        folder, pattern = self.folder, self.files[split]
        if folder is None:
            return f"{self.repository}:{split}:{pattern}:{self.revision}"
        files = sorted(folder.glob(pattern))
        if not files:
            raise LineartimeError(f"There is no file {pattern} in {folder}: complete the mirror, or unset LINEARTIME_MIRROR.")
        return files_identity(files, split)

    def documents(self, split: Split) -> Iterator[Iterator[str]]:
        """The documents of a split in the order of the files."""
        for each in SPLITS if split == "all" else (split,):
            examples = self.examples(each)
            if self.lines:
                lines = self.read(examples, lambda example: [example["text"] or " \n"])  # the hub has "" for an empty line
                yield from _articles(lines)
            else:
                yield from map(pieces, self.read(examples, self.texts_of))

    def examples(self, split: Split) -> Any:
        """The rows of a split as an IterableDataset."""
        self.identity(split)  # raises a clear error for missing files
        options: dict[str, Any] = {} if self.columns is None else {"columns": list(self.columns)}
        dataset = self.load(self.folder, data_files={split: self.files[split]}, split=split, **options)
        if self.halves and split != "train":
            parity = int(split == "test")
            dataset = dataset.filter(lambda _, index: index % 2 == parity, with_indices=True)
        return dataset

    def texts(self, example: Example) -> list[str]:
        """The documents in an example."""
        if self.lines:
            raise LineartimeError(f"{self.name} cannot be streamed: encode it beforehand.")
        return self.texts_of(example)


def _articles(lines: Iterator[str]) -> Iterator[Iterator[str]]:
    """Group the lines of WikiText into articles, which begin with a title such as ` = Title = `."""
    titles = 0

    def number(line: str) -> int:
        nonlocal titles
        titles += _TITLE.fullmatch(line) is not None
        return titles

    return (article for _, article in groupby(lines, number))


def _wiki40b(example: Example) -> list[str]:
    """Remove an article's markers: each title, heading and paragraph gets its own line, a heading an empty line before it."""
    text = example["text"]
    for marker, instead in (("_START_ARTICLE_\n", ""), ("_START_SECTION_\n", "\n"), ("_START_PARAGRAPH_\n", "")):
        text = text.replace(marker, instead)
    return [text.replace("_NEWLINE_", "\n").lstrip("\n") + "\n"]


def _evidence(example: Example) -> list[str]:
    """The pages for a question: first from Wikipedia, then from the web."""
    return [*example["entity_pages"]["wiki_context"], *example["search_results"]["search_context"]]


def _files(pattern: str, **others: str) -> dict[Split, str]:
    """A file pattern for each split, from a common pattern with a placeholder for the split."""
    return {split: others.get(split, pattern.format(split)) for split in SPLITS}


_C4 = "en/c4-{}.*.json.gz"
_EVIDENCE = ("entity_pages", "search_results")
HUB: dict[str, HubCorpus] = {
    corpus.name: corpus
    for corpus in (
        HubCorpus("wiki40b", "google/wiki40b", _files("en/{}-*.parquet"), texts_of=_wiki40b),
        # One book per row. deepmind/pg19 is a loading script, which datasets no longer runs.
        HubCorpus("pg19", "emozilla/pg19", _files("data/{}-*.parquet")),
        HubCorpus("c4", "allenai/c4", _files(_C4, test=_C4.format("validation")), columns=None, halves=True),
        HubCorpus("trivia_qa", "mandarjoshi/trivia_qa", _files("rc/{}-*.parquet"), columns=_EVIDENCE, texts_of=_evidence),
        HubCorpus("wikitext", "Salesforce/wikitext", _files("wikitext-103-raw-v1/{}-*.parquet"), lines=True),
    )
}


def hub_dataset(name: str, column: str) -> HubDataset | HubCorpus:
    """The data set of a name: hub:ORG/NAME, hub:ORG/NAME/CONFIG, or hub:NAME for one without an organisation.

    The rows of WikiText, in any configuration, are lines. They are joined into articles, as in the corpus wikitext.
    """
    parts = name.removeprefix(PREFIX).split("/")
    if not all(parts) or len(parts) > 3:
        raise ArgumentError("data", f"is {name}, but must be hub:ORG/NAME or hub:ORG/NAME/CONFIG.")
    repository, config = "/".join(parts[:2]), parts[2] if len(parts) == 3 else None
    wikitext = HUB["wikitext"]
    if repository == wikitext.repository and config is not None:
        return replace(wikitext, name=name, files=_files(f"{config}/{{}}-*.parquet"))
    return HubDataset(name, repository, config, column)
