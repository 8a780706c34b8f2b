"""The files of a folder that hold text, and those that do not: binary files, and files of other programs."""

import codecs
import errno
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from lineartime.choices import TEXT_COLUMN
from lineartime.data.local_files import COMPRESSED, CSV, LEAVE_OUT, RECORDS, SourceFile
from lineartime.data.readers import FilePart
from lineartime.data.records import why_no_records
from lineartime.data.splits import has_no_text, listed, side_files
from lineartime.errors import ArgumentError, LineartimeError, file_error
from lineartime.fields import check_type
from lineartime.files import RECORD_FILE

_HEAD = 8192  # bytes in which a binary file has a zero, by the rule of git
_POINTER = b"version https://git-lfs.github.com/spec/v1"
_TAR = re.compile(r".*\.(tar(\.\w+)?|t(gz|bz2?|xz|zst))", re.IGNORECASE)


def _unread(path: Path) -> str | None:
    """What a file is that is not read; None for text. UTF-16 is not binary: the error for it says how to convert it.

    Raises OSError if it cannot be read, and LineartimeError for a pointer of Git LFS in place of a text, by its suffix.
    """
    if _TAR.fullmatch(path.name):
        return "tar archives"
    with path.open("rb") as stream:
        head = stream.read(_HEAD)
    suffix = path.suffix.lower()
    if head.startswith(_POINTER) and suffix in (".txt", ".md", *RECORDS, *COMPRESSED):
        raise LineartimeError(f"{path} is a pointer of Git LFS: fetch the file itself by `git lfs pull`, or ", *LEAVE_OUT)
    is_zero = b"\0" in head and not head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    is_named_text = suffix in CSV or suffix not in (*COMPRESSED, *RECORDS)
    return "binary files" if is_named_text and (is_zero or head.startswith((b"%PDF-", _POINTER))) else None


@dataclass
class FilesOfText:
    """The files at one or several paths.

    Attributes:
        column: the column of records that holds the text.
        include: patterns of the files of a folder to read; empty for all.
        exclude: patterns of the files and folders of a folder to leave out.
        paths: the paths that were searched.
        notes: sentences for the user about files that are left out, or read in another way than their names suggest.
        matched: the patterns that matched a file or folder.
    """

    column: str = TEXT_COLUMN
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    paths: list[Path] = field(default_factory=list, init=False)
    notes: list[str] = field(default_factory=list, init=False)
    matched: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        for argument, patterns in (("include", self.include), ("exclude", self.exclude)):
            check_type(argument, tuple(patterns) if isinstance(patterns, list) else patterns, tuple[str, ...])
            if not all(pattern.strip("/") for pattern in patterns):
                raise ArgumentError(argument, "has an empty pattern: write one such as *.md, or leave it out.")

    def find(self, path: Path) -> list[FilePart]:
        """The files of text at an existing path, without empty ones.

        A file of a folder is left out if it is hidden, in the folder of a run, of a kind that is not read or one of the
        `side_files`, and by the patterns.

        Raises LineartimeError if there is none, a file or folder cannot be read, or most bytes of a folder are not text.
        """
        self.paths.append(path)
        try:
            if path.is_dir():
                parts = self._texts(path, [file for file in sorted(self._chosen(path, path)) if file.stat().st_size])
                parts = self._readable(path, self._without_side_files(path, parts))
            elif path.is_file():
                if _unread(path) == "tar archives":  # a binary file is read, until a byte of it is not UTF-8
                    raise ArgumentError("data", f"is {path}, but tar archives are not read: unpack it and give the folder.")
                parts = [self._part(path)] if path.stat().st_size else []
            else:
                raise ArgumentError("data", f"is {path}, a pipe or a device, which is read only once: write it to a file.")
        except OSError as error:
            raise file_error("read", error.filename or path, error) from None
        if not parts:
            raise self._no_text(path)
        return parts

    def unused(self) -> list[str]:
        """A note for each pattern that matched nothing."""
        return [
            f"No file matches {pattern}, a pattern of {name}."
            for name, patterns in (("include", self.include), ("exclude", self.exclude))
            for pattern in patterns
            if pattern not in self.matched
        ]

    def _part(self, path: Path) -> FilePart:
        return FilePart(SourceFile(path, self.column))

    def _no_text(self, path: Path) -> ArgumentError:
        left = f" ({' '.join(self.notes).rstrip('.')})" if self.notes else ""
        if path.is_dir() and (self.include or self.exclude):
            found = f"is {path}, which holds no text with these patterns{left}: change "
            return ArgumentError("data", found, "`include` or `exclude`.")
        return ArgumentError("data", f"is {path}, which holds no text{left}: give a text file or a folder of text files.")

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

    def _texts(self, folder: Path, paths: list[Path]) -> list[FilePart]:
        """The files that are text. Raises ArgumentError if most bytes are not."""
        unread = {path: kind for path in paths if (kind := _unread(path))}
        kept = [path for path in paths if path not in unread]
        texts = [path for path in kept if not has_no_text(path.name)] or kept
        if kept and _bytes(unread) > _bytes(texts):
            example = max(unread, key=lambda path: path.stat().st_size)
            what = f"{unread[example]} ({example.relative_to(folder).as_posix()})"
            found = f"is {folder}, most of which is not read, such as {what}: give the text that they hold, or choose files by "
            raise ArgumentError("data", found, "`include`.")
        for kind in dict.fromkeys(unread.values()):
            names = _names(folder, [path for path in unread if unread[path] == kind])
            self.notes.append(f"Left out of {folder}, because {kind} are not read: {names}.")
        return [self._part(path) for path in kept]

    def _without_side_files(self, folder: Path, parts: list[FilePart]) -> list[FilePart]:
        if left_out := side_files(folder, parts):
            names = _names(folder, [part.path for part in left_out])
            self.notes.append(f"Left out of {folder}, because the names of other files state the splits: {names}.")
        return [part for part in parts if part not in left_out]

    def _readable(self, folder: Path, parts: list[FilePart]) -> list[FilePart]:
        """Take JSON and CSV without texts for plain text, unless the folder has nothing else."""
        reasons = {part.path: reason for part in parts if (reason := why_no_records(part.file))}
        others = [part for part in parts if part.path not in reasons and not has_no_text(part.path.name)]
        if self.column != TEXT_COLUMN:  # which some file must have
            others = [part for part in others if not part.is_text]
        if reasons and not others:
            raise next(iter(reasons.values()))
        if reasons:
            names = _names(folder, reasons)
            self.notes.append(f'Read as plain text in {folder}, for want of records with "{self.column}": {names}.')
        return [replace(part, file=replace(part.file, as_text=part.path in reasons)) for part in parts]


def matches(relative: PurePath, pattern: str) -> bool:
    """Whether a pattern matches a path below the given folder, or a folder above it, as in a .gitignore file.

    A pattern without a slash matches the name of a file or folder, and one with a slash a path from the given folder on, in
    which `**` stands for any number of folders: "*.md", "notes", "src/*.py", "src/**/*.py".
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


def _names(folder: Path, paths: Iterable[Path]) -> str:
    """The names of some files below a folder, in a few words."""
    return listed([path.relative_to(folder).as_posix() for path in sorted(paths)])


def _bytes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)
