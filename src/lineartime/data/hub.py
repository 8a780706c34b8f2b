"""Data sets of the Hugging Face hub, read by the datasets library over the network or from a local mirror.

A mirror is a folder with copies of repositories, for instance google/wiki40b/en/train-00000-of-00001.parquet.
The environment variable LINEARTIME_MIRROR holds its path.
"""

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from lineartime.choices import Split
from lineartime.data.local_files import missing_column
from lineartime.data.readers import SPLITS, pieces, split_of
from lineartime.data.splits import named_split
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
class Repository:
    """A data set on the hub or in the mirror.

    Attributes:
        name: its name in messages.
        repository: its name on the hub.
    """

    name: str
    repository: str
    _small_file: ClassVar[str]

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

        try:
            file = huggingface_hub.hf_hub_download(self.repository, self._small_file, repo_type="dataset")
            return Path(file).parent.name  # the cache keeps files in snapshots/COMMIT
        except Exception as error:  # any network error
            raise LineartimeError(
                f"Cannot reach {self.repository} on the Hugging Face hub ({typed_first_line(error)}): check the name and the "
                "network, or set LINEARTIME_MIRROR to a folder with a copy of that repository."
            ) from None

    def load(self, path: Path | None, **options: Any) -> Any:
        """The rows as an IterableDataset, from a folder or from the hub. Raises LineartimeError if they cannot be read."""
        datasets = datasets_library(f"Reading {self.name}")
        if path is None:
            options["revision"] = self.revision
        with reporting_read_errors(self.name):
            return datasets.load_dataset(str(path or self.repository), streaming=True, **options)

    def read(self, examples: Iterable[Example], texts: Callable[[Example], list[str]]) -> Iterator[str]:
        """The texts of rows; every error of reading is a LineartimeError, also where another iterator consumes them."""
        with reporting_read_errors(self.name):
            for example in examples:
                yield from texts(example)


def files_identity(files: list[Path], split: Split) -> str:
    """A string that changes when the files of a mirror do."""
    facts = [(file, file.stat()) for file in files]
    return "\n".join(f"{file.resolve()}:{split}:{fact.st_size}:{fact.st_mtime_ns}" for file, fact in facts)


@dataclass(frozen=True)
class HubDataset(Repository):
    """Any data set that the datasets library can read, with its text in one column.

    Published splits are recognised by their names (`named_split`). If there is only one split, with any other name, it is used
    for training. A missing split takes 5% of the training documents, chosen by a hash of their text.

    Attributes:
        config: the name of one of its configurations; None for the only or the default one.
        column: the column with the text.
    """

    config: str | None
    column: str
    _small_file = ".gitattributes"  # which every repository has

    def describe(self, split: Split) -> str | None:
        """The published splits from which a split is read; without a network, only the name of the data set."""
        try:
            published, missing = self._published, self._missing
        except ArgumentError:
            raise
        except LineartimeError:
            return self.name
        if split in missing:
            return f"5% of split {' and '.join(published['train'])} of {self.name}"
        if split not in published:
            return None
        share = f"{1 - 0.05 * len(missing):.0%} of " if split == "train" and missing else ""
        return f"{share}split {' and '.join(published[split])} of {self.name}"

    def identity(self, split: Split) -> str:
        """The repository, its revision and the column; for a mirror, the paths, sizes and modification times of all files."""
        folder = self.folder
        files = [] if folder is None else sorted(file for file in folder.rglob("*") if file.is_file())
        version = self.revision if folder is None else files_identity(files, split)
        return f"{self.name}:{self.column}:{split}:{version}"

    def documents(self, split: Split) -> Iterator[Iterator[str]]:
        """The documents of a split in the order of the data set."""
        parts = map(self._load, self._published.values()) if split == "all" else (self.examples(split),)
        for part in parts:
            yield from map(pieces, self.read(part, self.texts))

    def examples(self, split: Split) -> Any:
        """The rows of a split as an IterableDataset."""
        missing = self._missing
        if split in self._published and (split != "train" or not missing):
            return self._load(self._published[split])

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
        path, config = self._place
        loaded = [self.load(path, name=config, split=name) for name in names]
        if len(loaded) == 1:
            return loaded[0]
        with reporting_read_errors(self.name):
            return datasets_library(f"Reading {self.name}").concatenate_datasets(loaded)

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
        found: dict[Split, list[str]] = {}
        for name in names:
            if split := named_split(name):
                found.setdefault(split, []).append(name)
        if not found and len(names) == 1:
            return {"train": names}
        if not found:
            raise LineartimeError(f"{self.name} has the splits {', '.join(names)}, none of which is for training or testing.")
        return {split: found[split] for split in SPLITS if split in found}

    @property
    def _missing(self) -> list[Split]:
        """The splits that are taken from the training documents."""
        return [split for split in SPLITS if split not in self._published] if "train" in self._published else []
