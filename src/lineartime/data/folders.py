"""The files of a folder that hold text."""

import codecs
import errno
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from lineartime.choices import MAX_EXPANSION, TEXT_COLUMN
from lineartime.data.layouts import BINARY, Layout, layouts_of
from lineartime.data.local_files import COMPRESSED, LEAVE_OUT, RECORDS, SourceFile
from lineartime.data.readers import FilePart
from lineartime.data.records import file_format, is_named_text, why_no_records
from lineartime.data.splits import has_no_text, listed, side_files
from lineartime.errors import Argument, ArgumentError, LineartimeError, file_error, spell
from lineartime.fields import check_type
from lineartime.files import RECORD_FILE

_HEAD = 8192  # bytes in which a binary file has a zero, by the rule of git
_POINTER = b"version https://git-lfs.github.com/spec/v1"


@dataclass(frozen=True)
class Reading:
    """How the local files of a text are found and read.

    Attributes:
        column: the column of records that holds the text.
        max_expansion: the maximum number of bytes of text per byte of a compressed file.
        include: patterns of the files of a folder to read; empty for all.
        exclude: patterns of the files and folders of a folder to leave out.
    """

    column: str = TEXT_COLUMN
    max_expansion: int = MAX_EXPANSION
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()

    def __post_init__(self) -> None:
        for argument, patterns in (("include", self.include), ("exclude", self.exclude)):
            check_type(argument, tuple(patterns) if isinstance(patterns, list) else patterns, tuple[str, ...])
            if not all(pattern.strip("/") for pattern in patterns):
                raise ArgumentError(argument, "has an empty pattern: write one such as *.md, or leave it out.")


@dataclass
class FilesOfText:
    """The files at one or several paths.

    Attributes:
        reading: how they are found and read.
        paths: the paths that were searched.
        notes: sentences for the user about files that are left out, or read in another way than their names suggest.
        matched: the patterns that matched a file or folder.
    """

    reading: Reading
    paths: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    matched: set[str] = field(default_factory=set)

    def find(self, path: Path) -> list[FilePart]:
        """The files of text at an existing path, without empty ones.

        A file of a folder is left out if it is hidden, in the folder of a run, binary, in a layout of another program or one of
        the `side_files`, and by the patterns of `reading`.

        Raises:
            LineartimeError: if there is none, a file or folder cannot be read, or most bytes of a folder are not text.
        """
        self.paths.append(path)
        source = SourceFile(path, self.reading.column, self.reading.max_expansion)
        try:
            if not path.is_dir() and not path.is_file():
                raise ArgumentError("data", f"is {path}, a pipe or a device, which is read only once: write it to a file.")
            if not path.is_dir():
                if layout := layouts_of([path]).get(path):
                    raise ArgumentError("data", f"is {path}, but {layout.what} are not read: {layout.advice}.")
                parts = [FilePart(source)] if _head(path) else []
            else:
                chosen = (file for file in sorted(self._chosen(path, path)) if file.stat().st_size)
                parts = self._texts(path, [FilePart(replace(source, path=file)) for file in chosen])
                parts = self._readable(path, self._without_side_files(path, parts))
        except OSError as error:
            raise file_error("read", error.filename or path, error) from None
        if not parts:
            raise self._no_text(path)
        first = next((part for part in parts if not has_no_text(part.path.name)), parts[0])
        if _has_markers(first):
            found = f"{first.path} has the markers of Wiki-40B, such as _START_ARTICLE_, which are read as text"
            self.notes.append(f"{found}: the corpus wiki40b replaces them.")
        return parts

    def _no_text(self, path: Path) -> ArgumentError:
        left = f" ({' '.join(self.notes).rstrip('.')})" if self.notes else ""
        if path.is_dir() and (self.reading.include or self.reading.exclude):
            found = f"is {path}, which holds no text with these patterns{left}: change "
            return ArgumentError("data", found, Argument("include"), " or ", Argument("exclude"), ".")
        return ArgumentError("data", f"is {path}, which holds no text{left}: give a text file or a folder of text files.")

    def unused(self) -> list[str]:
        """A note for each pattern that matched nothing."""
        given = [("include", each) for each in self.reading.include] + [("exclude", each) for each in self.reading.exclude]
        return [
            f"No file matches {pattern}, a pattern of {spell(Argument(name))}."
            for name, pattern in given
            if pattern not in self.matched
        ]

    def _chosen(self, root: Path, folder: Path, parents: tuple[Path, ...] = ()) -> Iterator[Path]:
        """The files below a folder that are shown and chosen. Raises OSError for a folder that is unreadable or in itself."""
        own = folder.resolve()
        if own in parents:
            raise OSError(errno.ELOOP, f"{folder} is a link to a folder that contains it")
        for path in folder.iterdir():
            if path.name.startswith((".", "__pycache__")) or self._matches(path.relative_to(root), self.reading.exclude):
                continue
            if path.is_dir():
                if not _is_run(path):
                    yield from self._chosen(root, path, (*parents, own))
            elif path.is_file() and (not self.reading.include or self._matches(path.relative_to(root), self.reading.include)):
                yield path

    def _matches(self, relative: PurePath, patterns: Sequence[str]) -> bool:
        found = [pattern for pattern in patterns if matches(relative, pattern)]
        self.matched.update(found)
        return bool(found)

    def _texts(self, folder: Path, parts: list[FilePart]) -> list[FilePart]:
        """Leave out what is not text. Raises ArgumentError if that is most of the bytes."""
        layouts = layouts_of(part.path for part in parts)
        unread = {part.path: layouts.get(part.path, BINARY) for part in parts if part.path in layouts or _is_binary(part.file)}
        kept = [part for part in parts if part.path not in unread]
        texts = [part for part in kept if not has_no_text(part.path.name)]
        if (kept or layouts) and sum(map(_bytes, unread)) > sum(_bytes(part.path) for part in texts or kept):
            raise _mostly_unread(folder, unread, [part.path for part in texts or kept])
        for what in dict.fromkeys(layout.what for layout in unread.values()):
            names = _names(folder, [path for path, layout in unread.items() if layout.what == what])
            self.notes.append(f"Left out of {folder}, because {what} are not read: {names}.")
        return kept

    def _without_side_files(self, folder: Path, parts: list[FilePart]) -> list[FilePart]:
        if left_out := side_files(folder, parts):
            names = _names(folder, [part.path for part in left_out])
            self.notes.append(f"Left out of {folder}, because the names of other files state the splits: {names}.")
        return [part for part in parts if part not in left_out]

    def _readable(self, folder: Path, parts: list[FilePart]) -> list[FilePart]:
        """Take JSON without texts for plain text, unless the folder has nothing else."""
        reasons = {part.path: reason for part in parts if (reason := why_no_records(part.file))}
        others = [part for part in parts if part.path not in reasons and not has_no_text(part.path.name)]
        if self.reading.column != TEXT_COLUMN:  # which some file must have
            others = [part for part in others if not part.is_text]
        if reasons and not others:
            raise next(iter(reasons.values()))
        if reasons:
            column = self.reading.column
            self.notes.append(
                f'Read as plain text in {folder}, for want of records with "{column}": {_names(folder, reasons)}.'
            )
        return [replace(part, file=replace(part.file, as_text=part.path in reasons)) for part in parts]


