"""Divide local files into splits: by the names of files and folders, by file, or within files."""

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Protocol

from lineartime.choices import Split
from lineartime.data.readers import SHARES, SPLITS, FilePart
from lineartime.errors import ArgumentError

_LETTER = r"[^\W\d_]"
_WORDS = re.compile(
    rf"(?<!{_LETTER})(?:(train|training)|(val|valid|validation|dev)|(test|testing))(?!{_LETTER})", re.IGNORECASE
)
_NO_TEXT = re.compile(r"(readme|licen[sc]e|dataset_infos?\.json)", re.IGNORECASE)

Files = dict[Split, list[FilePart]]


def named_split(name: str) -> Split | None:
    """The split that a name states as a whole word, as in wiki_train.txt; None if it states none.

    The words are train and training; val, valid, validation and dev; test and testing. A word must not be next to another
    letter. A name with words of two splits states none.
    """
    found = {SPLITS[(match.lastindex or 1) - 1] for match in _WORDS.finditer(name)}
    return found.pop() if len(found) == 1 else None


def split_of_path(relative: PurePath) -> Split | None:
    """The split that the name of a file states, or else the name of the nearest folder that states one."""
    return next((split for name in reversed(relative.parts) if (split := named_split(name))), None)


def by_name(root: Path, parts: Iterable[FilePart]) -> tuple[Files | None, str]:
    """Divide files into splits by their names, and by the names of their folders below `root`.

    Returns:
        The splits that occur, or None unless all file names state a split, except for README and LICENSE files; and a note
        if some names state a split but are ignored, otherwise an empty text.
    """
    splits: Files = {}
    others = []
    for part in parts:
        relative = part.path.relative_to(root) if part.path != root else PurePath(root.name)
        if split := split_of_path(relative):
            splits.setdefault(split, []).append(part)
        elif not has_no_text(relative.name):
            others.append(relative)
    if not others:
        return {split: splits[split] for split in SPLITS if split in splits} or None, ""
    note = (
        f"The split names in {root} are ignored, because {others[0]} does not name a split: rename it, or leave it out, to use "
        "them."
    )
    return None, note if splits else ""


def by_path(path: Path, parts: Sequence[FilePart], *, beside: bool) -> tuple[Files | None, str]:
    """Divide files as `by_name` does, or else by the name of the file or folder itself.

    What is named for training alone still has to be divided, unless a text with held-out data is given `beside` it.
    """
    splits, note = by_name(path, parts)
    own = own_split(path)
    if splits is None and own is not None and (own != "train" or beside):
        return {own: list(parts)}, note
    return splits, note


def own_split(path: Path) -> Split | None:
    """The split that the name of a file states, or that of a folder as a whole."""
    name = path.absolute().name
    return named_split(name) if path.is_file() or name.isalpha() else None


def has_no_text(name: str) -> bool:
    """Whether a file describes the others, like a README."""
    return bool(_NO_TEXT.match(name))


def completed(named: Files) -> Files:
    """Add the missing splits, each of which takes 5% of every training file; without training files, add nothing."""
    missing = [split for split in SPLITS if split not in named]
    if not missing or "train" in missing:
        return named
    kept = tuple(split for split in SPLITS if split not in missing)
    parts = numbered_apart(named["train"])
    cut: Files = {split: [replace(part, splits=(split,)) for part in parts] for split in missing}
    # One part for all that is left of a file: a stream reads every part as often as any other.
    return {**named, **cut, "train": [replace(part, splits=kept) for part in parts]}


class _Described(Protocol):
    @property
    def name(self) -> str: ...

    def describe(self, split: Split) -> str | None: ...


def missing_split(corpus: _Described, split: Split) -> ArgumentError:
    """The error for a split that a corpus does not have. It lists the splits that the corpus has."""
    there = " and a ".join(each for each in SPLITS if corpus.describe(each))
    advice = "give text to train on as well" if split == "train" else "choose an existing split, or all"
    return ArgumentError(
        "data",
        f"is {corpus.name}, which, judging by its file names, has a {there} split but no {split} split: {advice}, or rename "
        "the files.",
    )


def within_files(parts: Sequence[FilePart]) -> Files:
    """Take all splits from within each file."""
    return {split: [replace(part, splits=(split,)) for part in numbered_apart(parts)] for split in SPLITS}


def numbered_apart(parts: Sequence[FilePart]) -> Sequence[FilePart]:
    """The same parts, where the records of each file start at a number that depends on its name."""
    if len(parts) == 1:
        return parts
    return [replace(part, first_number=hashlib.sha256(os.fsencode(part.path.name)).digest()[0] % 20) for part in parts]


def by_file_if_fair(root: Path, parts: Sequence[FilePart]) -> Files:
    """Split files whose names say nothing: by file if the held-out files have at most twice their shares, else within files."""
    if len(parts) < len(SPLITS):
        return within_files(parts)
    splits = by_file(root, parts)
    total = sum(part.path.stat().st_size for part in parts)
    fair = all(
        sum(part.path.stat().st_size for part in splits[split]) <= 2 * SHARES[split] * total for split in ("validation", "test")
    )
    return splits if fair else within_files(parts)


def by_file(root: Path, parts: Iterable[FilePart]) -> Files:
    """Distribute whole files by a hash of their names, until test and validation have their shares of bytes."""
    sizes = {part: part.path.stat().st_size for part in parts}
    total = sum(sizes.values())

    def order(part: FilePart) -> tuple[bool, bytes]:
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
    return splits


def describe_parts(parts: Iterable[FilePart]) -> str:
    """Describe parts in a few words: "5% of text.txt", "120 files (a.txt, b.txt, ...)"."""
    shares: dict[Path, float] = {}
    for part in parts:
        shares[part.path] = shares.get(part.path, 0.0) + (sum(SHARES[split] for split in part.splits) or 1.0)
    groups: dict[float, list[str]] = {}
    for path, share in shares.items():
        groups.setdefault(round(share, 2), []).append(path.name)
    return " and ".join(f"{f'{share:.0%} of ' if share < 1 else ''}{listed(names)}" for share, names in groups.items())


def listed(names: list[str]) -> str:
    """Name one file to three, or count more of them and name two."""
    if len(names) == 1:
        return names[0]
    shown = ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]}, ..."
    return f"{len(names):,} files ({shown})"
