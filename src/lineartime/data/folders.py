"""Local files as documents: whole or one split of them, chosen from folders, and divided by name, by file, or within files."""

import codecs
import errno
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from lineartime.choices import TEXT_COLUMN, Split
from lineartime.data.readers import COMPRESSED, HEAD, RECORDS, SHARES, SPLITS, SourceFile
from lineartime.data.shards import IDS, SIDE_FILES, shard_kind, shard_order
from lineartime.errors import ArgumentError, file_error
from lineartime.fields import check_type
from lineartime.files import RECORD_FILE

# Splits ------------------------------------------------------------------------------------------------------------------

Files = dict[Split, list[SourceFile]]

_LETTER = r"[^\W\d_]"
_TRAIN, _VALIDATION = "train|training|trn", "val|valid|validate|validation|dev|devel|development"
_TEST = "test|testing|tst|eval|evals|evaluate|evaluation|(?:held|hold)[-_. ]?out"
_WORDS = re.compile(
    rf"(?<!{_LETTER})(?:({_TRAIN})|({_VALIDATION}|testa)|({_TEST}|testb))(?:[-_. ]?(?:sets?|data|split))?(?!{_LETTER})",
    re.IGNORECASE,
)
_NO_TEXT = re.compile(r"(readme|licen[sc]e|dataset_infos?\.json)", re.IGNORECASE)


def named_split(name: str) -> Split | None:
    """The split that a name states as a whole word, as in wiki_train.txt; None if it states none.

    The words are those of `_WORDS`, also with set or data, as in testset. A word must not be next to another letter. A name
    with words of two splits states none, unless both are held out, as in dev-test: then it states the test split.
    """
    found = {SPLITS[(match.lastindex or 1) - 1] for match in _WORDS.finditer(name)}
    return "test" if found == {"validation", "test"} else found.pop() if len(found) == 1 else None


def split_of_path(relative: PurePath) -> Split | None:
    """The split that the name of a file, or of the nearest folder, states; all in a folder test/ or held-out/ is held out."""
    folders = [named_split(name) for name in relative.parts[:-1] if _WORDS.fullmatch(name)]
    nearest = [named_split(name) for name in reversed(relative.parts)]
    held_out = [split for split in folders if split not in (None, "train")]
    return next(filter(None, [*held_out, *nearest]), None)


def own_split(path: Path) -> Split | None:
    """The split that the name of a file states, or that of a folder as a whole."""
    name = path.absolute().name
    return named_split(name) if path.is_file() or _WORDS.fullmatch(name) else None


def by_name(root: Path, parts: Sequence[SourceFile], notes: list[str], *, beside: bool) -> Files | None:
    """Divide the files at a given path by the splits that their names state, or else by the name of the path itself.

    Files that state no split are for training, or have the split of the path if that is held out. If some text is held out by
    name, such files beside or above the others, such as metadata.csv, are left out, with a note, if they have fewer bytes than
    the text for training, or folders directly below `root` are named for both.

    Returns None if the files must still be divided: all are for training, but not all named so, and no text with held-out data
    is given `beside` them.
    """
    below = {part: part.path.relative_to(root) if part.path != root else PurePath(root.name) for part in parts}
    stated = {part: split_of_path(relative) for part, relative in below.items()}
    stated = {part: split for part, split in stated.items() if split or not _NO_TEXT.match(part.path.name)}
    own, named = own_split(root), {split for split in stated.values() if split}
    others = [part for part, split in stated.items() if split is None]
    if named & {"validation", "test"}:
        text = [part for part, split in stated.items() if split and ("train" not in named or split == "train")]
        folders = {named_split(below[part].parts[0]) for part in stated if len(below[part].parts) > 1} - {None}
        if ("train" in folders and len(folders) > 1) or _bytes(others) < _bytes(text):
            above = {folder for part in text for folder in part.path.parents}
            left_out = [part for part in others if part.path.parent in above]
            if left_out:
                names = _names(root, left_out)
                notes.append(f"Left out of {root}, because the names of other files state the splits: {names}.")
            stated = {part: split for part, split in stated.items() if part not in left_out}
    elif own is not None and (own != "train" or beside):
        return {own: list(parts)}
    elif not named or others:
        return None
    rest = own if own and None in stated.values() else "train"
    given = {part: rest if split in (None, "train") else split for part, split in stated.items()}
    return {split: found for split in SPLITS if (found := [part for part in given if given[part] == split])}


def completed(named: Files) -> Files:
    """Add the missing splits, each of which takes 5% of every training file; without training files, add nothing."""
    missing = [split for split in SPLITS if not named.get(split)]
    if not missing or "train" in missing:
        return {split: named[split] for split in SPLITS if named.get(split)}
    kept = tuple(split for split in SPLITS if split not in missing)
    parts = [replace(part, is_alone=len(named["train"]) == 1) for part in named["train"]]
    cut: Files = {split: [replace(part, splits=(split,)) for part in parts] for split in missing}
    # All that is left of a file is one part, which is read once.
    return {**named, **cut, "train": [replace(part, splits=kept) for part in parts]}


