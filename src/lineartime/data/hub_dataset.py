"""Any data set on the Hugging Face hub that the datasets library can read, with its text in one column."""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lineartime.choices import Split
from lineartime.data.hub import (
    HUB,
    Example,
    HubCorpus,
    datasets_library,
    files_identity,
    in_mirror,
    newest_revision,
    reporting_read_errors,
)
from lineartime.data.local_files import missing_column
from lineartime.data.readers import SPLITS, pieces, split_of
from lineartime.data.splits import missing_split, named_split
from lineartime.errors import ArgumentError, LineartimeError

_PREFIX = "hub:"


def is_hub_dataset(data: str) -> bool:
    """Whether `data` names a data set on the hub."""
    return data.startswith(_PREFIX)


def hub_dataset(name: str, column: str) -> "HubDataset | HubCorpus":
    """The data set of a name: hub:ORG/NAME, hub:ORG/NAME/CONFIG, or hub:NAME for one without an organisation.

    The rows of WikiText, in any configuration, are lines. They are joined into articles, as in the corpus wikitext.
    """
    parts = name.removeprefix(_PREFIX).split("/")
    if not all(parts) or len(parts) > 3:
        raise ArgumentError("data", f"is {name}, but must be hub:ORG/NAME or hub:ORG/NAME/CONFIG.")
    repository, config = "/".join(parts[:2]), parts[2] if len(parts) == 3 else None
    wikitext = HUB["wikitext"]
    if repository == wikitext.repository and config is not None:
        return replace(wikitext, name=name, files={split: f"{config}/{split}-*.parquet" for split in SPLITS})
    return HubDataset(name, repository, config, column)


@dataclass(frozen=True)
class HubDataset:
    """A data set on the hub or in the mirror.

    Published splits are recognised by their names (`named_split`). If there is only one split, with any other name, it is used
    for training. A missing split takes 5% of the training documents, chosen by a hash of their text.

    Attributes:
        name: its name in messages.
        repository: ORG/NAME.
        config: the name of one of its configurations; None for the only or the default one.
        column: the column with the text.
    """

    name: str
    repository: str
    config: str | None
    column: str

    @property
    def sources(self) -> "Sequence[HubDataset]":
        """The data set itself."""
        return (self,)

    def describe(self, split: Split) -> str | None:
        """The published splits from which a split is read; without a network, only the name of the data set."""
        try:
            published, missing = self._published, self._missing
        except ArgumentError:
            raise
        except LineartimeError:
            return self.name
        if split in published:
            share = 1 - 0.05 * len(missing) if split == "train" else 1.0
            names = published[split]
        elif split in missing:
            share, names = 0.05, published["train"]
        else:
            return None
        return f"{'' if share == 1 else f'{share:.0%} of '}split {' and '.join(names)} of {self.name}"

    def identity(self, split: Split) -> str:
        """The repository, its revision and the column; for a mirror, the paths, sizes and modification times of all files."""
        folder = in_mirror(self.repository)
        if folder is None:
            version = newest_revision(self.repository, ".gitattributes")  # which every repository has
        else:
            version = files_identity(sorted(file for file in folder.rglob("*") if file.is_file()), split)
        return f"{self.name}:{self.column}:{split}:{version}"

    def documents(self, split: Split) -> Iterator[Iterator[str]]:
        """The documents of a split in the order of the data set."""
        if split == "all":
            for published in self._published.values():
                yield from self._read(self._load(published))
            return
        yield from self._read(self.examples(split))

    def _read(self, examples: Iterable[Example]) -> Iterator[Iterator[str]]:
        with reporting_read_errors(self.name):
            for example in examples:
                yield from map(pieces, self.texts(example))

    def examples(self, split: Split) -> Any:
        """The rows of a split as an IterableDataset."""
        if split in self._published and (split != "train" or not self._missing):
            return self._load(self._published[split])
        if split not in (*self._published, *self._missing):
            raise missing_split(self, split)
        missing = self._missing

        def belongs(example: Example) -> bool:
            drawn = split_of(zlib.crc32("".join(self.texts(example)).encode()))
            return drawn not in missing if split == "train" else drawn == split

        return self._load(self._published["train"]).filter(belongs)

    def texts(self, example: Example) -> list[str]:
        """The text of a row, as a list; empty for a row without a value."""
        if self.column not in example:
            raise missing_column(self.column, self.name, example, ".")
        text = example[self.column]
        if text is not None and not isinstance(text, str):
            raise LineartimeError(f'{self.name} has {text!r:.40} in "{self.column}" instead of a text: choose another column.')
        return [] if text is None else [text]

    def _load(self, names: list[str]) -> Any:
        datasets = datasets_library(f"Reading {self.name}")
        path, options = self._place
        with reporting_read_errors(self.name):
            loaded = [datasets.load_dataset(path, split=name, streaming=True, **options) for name in names]
            return loaded[0] if len(loaded) == 1 else datasets.concatenate_datasets(loaded)

    @cached_property
    def _place(self) -> tuple[str, dict[str, Any]]:
        """The path and the options for `load_dataset`."""
        folder = in_mirror(self.repository)
        if folder is None:
            return self.repository, {"name": self.config, "revision": newest_revision(self.repository, ".gitattributes")}
        if self.config is not None and (folder / self.config).is_dir():
            return str(folder / self.config), {}
        return str(folder), {"name": self.config}

    @cached_property
    def _published(self) -> dict[Split, list[str]]:
        """The names of the published splits that make up each split."""
        datasets = datasets_library(f"Reading {self.name}")
        path, options = self._place
        revision = options.get("revision")
        with reporting_read_errors(self.name):
            try:
                names: list[str] = datasets.get_dataset_split_names(path, options.get("name"), revision=revision)
            except ValueError:
                configs = datasets.get_dataset_config_names(path, revision=revision)
                if (self.config or len(configs) > 1) and self.config not in configs:
                    raise self._wrong_config(configs) from None
                raise
        found: dict[Split, list[str]] = {}
        for name in names:
            if split := named_split(name):
                found.setdefault(split, []).append(name)
        if not found and len(names) == 1:
            return {"train": names}
        if not found:
            raise LineartimeError(f"{self.name} has the splits {', '.join(names)}, none of which is for training or testing.")
        return {split: found[split] for split in SPLITS if split in found}

    def _wrong_config(self, configs: list[str]) -> ArgumentError:
        first = f"{_PREFIX}{self.repository}/{configs[0]}"
        return ArgumentError("data", f"is {self.name}, but must name one of the configurations {', '.join(configs)}: {first}.")

    @property
    def _missing(self) -> list[Split]:
        """The splits that are taken from the training documents."""
        return [split for split in SPLITS if split not in self._published] if "train" in self._published else []
