"""Corpora and their splits: corpora by name, data sets of the Hugging Face hub, local files, or the standard library's source.

The datasets library reads the hub over the network or from a local mirror: a folder with copies of repositories, for instance
google/wiki40b/en/train-00000-of-00001.parquet. The environment variable LINEARTIME_MIRROR holds its path.
"""

import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lineartime.choices import DEFAULT_TEXT, TEXT_COLUMN, Split
from lineartime.data.folders import (
    SPLITS,
    FilePart,
    Files,
    FilesOfText,
    by_file,
    by_name,
    completed,
    describe_parts,
    named_split,
    own_split,
    pieces,
    split_of,
    within_files,
)
from lineartime.data.readers import missing_column
from lineartime.errors import (
    ArgumentError,
    LineartimeError,
    did_you_mean,
    reporting_file_errors,
    require_packages,
    typed_first_line,
)
from lineartime.fields import check_type

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

_HUTTER = ("enwik8", "text8")
"""Files of 10^8 bytes. By convention, the first 90% are for training, then 5% for validation and 5% for testing."""

Data = str | Path | Sequence[str | Path] | None
"""Names and paths of texts; None for the source of Python's standard library."""


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
        advice = "check its files or the network, then try again"
        raise LineartimeError(f"Cannot read {name} ({typed_first_line(error)}): {advice}.") from None


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
            found = f"Cannot reach {self.repository} on the Hugging Face hub ({typed_first_line(error)})"
            advice = "check the name and the network, or set LINEARTIME_MIRROR to a folder with a copy of that repository"
            raise LineartimeError(f"{found}: {advice}.") from None
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

    portable_identity = identity

    def documents(self, split: Split) -> Iterator[Iterator[str]]:
        """The documents of a split in the order of the data set."""
        if split == "all" and self.files is None:
            parts = map(self._published_rows, self._published.values())
        else:
            parts = map(self.examples, SPLITS if split == "all" else (split,))
        for rows in parts:
            if self.lines:
                yield from _articles(self._read(rows, lambda row: [row["text"] or " \n"]))  # the hub has "" for " \n"
            else:
                yield from map(pieces, self._read(rows, self.texts))

    def examples(self, split: Split) -> Any:
        """The rows of a split as an IterableDataset."""
        if self.files is not None:
            self.identity(split)  # raises a clear error for missing files
            rows = self._load(self.folder, data_files={split: self.files[split]}, split=split)
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
        """The documents in a row, of which one without a value has none."""
        if self.lines:
            raise LineartimeError(f"{self.name} cannot be streamed: encode it beforehand.")
        if self.texts_of is not None:
            return self.texts_of(example)
        if self.column not in example:
            raise missing_column(self.column, self.name, example, ".")
        text = example[self.column]
        if text is not None and not isinstance(text, str):
            raise LineartimeError(f'{self.name} has {text!r:.40} in "{self.column}" instead of a text: choose another column.')
        return [] if text is None else [text]

    def _read(self, rows: Iterable[Example], texts: Callable[[Example], list[str]]) -> Iterator[str]:
        """The texts of rows; every error of reading is a LineartimeError, also where another iterator consumes them."""
        with reporting_read_errors(self.name):
            for row in rows:
                yield from texts(row)

    def _load(self, path: Path | None, **options: Any) -> Any:
        """Some rows as an IterableDataset, from a folder or from the hub. Raises LineartimeError if they cannot be read."""
        datasets = datasets_library(f"Reading {self.name}")
        if path is None:
            options["revision"] = self.revision
        with reporting_read_errors(self.name):
            return datasets.load_dataset(str(path or self.repository), streaming=True, **options)

    def _published_rows(self, names: list[str]) -> Any:
        """The rows of published splits, one after another."""
        path, config = self._place
        loaded = [self._load(path, name=config, split=name) for name in names]
        with reporting_read_errors(self.name):
            return loaded[0] if len(loaded) == 1 else datasets_library(f"Reading {self.name}").concatenate_datasets(loaded)

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
    article: list[str] = []
    for line in lines:
        if re.fullmatch(r" = (?!= ).+ = \n?", line) and article:
            yield iter(article)
            article = []
        article.append(line)
    yield iter(article)


def _wiki40b(example: Example) -> list[str]:
    """Remove an article's markers: each title, heading and paragraph gets its own line, a heading an empty line before it."""
    text = example["text"]
    for marker, instead in (("_START_ARTICLE_\n", ""), ("_START_SECTION_\n", "\n"), ("_START_PARAGRAPH_\n", "")):
        text = text.replace(marker, instead)
    return [text.replace("_NEWLINE_", "\n").lstrip("\n") + "\n"]