def by_file(root: Path, parts: Sequence[SourceFile]) -> Files:
    """Distribute whole files by a hash of their names, until test and validation have their shares of bytes.

    If these would get more than twice their shares, all splits are taken from within each file.
    """
    if len(parts) < len(SPLITS):
        return completed({"train": list(parts)})
    sizes = {part: part.path.stat().st_size for part in parts}
    total = sum(sizes.values())

    def order(part: SourceFile) -> tuple[bool, bytes]:
        name = os.fsencode(part.path.relative_to(root).as_posix())
        small = sizes[part] <= total / 2  # a file with most of the bytes comes first, for training
        return small, hashlib.sha256(name).digest()

    left = sorted(sizes, key=order)
    splits: Files = {split: [] for split in SPLITS}
    for split in ("test", "validation"):
        size = 0
        # At least one file for each split, training included.
        while not splits[split] or (size < SHARES[split] * total and len(left) > len(sizes) // 2 + 1):
            part = left.pop()
            splits[split].append(part)
            size += sizes[part]
    splits["train"] = left
    fair = all(_bytes(splits[split]) <= 2 * total * SHARES[split] for split in ("validation", "test"))
    return splits if fair else completed({"train": list(parts)})


def describe_parts(parts: Iterable[SourceFile]) -> str:
    """Describe parts of different files in a few words: "5% of text.txt", "120 files (a.txt, b.txt, ...)"."""
    groups: dict[float, list[str]] = {}
    for part in parts:
        share = sum(SHARES[split] for split in part.splits) or 1.0
        groups.setdefault(round(share, 2), []).append(part.path.name)
    return " and ".join(f"{f'{share:.0%} of ' if share < 1 else ''}{_in_words(names)}" for share, names in groups.items())


def _in_words(names: list[str]) -> str:
    """Name one file to three, or count more of them and name two."""
    if len(names) == 1:
        return names[0]
    shown = ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]}, ..."
    return f"{len(names):,} files ({shown})"


def _names(folder: Path, parts: Iterable[SourceFile]) -> str:
    """The names of some files below a folder, in a few words."""
    paths = sorted(part.path for part in parts)
    return _in_words([path.name if path == folder else path.relative_to(folder).as_posix() for path in paths])


def _bytes(parts: Iterable[SourceFile]) -> int:
    return sum(part.path.stat().st_size for part in parts)


# The files of a folder ---------------------------------------------------------------------------------------------------


