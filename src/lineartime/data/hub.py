"""Data sets of the Hugging Face hub, read by the datasets library over the network or from a local mirror.

A mirror is a folder with copies of repositories, for instance google/wiki40b/en/train-00000-of-00001.parquet.
The environment variable LINEARTIME_MIRROR holds its path.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from lineartime.choices import TEXT_COLUMN, Split
from lineartime.data.folders import named_split
from lineartime.data.readers import SPLITS, missing_column, pieces, split_of
from lineartime.errors import ArgumentError, LineartimeError, require_packages, typed_first_line

Example = dict[str, Any]
PREFIX = "hub:"


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


@dataclass(frozen=True)
class HubCorpus:
    """A data set of the hub or of the mirror: any that the datasets library can read, or one that has a name in this library.

    Of any data set, published splits are recognised by their names (`named_split`). If there is only one split, with any other
    name, it is used for training. A missing split takes 5% of the training documents, chosen by a hash of their text.
    """

    name: str  # in messages
    repository: str  # its name on the hub
    config: str | None = None  # the name of one of its configurations; None for the only or the default one
    column: str = TEXT_COLUMN  # with the text
    files: dict[Split, str] | None = None  # of one with a name in this library, a pattern for the files of each split
    texts_of: Callable[[Example], list[str]] | None = None  # the documents in a row; None for the text in `column`
    lines: bool = False  # whether a row is a line of a document, rather than one or more documents
    halves: bool = False  # whether validation and test share files: documents with even numbers are for validation

    @property
    def has_columns(self) -> bool:
        """Whether the column of the text can be chosen."""
        return self.files is None

    @property
    def folder(self) -> Path | None:
        """The folder of the repository in the mirror, if it exists."""
        root = mirror()
        return root / self.repository if root and (root / self.repository).is_dir() else None

    @cached_property
    def revision(self) -> str:
        """The newest commit of the repository; without a network, the last known one."""
        datasets_library(f"Reading {self.repository}")
        import huggingface_hub

        small = ".gitattributes" if self.files is None else "README.md"  # every repository has the first
        try:
            file = huggingface_hub.hf_hub_download(self.repository, small, repo_type="dataset")
        except Exception as error:  # any network error
            raise LineartimeError(
                f"Cannot reach {self.repository} on the Hugging Face hub ({typed_first_line(error)}): check the name and the "
                "network, or set LINEARTIME_MIRROR to a folder with a copy of that repository."
            ) from None
        return Path(file).parent.name  # the cache keeps files in snapshots/COMMIT

    def describe(self, split: Split) -> str | None:
        """The files or published splits from which a split is read; without a network, the name of the data set."""
        if self.files is not None:
            half = "half the documents of " if self.halves and split != "train" else ""
            return f"{half}{self.files[split]} of {self.repository}"
        try:
            published, missing = self._published, self._missing
        except ArgumentError:
            raise
        except LineartimeError:
            return self.name
        if split in missing:
            return f"5% of split {' and '.join(published['train'])} of {self.name}"
        share = f"{1 - 0.05 * len(missing):.0%} of " if split == "train" and missing else ""
        return f"{share}split {' and '.join(published[split])} of {self.name}" if split in published else None

    def identity(self, split: Split) -> str:
        """The repository and its revision; for a mirror, the paths, sizes and modification times of the files."""
        if self.files is not None and split == "all":
            return "\n".join(map(self.identity, SPLITS))
        pattern = "**/*" if self.files is None else self.files[split]
        if self.folder is None:
            version = self.revision
        else:
            found = [(file, file.stat()) for file in sorted(self.folder.glob(pattern)) if file.is_file()]
            version = "\n".join(f"{file.resolve()}:{split}:{facts.st_size}:{facts.st_mtime_ns}" for file, facts in found)
        if not version:
            found_none = f"There is no file {pattern} in {self.folder}"
            raise LineartimeError(f"{found_none}: complete the mirror, or unset LINEARTIME_MIRROR.")
        if self.files is None:
            return f"{self.name}:{self.column}:{split}:{version}"
        return version if self.folder else f"{self.repository}:{split}:{pattern}:{version}"

    def documents(self, split: Split) -> Iterator[Iterator[str]]:
        """The documents of a split in the order of the data set."""
        if split == "all" and self.files is None:
            parts = map(self._published_rows, self._published.values())
        else:
            parts = map(self.examples, SPLITS if split == "all" else (split,))
        for rows in parts:
            texts = self._read(rows)
            yield from _articles(texts) if self.lines else map(pieces, texts)

    def examples(self, split: Split) -> Any:
        """The rows of a split as an IterableDataset."""
        if self.files is not None:
            self.identity(split)  # raises a clear error for missing files
            rows = self._load(self.folder, {"data_files": {split: self.files[split]}, "split": split})
            if self.halves and split != "train":
                parity = int(split == "test")
                rows = rows.filter(lambda _, index: index % 2 == parity, with_indices=True)
            return rows
        missing = self._missing
        if split in self._published and (split != "train" or not missing):
            return self._published_rows(self._published[split])

        def belongs(example: Example) -> bool:
            drawn = split_of("".join(self.texts(example)))
            return drawn not in missing if split == "train" else drawn == split

        return self._published_rows(self._published["train"]).filter(belongs)

    def texts(self, example: Example) -> list[str]:
        """The documents in a row, of which one without a value has none; or the line that it is."""
        if self.lines:
            return [example["text"] or " \n"]  # the hub has "" for " \n"
        if self.texts_of is not None:
            return self.texts_of(example)
        if self.column not in example:
            raise missing_column(self.column, self.name, example, ".")
        text = example[self.column]
        if text is not None and not isinstance(text, str):
            raise LineartimeError(f'{self.name} has {text!r:.40} in "{self.column}" instead of a text: choose another column.')
        return [] if text is None else [text]

    def _read(self, rows: Iterable[Example]) -> Iterator[str]:
        """The texts of rows; every error of reading is a LineartimeError, also where another iterator consumes them."""
        with reporting_read_errors(self.name):
            for row in rows:
                yield from self.texts(row)

    def _load(self, path: Path | None, *splits: dict[str, Any]) -> Any:
        """Splits, one after another, as an IterableDataset, from a folder or from the hub. Raises LineartimeError."""
        datasets = datasets_library(f"Reading {self.name}")
        common = {"streaming": True} if path else {"streaming": True, "revision": self.revision}
        with reporting_read_errors(self.name):
            loaded = [datasets.load_dataset(str(path or self.repository), **split, **common) for split in splits]
            return loaded[0] if len(loaded) == 1 else datasets.concatenate_datasets(loaded)

    def _published_rows(self, names: list[str]) -> Any:
        """The rows of published splits, one after another."""
        path, config = self._place
        return self._load(path, *({"name": config, "split": name} for name in names))

    @property
    def _place(self) -> tuple[Path | None, str | None]:
        """The folder in the mirror, where a configuration may also be a folder, and the configuration within."""
        if self.folder and self.config and (self.folder / self.config).is_dir():
            return self.folder / self.config, None
        return self.folder, self.config

    @cached_property
    def _published(self) -> dict[Split, list[str]]:
        """The names of the published splits that make up each split."""
        datasets = datasets_library(f"Reading {self.name}")
        folder, config = self._place
        path, revision = str(folder or self.repository), None if folder else self.revision
        with reporting_read_errors(self.name):
            try:
                names: list[str] = datasets.get_dataset_split_names(path, config, revision=revision)
            except ValueError:
                configs = datasets.get_dataset_config_names(path, revision=revision)
                if (self.config or len(configs) > 1) and self.config not in configs:
                    first = f"{PREFIX}{self.repository}/{configs[0]}"
                    wrong = f"is {self.name}, but must name one of the configurations {', '.join(configs)}"
                    raise ArgumentError("data", f"{wrong}: {first}.") from None
                raise
        found = {split: own for split in SPLITS if (own := [name for name in names if named_split(name) == split])}
        if not found and len(names) > 1:
            raise LineartimeError(f"{self.name} has the splits {', '.join(names)}, none of which is for training or testing.")
        return found or {"train": names}

    @property
    def _missing(self) -> list[Split]:
        """The splits that are taken from the training documents."""
        return [split for split in SPLITS if split not in self._published] if "train" in self._published else []


def _articles(lines: Iterator[str]) -> Iterator[Iterator[str]]:
    """Group the lines of WikiText into articles, which begin with a title such as ` = Title = `."""
    titles = 0

    def number(line: str) -> int:
        nonlocal titles
        titles += re.fullmatch(r" = (?!= ).+ = \n?", line) is not None
        return titles

    return (article for _, article in groupby(lines, number))


def _wiki40b(example: Example) -> list[str]:
    """Remove an article's markers: each title, heading and paragraph gets its own line, a heading an empty line before it."""
    text = example["text"]
    for marker, instead in (("_START_ARTICLE_\n", ""), ("_START_SECTION_\n", "\n"), ("_START_PARAGRAPH_\n", "")):
        text = text.replace(marker, instead)
    return [text.replace("_NEWLINE_", "\n").lstrip("\n") + "\n"]


def _files(pattern: str) -> dict[Split, str]:
    """A file pattern for each split, from a common pattern with a placeholder for the split."""
    return {split: pattern.format(split) for split in SPLITS}


_C4: dict[Split, str] = {**_files("en/c4-{}.*.json.gz"), "test": "en/c4-validation.*.json.gz"}
HUB: dict[str, HubCorpus] = {
    corpus.name: corpus
    for corpus in (
        HubCorpus("wiki40b", "google/wiki40b", files=_files("en/{}-*.parquet"), texts_of=_wiki40b),
        # One book per row. deepmind/pg19 is a loading script, which datasets no longer runs.
        HubCorpus("pg19", "emozilla/pg19", files=_files("data/{}-*.parquet")),
        HubCorpus("c4", "allenai/c4", files=_C4, halves=True),
        HubCorpus("wikitext", "Salesforce/wikitext", files=_files("wikitext-103-raw-v1/{}-*.parquet"), lines=True),
    )
}


def hub_corpus(name: str, column: str) -> HubCorpus:
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
    return HubCorpus(name, repository, config, column)
