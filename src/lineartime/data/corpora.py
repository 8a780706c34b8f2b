"""Corpora and their splits: corpora by name, local files, or the source of the Python standard library."""

import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lineartime.choices import DEFAULT_TEXT, TEXT_COLUMN, RawIds, Split
from lineartime.data.folders import Files, FilesOfText, by_file, by_name, completed, describe_parts, own_split
from lineartime.data.hub import HUB, PREFIX, HubCorpus, hub_corpus, mirror
from lineartime.data.readers import SPLITS, SourceFile
from lineartime.errors import ArgumentError, LineartimeError, did_you_mean, reporting_file_errors
from lineartime.fields import check_type

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

_HUTTER = ("enwik8", "text8")
"""Files of 10^8 bytes. By convention, the first 90% are for training, then 5% for validation and 5% for testing."""

Data = str | Path | Sequence[str | Path] | None
"""Names and paths of texts; None for the source of Python's standard library."""


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
        return "\n".join(part.identity() for part in self.parts(split))

    def documents(self, split: Split) -> Iterator[Iterator[str]]:
        """The documents of a split, file by file."""
        for part in self.parts(split):
            yield from part.documents()

    def parts(self, split: Split) -> list[SourceFile]:
        """The files, or parts of files, of a split."""
        if split != "all":
            return self.splits.get(split, [])
        return list(dict.fromkeys(replace(part, splits=()) for each in SPLITS for part in self.splits.get(each, [])))


Source = LocalCorpus | HubCorpus
"""A text from a single place."""


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


def no_text(split: str) -> LineartimeError:
    """The error for a split without text; `split` is its full name, such as "the test split of books"."""
    return LineartimeError(f"There is no text in {split}: give more text, or files called train..., valid... and test...")


def is_corpus_name(data: str) -> bool:
    """Whether `load_corpus` reads this as the name of a corpus, not as a path."""
    return data in HUB or data in _HUTTER or data.startswith(PREFIX)


def load_corpus(
    data: Data,
    text_column: str = TEXT_COLUMN,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    raw_ids: RawIds | None = None,
) -> Corpus:
    """Load a corpus by name, the text at a path, several of these together, or the standard library's source for None.

    Names take precedence over paths: for a file called c4, give ./c4 or a `Path`. Splits are those that names of files or
    folders state (`by_name`), or else of a share of the files (`by_file`). Several texts are joined split by split. Paths whose
    names state their splits come first, as one folder.

    `text_column` is the column of records and `hub:` data sets that holds the text. `include` and `exclude` are patterns
    (`matches`) of the files in folders to read, by default all, and of the files and folders to leave out. `raw_ids` is the
    dtype of token ids in files that do not state it.

    Raises LineartimeError if there is no text, or most of a folder is not text.
    """
    names = (data,) if isinstance(data, (str, Path)) else tuple(data) if isinstance(data, Sequence) else data or ()
    check_type("data", names, tuple[str | Path, ...])
    check_type("raw_ids", raw_ids, RawIds | None)
    found = FilesOfText(text_column, include, exclude, raw_ids)
    sources: list[Source] = []
    named: dict[str, Files] = {}
    seen: set[str | Path] = set()
    paths = [Path(name) for name in names if isinstance(name, Path) or not is_corpus_name(name)]
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
                if Path(f"{name}.idx").is_file():  # the name of Megatron's pair of files
                    path = Path(f"{name}.bin")
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
        sources += standard_library().sources
    where = " and ".join(source.name for source in sources)
    for argument, patterns in (("include", include), ("exclude", exclude)):
        if patterns and not paths:
            raise ArgumentError(argument, f"is for folders, but the text is {where}: leave it out.")
    if text_column != TEXT_COLUMN and not any(source.has_columns for source in sources):
        raise ArgumentError("text_column", f"is {text_column}, but {where} has no columns: leave it at {TEXT_COLUMN}.")
    return Corpus(tuple(sources), (*found.notes, *found.unused()))


def load_corpus_of_run(data: Data, *options: Any) -> Corpus:
    """`load_corpus` for the text that a run was trained on. LineartimeError if it is not there any more."""
    try:
        return load_corpus(data, *options)
    except ArgumentError as error:
        if error.argument != "data":
            raise
        raise LineartimeError(f"The text of this run {error.predicate} Give the place where it is now: `data`.") from None


def standard_library() -> Corpus:
    """The source of the running Python's standard library, without its tests: about 12 MB on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in root.rglob("*.py") if not _NOT_LIBRARY & set(file.relative_to(root).parts)]
    if not files:
        raise LineartimeError(f"There is no Python source in {root}, the standard library: give a text of your own.")
    return Corpus((LocalCorpus(DEFAULT_TEXT, by_file(root, [SourceFile(file) for file in files])),))


def _hutter(name: str) -> LocalCorpus:
    """Load enwik8 or text8 from a file NAME or NAME.zip in the mirror folder or the working directory."""
    candidates = (folder / f"{name}{suffix}" for folder in (mirror(), Path()) if folder for suffix in ("", ".zip"))
    file = next(filter(Path.is_file, candidates), None)
    if file is None:
        raise LineartimeError(
            f"There is no file {name} or {name}.zip here: download http://mattmahoney.net/dc/{name}.zip into this folder, or "
            "into the folder that LINEARTIME_MIRROR names."
        )
    return LocalCorpus(name, completed({"train": [SourceFile(file, at_lines=False)]}))