@dataclass
class FilesOfText:
    """The files at one or several paths."""

    column: str = TEXT_COLUMN  # of records, that holds the text
    include: Sequence[str] = ()  # patterns of the files of a folder to read; empty for all
    exclude: Sequence[str] = ()  # patterns of the files and folders of a folder to leave out
    raw_ids: str | None = None  # the dtype of token ids in files that do not state it
    notes: list[str] = field(default_factory=list, init=False)  # sentences for the user about files that are left out
    matched: set[str] = field(default_factory=set, init=False)  # the patterns that matched a file or folder

    def __post_init__(self) -> None:
        for argument, patterns in (("include", self.include), ("exclude", self.exclude)):
            check_type(argument, patterns, tuple[str, ...])
            if not all(pattern.strip("/") for pattern in patterns):
                raise ArgumentError(argument, "has an empty pattern: write one such as *.md, or leave it out.")

    def find(self, path: Path) -> list[SourceFile]:
        """The files of text at an existing path, without empty ones.

        A file of a folder is left out if it is hidden, in the folder of a run, of a kind that is not read, or by the patterns.

        Raises LineartimeError if there is none, a file or folder cannot be read, or most bytes of a folder are not text.
        """
        if not path.is_dir() and not path.is_file():
            raise ArgumentError("data", f"is {path}, which is neither a file nor a folder: write the text to a file.")
        try:
            files = sorted(self._chosen(path, path)) if path.is_dir() else [path]
            kinds = {file: kind for file in files if (kind := shard_kind(file, self.raw_ids))}
            sizes = {file: file.stat().st_size for file in files}
            beside = {*kinds.values()} <= {"WebDataset", "NumPy", "Arrow"}  # which also stand beside text
            if beside and 2 * sum(sizes[file] for file in kinds) < sum(sizes.values()):
                kinds = {}
            files = self._shards(path, files, kinds) if kinds else [file for file in files if sizes[file]]
            parts = [SourceFile(file, self.column, kinds.get(file, ""), self.raw_ids) for file in files]
            judged = parts if path.is_dir() or path.suffix in IDS else []
            unread = [part for part in judged if not part.shard and _is_binary(part.path)]
        except OSError as error:
            raise file_error("read", error.filename or path, error) from None
        kept = [part for part in parts if part not in unread]
        texts = [part for part in kept if not _NO_TEXT.match(part.path.name)] or kept
        may_be_ids = any(part.path.suffix in IDS for part in unread)
        hint = "; give `raw_ids` if they hold token ids alone, as nanoGPT's" if may_be_ids else ""
        if kept and _bytes(unread) > _bytes(texts):
            found = f"is {path}, most of which is binary, such as {_names(path, unread)}: give text, or choose files"
            raise ArgumentError("data", f"{found} by `include`{hint}.")
        if unread:
            self.notes.append(f"Left out of {path}, because binary files are not read: {_names(path, unread)}{hint}.")
        if not kept:
            left = f" ({' '.join(self.notes).rstrip('.')})" if self.notes else ""
            chosen = " with these patterns" if self.include or self.exclude else ""
            found = f"is {path}, which holds no text{chosen}{left}"
            raise ArgumentError("data", f"{found}: give a text file or a folder of text files.")
        return kept

    def _shards(self, root: Path, files: Sequence[Path], kinds: dict[Path, str]) -> list[Path]:
        """The shards of a folder, of one kind, in the order of the file that lists them; a note says what else is left out."""
        one, *others = {kind: file for file, kind in kinds.items()}.items()
        if others:
            two = " and ".join(f"{kind} ({file.relative_to(root)})" for kind, file in (one, others[0]))
            raise ArgumentError("data", f"is {root}, which holds shards of two kinds, {two}: give one, or choose by `include`.")
        chosen: list[Path] = []
        for folder in dict.fromkeys(file.parent for file in kinds):
            inside = [file for file in kinds if file.parent == folder]
            order = shard_order(folder, one[0]) if root.is_dir() else None
            chosen += inside if order is None else [file for file in order if file in inside]
        left = [file for file in files if file not in chosen and file.suffix != ".idx" and file.name not in SIDE_FILES]
        if left:
            names = _in_words([file.relative_to(root).as_posix() for file in left])
            self.notes.append(f"Left out of {root}, because its shards are {one[0]}: {names}.")
        return chosen

    def unused(self) -> list[str]:
        """A note for each pattern that matched nothing."""
        return [
            f"No file matches {pattern}, a pattern of {name}."
            for name, patterns in (("include", self.include), ("exclude", self.exclude))
            for pattern in patterns
            if pattern not in self.matched
        ]

    def _chosen(self, root: Path, folder: Path, parents: tuple[Path, ...] = ()) -> Iterator[Path]:
        """The files below a folder that are shown and chosen. Raises OSError for a folder that is unreadable or in itself."""
        own = folder.resolve()
        if own in parents:
            raise OSError(errno.ELOOP, f"{folder} is a link to a folder that contains it")
        for path in folder.iterdir():
            if path.name.startswith((".", "__pycache__")) or self._matches(path.relative_to(root), self.exclude):
                continue
            if path.is_dir():
                is_run = (path / RECORD_FILE).is_file() and any(path.glob("step-*"))  # which may be trained on this text
                if not is_run:
                    yield from self._chosen(root, path, (*parents, own))
            elif path.is_file() and (not self.include or self._matches(path.relative_to(root), self.include)):
                yield path

    def _matches(self, relative: PurePath, patterns: Sequence[str]) -> bool:
        found = [pattern for pattern in patterns if matches(relative, pattern)]
        self.matched.update(found)
        return bool(found)


def matches(relative: PurePath, pattern: str) -> bool:
    """Whether a pattern matches a path below a folder, or a folder above it, as in a .gitignore file.

    One without a slash matches a name, such as "*.md" or "notes", and one with a slash a path from the folder on, in which
    `**` stands for any number of folders, such as "src/*.py" or "src/**/*.py".
    """
    names = PurePath(pattern.strip("/")).parts
    if len(names) == 1 and not pattern.startswith(("/", "./")):
        return any(fnmatchcase(part, names[0]) for part in relative.parts)
    return any(_path_matches(path.parts, names) for path in (relative, *relative.parents) if path.parts)


def _path_matches(parts: Sequence[str], names: Sequence[str]) -> bool:
    """Whether each part of a path matches its pattern, of which ** matches any number of parts."""
    if not names:
        return not parts
    if names[0] == "**":
        return any(_path_matches(parts[skipped:], names[1:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], names[0]) and _path_matches(parts[1:], names[1:])


def _is_binary(path: Path) -> bool:
    """Whether a file is not text. UTF-16 is not binary: the error for it says how to convert it. Raises OSError."""
    if path.suffix.lower() in (*COMPRESSED, *RECORDS):
        return False
    with path.open("rb") as stream:
        head = stream.read(HEAD)
    is_zero = b"\0" in head and not head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return is_zero or head.startswith(b"%PDF-")