def matches(relative: PurePath, pattern: str) -> bool:
    """Whether a pattern matches a path below the given folder, or a folder above it, as in a .gitignore file.

    A pattern without a slash matches the name of a file or folder, and one with a slash a path from the given folder on, in
    which `**` stands for any number of folders: "*.md", "notes", "src/*.py", "src/**/*.py".
    """
    names = PurePath(pattern.strip("/")).parts
    if len(names) == 1 and not pattern.startswith("/") and not pattern.startswith("./"):
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


def _bytes(path: Path) -> int:
    return path.stat().st_size


def _mostly_unread(folder: Path, unread: dict[Path, Layout], texts: list[Path]) -> ArgumentError:
    """The error for a folder of which most bytes are not text: it names the kinds that have most of them."""
    kinds, suffixes = Counter[Layout](), Counter[str]()
    for path, layout in unread.items():
        kinds[layout] += _bytes(path)
    for path in texts:
        suffixes[f"*{path.suffix}" if path.suffix else path.name] += _bytes(path)
    layout = max(kinds, key=kinds.__getitem__)
    same = [path for path in unread if unread[path] == layout]
    example = max(filter(layout.is_told_by, same), default=None, key=_bytes) or max(same, key=_bytes)
    examples = f"{layout.what} ({example.relative_to(folder).as_posix()})"
    found = f"is {folder}, most of which is not read, such as {examples}: {layout.advice}"
    if not suffixes:
        return ArgumentError("data", f"{found}.")
    pattern = max(suffixes, key=suffixes.__getitem__)
    between = ", or choose other files by " if layout.advice else "choose the files to read, for example by "
    return ArgumentError("data", f"{found}{between}", Argument("include", pattern), ".")


def _has_markers(part: FilePart) -> bool:
    """Whether the first document has the markers of Wiki-40B; an array of JSON, which is read as a whole, is not looked at."""
    with suppress(LineartimeError, StopIteration):
        return file_format(part.file) != "json" and "_START_ARTICLE_" in next(next(part.documents()))
    return False


def _head(path: Path) -> bytes:
    """The beginning of a file. Raises LineartimeError for a pointer of Git LFS in place of a text, by its suffix."""
    with path.open("rb") as stream:
        head = stream.read(_HEAD)
    if head.startswith(_POINTER) and path.suffix.lower() in (".txt", ".md", *RECORDS, *COMPRESSED):
        raise LineartimeError(f"{path} is a pointer of Git LFS: fetch the file itself by `git lfs pull`, or ", *LEAVE_OUT)
    return head


def _is_binary(file: SourceFile) -> bool:
    """Whether a file that is text by its name is binary. UTF-16 is not: the error for it says how to convert it."""
    head = _head(file.path)
    is_zero = b"\0" in head and not head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return is_named_text(file) and (is_zero or head.startswith((b"%PDF-", _POINTER)))


def _is_run(folder: Path) -> bool:
    """Whether a folder holds a run, which may be trained on the text of a folder above it."""
    return (folder / RECORD_FILE).is_file() and any(folder.glob("step-*"))
