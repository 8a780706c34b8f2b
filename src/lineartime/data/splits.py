"""Divide local files into splits: by the names of files and folders, by file, or within files."""

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from lineartime.choices import Split
from lineartime.data.readers import SHARES, SPLITS, FilePart

_LETTER = r"[^\W\d_]"
_WORDS = re.compile(
    rf"(?<!{_LETTER})(?:(train|training)|(val|valid|validation|dev)|(test|testing))(?!{_LETTER})", re.IGNORECASE
)
_NO_TEXT = re.compile(r"(readme|licen[sc]e|dataset_infos?\.json)", re.IGNORECASE)

Files = dict[Split, list[FilePart]]


def named_split(name: str) -> Split | None:
    """The split that a name states as a whole word, as in wiki_train.txt; None if it states none.

    The words are train and training; val, valid, validation and dev; test and testing. A word must not be next to another
    letter. A name with words of two splits states none, unless both are held out, as in dev-test: then it states the test
    split.
    """
    found = {SPLITS[(match.lastindex or 1) - 1] for match in _WORDS.finditer(name)}
    return "test" if found == {"validation", "test"} else found.pop() if len(found) == 1 else None


def split_of_path(relative: PurePath) -> Split | None:
    """The split that the name of a file, or of the nearest folder, states; all in a folder test/ or dev/ is held out."""
    folders = [named_split(name) for name in relative.parts[:-1] if name.isalpha()]
    nearest = [named_split(name) for name in reversed(relative.parts)]
    held_out = [split for split in folders if split not in (None, "train")]
    return next(filter(None, [*held_out, *nearest]), None)


def _stated(root: Path, parts: Iterable[FilePart]) -> dict[FilePart, Split | None]:
    """The split that each file states by its path below `root`, without those that describe the others."""
    paths = {part: part.path.relative_to(root) if part.path != root else PurePath(root.name) for part in parts}
    stated = {part: split_of_path(path) for part, path in paths.items()}
    return {part: split for part, split in stated.items() if split or not has_no_text(part.path.name)}


def side_files(root: Path, parts: Sequence[FilePart]) -> set[FilePart]:
    """The files of a folder that state no split and lie beside or above those of its splits, which hold the text.

    There are none unless some text is held out by name. They have fewer bytes than the files that are named for training, or
    without any, than those held out; if folders directly below `root` are named for both, they may have more.
    """
    stated = _stated(root, parts)
    named = {split for split in stated.values() if split}
    if named <= {"train"}:
        return set()
    folders = {named_split(names[0]) for part in stated if len(names := part.path.relative_to(root).parts) > 1} - {None}
    text = [part for part, split in stated.items() if split and ("train" not in named or split == "train")]
    above = {folder for part in text for folder in part.path.parents}
    others = [part for part, split in stated.items() if split is None]
    size, size_of_others = (sum(part.path.stat().st_size for part in each) for each in (text, others))
    divided = "train" in folders and len(folders) > 1
    return {part for part in others if part.path.parent in above and (divided or size_of_others < size)}


def by_path(path: Path, parts: Sequence[FilePart], *, beside: bool) -> Files | None:
    """Divide files by the splits that they state, or else by the name of the file or folder that was given.

    A file that is held out by its name is never one for training. Files that state no split are for training, like those that
    are named for it, but have the split of the given path if that is held out. What is for training alone still has to be
    divided, unless all is named so, or the path is and a text with held-out data is given `beside` it.

    Args:
        path: the file or folder that was given.
        parts: its files, without `side_files`.
        beside: whether another text is named for held-out data.

    Returns:
        The splits that occur, or None if the files must be divided.
    """
    own, stated = own_split(path), _stated(path, parts)
    splits = {split for split in stated.values() if split}
    if not splits & {"validation", "test"} and own is not None and (own != "train" or beside):
        return {own: list(parts)}
    if not splits or (splits == {"train"} and None in stated.values()):
        return None
    rest = own if own and None in stated.values() else "train"
    given = {part: rest if split in (None, "train") else split for part, split in stated.items()}
    return {split: found for split in SPLITS if (found := [part for part in given if given[part] == split])}


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