def _evidence(example: Example) -> list[str]:
    """The pages for a question: first from Wikipedia, then from the web."""
    return [*example["entity_pages"]["wiki_context"], *example["search_results"]["search_context"]]


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
        HubCorpus("trivia_qa", "mandarjoshi/trivia_qa", files=_files("rc/{}-*.parquet"), texts_of=_evidence),
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


# Corpora ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalCorpus:
    """A corpus of local files: the files, or parts of files, of each existing split. `name` is its name in messages."""

    name: str
    splits: Files

    @property
    def has_columns(self) -> bool:
        """Whether some files hold records."""
        return any(part.has_records for parts in self.splits.values() for part in parts)

    def describe(self, split: Split) -> str | None:
        """The files of a split."""
        return describe_parts(self.splits[split]) if self.splits.get(split) else None

    def identity(self, split: Split) -> str:
        """The paths, sizes and modification times of the files."""
        return "\n".join(part.identity() for part in self._parts(split))

    def portable_identity(self, split: Split) -> str:
        """Like `identity`, but the same for copies of the files elsewhere."""
        return "\n".join(part.portable_identity() for part in self._parts(split))

    def documents(self, split: Split) -> Iterator[Iterator[str]]:
        """The documents of a split, file by file."""
        for part in self._parts(split):
            yield from part.documents()

    def examples(self, split: Split) -> Any:
        """The documents as an IterableDataset with one shard per file. All files must hold records."""
        parts = self._parts(split)
        if one := next((part.path for part in parts if not part.has_records), None):
            found = f"{one} is one long text and cannot be streamed, as JSON lines and Parquet can"
            raise LineartimeError(f"{found}: encode it beforehand.")
        return datasets_library(f"Streaming {self.name}").IterableDataset.from_generator(_examples, gen_kwargs={"parts": parts})

    def texts(self, example: dict[str, Any]) -> list[str]:
        """The single document of an example."""
        return [example["text"]]

    def _parts(self, split: Split) -> list[FilePart]:
        whole = (replace(part, splits=()) for each in SPLITS for part in self.splits.get(each, []))
        return list(dict.fromkeys(whole)) if split == "all" else self.splits.get(split, [])


def _examples(parts: list[FilePart]) -> Iterator[dict[str, str]]:
    for part in parts:
        for blocks in part.documents():
            yield {"text": "".join(blocks)}


Source = LocalCorpus | HubCorpus
"""A text from a single place. Its `examples` can be streamed, and `texts` are the documents in one of them."""


@dataclass(frozen=True)
class Corpus:
    """A text, divided into documents and into splits for training, validation and testing."""

    sources: Sequence[Source]  # the texts that it consists of, joined split by split; a split may be missing in some of them
    notes: Sequence[str] = ()  # sentences for the user about how files were chosen and divided

    @property
    def name(self) -> str:
        """The name of the corpus in messages."""
        return ", ".join(source.name for source in self.sources)

    def describe(self, split: Split) -> str | None:
        """Where a split comes from, in a few words; None if the corpus does not have it."""
        return " + ".join(place for source in self.sources if (place := source.describe(split))) or None

    def having(self, split: Split) -> list[Source]:
        """The sources of a split. Raises ArgumentError if the corpus does not have it."""
        found = [source for source in self.sources if split == "all" or source.describe(split)]
        if not found:
            raise missing_split(self, split)
        return found

    def identity(self, split: Split) -> str:
        """A string that changes when the text of the split does, computed without reading the text. Raises as `having`."""
        return "\n".join(source.identity(split) for source in self.having(split))

    def documents(self, split: Split) -> Iterator[Iterator[str]]:
        """Yield the documents of a split in order, each as blocks of text; an empty document has no blocks.

        Raises LineartimeError, while iterating, for text that cannot be read, or as `having`.
        """
        for source in self.having(split):
            yield from source.documents(split)


def missing_split(corpus: Corpus, split: Split) -> ArgumentError:
    """The error for a split that a corpus does not have. It lists the splits that the corpus has."""
    there = " and a ".join(each for each in SPLITS if corpus.describe(each))
    advice = "give text to train on as well" if split == "train" else "choose an existing split, or all"
    found = f"is {corpus.name}, which, judging by its file names, has a {there} split but no {split} split"
    return ArgumentError("data", f"{found}: {advice}, or rename the files.")


def portable_identity(corpus: Corpus, split: Split) -> str:
    """Like the identity of a split, but the same for copies of local files elsewhere."""
    return "\n".join(source.portable_identity(split) for source in corpus.sources if source.describe(split))


def no_text(split: str) -> LineartimeError:
    """The error for a split without text; `split` is its full name, such as "the test split of books"."""
    return LineartimeError(f"There is no text in {split}: give more text, or files called train..., valid... and test...")


def is_corpus_name(data: str) -> bool:
    """Whether `load_corpus` reads this as the name of a corpus, not as a path."""
    return data in HUB or data in _HUTTER or data.startswith(PREFIX)


def load_corpus(data: Data, text_column: str = TEXT_COLUMN, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Corpus:
    """Load a corpus by name, the text at a path, several of these together, or the standard library's source for None.

    Names take precedence over paths: for a file called c4, give ./c4 or a `Path`. Splits are those that names of files or
    folders state (`by_name`), or else of a share of the files (`by_file`). Several texts are joined split by split. Paths whose
    names state their splits come first, as one folder.

    `text_column` is the column of records and `hub:` data sets that holds the text. `include` and `exclude` are patterns
    (`matches`) of the files in folders to read, by default all, and of the files and folders to leave out.

    Raises LineartimeError if there is no text, or most of a folder is not text.
    """
    names = (data,) if isinstance(data, (str, Path)) else tuple(data) if isinstance(data, Sequence) else data or ()
    check_type("data", names, tuple[str | Path, ...])
    paths = [Path(name) for name in names if isinstance(name, Path) or not is_corpus_name(name)]
    where = " and ".join(map(str, names)) or DEFAULT_TEXT
    for argument, patterns in (("include", include), ("exclude", exclude)):
        check_type(argument, patterns, tuple[str, ...])
        if not all(pattern.strip("/") for pattern in patterns):
            raise ArgumentError(argument, "has an empty pattern: write one such as *.md, or leave it out.")
        if patterns and not paths:
            raise ArgumentError(argument, f"is for folders, but the text is {where}: leave it out.")
    found = FilesOfText(text_column, include, exclude)
    sources: list[Source] = []
    named: dict[str, Files] = {}
    seen: set[str | Path] = set()
    held_out = any(own_split(path) in ("validation", "test") for path in paths)
    for name in names:
        if not str(name):
            raise ArgumentError("data", "is empty: give a path or the name of a corpus, or leave it out.")
        if isinstance(name, str) and is_corpus_name(name):
            texts: list[str | Path] = [name]
            sources.append(HUB.get(name) or (_hutter(name) if name in _HUTTER else hub_corpus(name, text_column)))
        else:
            path = Path(name)
            with reporting_file_errors("read", path):
                exists = path.exists()
            if not exists:
                known = sorted([*HUB, *_HUTTER])
                corpus = f"a corpus{did_you_mean(str(path), known)}: {', '.join(known)}"
                raise ArgumentError("data", f"is {path}, which is neither a file or folder nor the name of {corpus}.")
            files = found.find(path)
            splits = by_name(path, files, found.notes, beside=held_out)
            if splits is None:
                splits = by_file(path, files)
                sources.append(LocalCorpus(str(path), splits))
            else:
                named[str(path)] = splits
            texts = [path.resolve() for path in dict.fromkeys(part.path for parts in splits.values() for part in parts)]
        for text in texts:
            if text in seen:  # it could be in both training and test data
                raise ArgumentError("data", f"has {text} twice: leave one out.")
            seen.add(text)
    if named:
        together = {split: [part for each in named.values() for part in each.get(split, [])] for split in SPLITS}
        sources.insert(0, LocalCorpus(", ".join(named), completed(together)))
    if not sources:
        sources.append(standard_library())
    if text_column != TEXT_COLUMN and not any(source.has_columns for source in sources):
        raise ArgumentError("text_column", f"is {text_column}, but {where} has no columns: leave it at {TEXT_COLUMN}.")
    return Corpus(tuple(sources), (*found.notes, *found.unused()))


def load_corpus_of_run(data: Data, text_column: str, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Corpus:
    """`load_corpus` for the text that a run was trained on. LineartimeError if it is not there any more."""
    try:
        return load_corpus(data, text_column, include, exclude)
    except ArgumentError as error:
        if error.argument != "data":
            raise
        raise LineartimeError("The text of this run ", error.predicate, " Give the place where it is now: `data`.") from None


def standard_library() -> LocalCorpus:
    """The source of the running Python's standard library, without its tests: about 12 MB on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in root.rglob("*.py") if not _NOT_LIBRARY & set(file.relative_to(root).parts)]
    if not files:
        raise LineartimeError(f"There is no Python source in {root}, the standard library: give a text of your own.")
    return LocalCorpus(DEFAULT_TEXT, by_file(root, [FilePart(file) for file in files]))


def _hutter(name: str) -> LocalCorpus:
    """Load enwik8 or text8 from a file NAME or NAME.zip in the mirror folder or the working directory."""
    for file in (folder / f"{name}{suffix}" for folder in (mirror(), Path()) if folder for suffix in ("", ".zip")):
        if file.is_file():
            return LocalCorpus(name, within_files([FilePart(file, at_lines=False)]))
    advice = f"download http://mattmahoney.net/dc/{name}.zip into this folder, or the one that LINEARTIME_MIRROR names"
    raise LineartimeError(f"There is no file {name} or {name}.zip here: {advice}.")
