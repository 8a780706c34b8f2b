"""Files that are whole or not there, and JSON files, whose size is limited and whose values are checked before use."""

import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from lineartime.errors import ArgumentError, LineartimeError, file_error, reporting_file_errors
from lineartime.fields import decode, shown

Content = TypeVar("Content")

TOKENIZER_FILE = "tokenizer.json"
"""The file name of a tokenizer, as in the tokenizers library."""
RECORD_FILE = "run.json"
"""The file in the folder of a run that tells how it was started."""
CHECKPOINT = r"step-\d{8,18}"
"""The name of a checkpoint in a run's folder."""
_ABANDONED_SECONDS = 3600
"""The age of half written data that no living process can be writing."""


def write_atomically(file: Path, content: str | bytes) -> None:
    """Write or replace a file. A process killed at any moment leaves the old file or the new one. Raises OSError on failure."""
    partial = file.with_name(f"{file.name}.{uuid.uuid4().hex}.partial")  # another name than any other process has
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        synchronise(partial)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def write_file(file: Path, text: str) -> Path:
    """Write or replace a file as `write_atomically` does, in a folder that is created if missing. Raises LineartimeError."""
    with reporting_file_errors("write", file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)
    return file


def synchronise(path: Path) -> None:
    """Wait until the system has flushed a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def synchronise_folder(folder: Path) -> None:
    """Wait until a folder and all that it holds are on the disk. Raises OSError on failure."""
    for path in (*folder.rglob("*"), folder):
        synchronise(path)


@contextmanager
def new_folder(argument: str, folder: Path) -> Iterator[Path]:
    """Write a folder under a temporary name, which the `with` block gets, and rename it when all of it is on the disk.

    Raises ArgumentError, naming the argument, for what no new folder can replace: all but an empty folder, no name, or the name
    of a checkpoint, which would belong to the run; and LineartimeError if the folder cannot be written.
    """
    if folder.name in ("", ".."):
        raise ArgumentError(argument, f"is {folder}, which is not the name of a new folder: choose another one.")
    if re.fullmatch(CHECKPOINT, folder.name):
        raise ArgumentError(argument, f"is {folder}, the name of a checkpoint in a run: choose another name.")
    with reporting_file_errors("read", folder):
        is_empty = folder.is_dir() and not any(folder.iterdir()) and not folder.is_mount()
        taken = folder.is_symlink() or (is_there(folder) and not is_empty)
    if taken:
        raise ArgumentError(argument, f"is {folder}, which exists already: delete it, or choose another folder.")
    with _appearing(folder) as partial:
        partial.mkdir()
        yield partial
        for path in partial.rglob("*"):
            if path.is_file():
                path.chmod(partial.stat().st_mode & 0o666)  # safetensors lets only their owner read files
        synchronise_folder(partial)


@contextmanager
def new_file(argument: str, file: Path) -> Iterator[Path]:
    """Write a file under a temporary name, which the `with` block gets, and rename it when it is on the disk; the suffix stays.

    The temporary file is created, empty, before the block, so that a folder in which nothing can be written is found at once.
    Raises ArgumentError, naming the argument, for a file that exists, now or at the end, and LineartimeError if it cannot be
    written.
    """
    check_new(argument, file)
    with _appearing(file, file.suffix) as partial:
        partial.touch()
        mode = partial.stat().st_mode
        yield partial
        partial.chmod(mode)  # safetensors lets only their owner read files
        synchronise(partial)
        check_new(argument, file)  # another process may have written it meanwhile


def check_new(argument: str, file: Path) -> None:
    """Raise ArgumentError, naming the argument, for a file that exists."""
    if is_there(file):
        raise ArgumentError(argument, f"is {file}, which exists already: delete it, or choose another name.")


@contextmanager
def _appearing(destination: Path, suffix: str = "") -> Iterator[Path]:
    """A temporary path beside a destination, with its suffix, which becomes the destination when the `with` block ends.

    An OSError becomes a LineartimeError, which names the destination unless another file failed.
    """
    stem = destination.name.removesuffix(suffix)
    partial = destination.with_name(f".{stem}.{uuid.uuid4().hex}.partial{suffix}")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(destination.parent, rf"\.{re.escape(stem)}\.[0-9a-f]{{32}}\.partial{re.escape(suffix)}")
        yield partial
        partial.rename(destination)
        synchronise(destination.parent)
    except OSError as error:
        failed = str(Path(os.fsdecode(error.filename or destination)).absolute())
        if partial.name in failed or str(destination.absolute()).startswith(failed):
            raise file_error("write", destination, error) from None
        raise file_error("use", failed, error) from None
    finally:
        remove(partial)


def remove_abandoned(folder: Path, names: str) -> None:
    """Delete what killed processes left half written in a folder, under names that match a regular expression.

    It is left behind if nothing has been written to it for an hour. Errors are ignored: another process may be faster.
    """
    with suppress(OSError):
        for left in [path for path in folder.iterdir() if re.fullmatch(names, path.name)]:
            inside = left.iterdir() if left.is_dir() else ()
            if time.time() - max(path.stat().st_mtime for path in (left, *inside)) > _ABANDONED_SECONDS:
                remove(left)


def remove(path: Path) -> None:
    """Delete a file, or a folder with all that it holds; errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def os_error_behind(error: Exception) -> OSError:
    """The error of the system that an error of safetensors or of the tokenizers library tells in words."""
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))


@contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """If a `with` block fails, remove what it added to a folder."""
    before = set(folder.iterdir()) if folder.is_dir() else set()
    try:
        yield
    except BaseException:
        for added in set(folder.iterdir()) - before if folder.is_dir() else ():
            remove(added)
        raise


def sha256(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as opened:
        hasher = hashlib.sha256()
        while block := opened.read(1 << 20):
            hasher.update(block)
    return hasher.hexdigest()


def is_there(path: str | Path) -> bool:
    """Whether a path exists. Unlike `Path.exists`, it does not raise for names that are too long or may not be looked at."""
    return os.path.exists(path)  # noqa: PTH110  # Path.exists raises


def is_folder(path: str | Path) -> bool:
    """Whether a path is a folder; like `is_there`, without an error."""
    return os.path.isdir(path)  # noqa: PTH112  # Path.is_dir raises


def absolute_path(value: Any, is_name: Callable[[str], bool]) -> Any:
    """Make a path, or a string that is the path of something and no name, absolute; return anything else unchanged."""
    is_path = isinstance(value, str) and not is_name(value) and (is_there(value) or is_there(f"{value}.idx"))  # of Megatron
    if isinstance(value, Path) or is_path:
        return str(Path(value).absolute())
    return value


class DamagedFileError(LineartimeError):
    """A file does not hold what the library writes into it; `what` is a clause: "step is -1, but must be at least 0"."""

    def __init__(self, file: Path, what: str, advice: str = "restore it from a copy") -> None:
        self.what = what.rstrip(".")
        super().__init__(f"{file} is damaged ({self.what}): {advice}.")
        self.args = (file, what, advice)


def read_file(file: Path, content: type[Content], advice: str = "restore it from a copy") -> Content:
    """Read a JSON file as a dataclass; `advice` says what to do if it is damaged.

    Raises DamagedFileError, naming the field, its value and what is allowed, and LineartimeError if it cannot be read.
    """
    found = read_plain(file, advice)
    try:
        decoded: Content = decode(content, found)
        return decoded
    except ArgumentError as error:
        raise DamagedFileError(file, str(error), advice) from None


def read_plain(file: Path, advice: str = "restore it from a copy", content: bytes | None = None) -> dict[str, Any]:
    """Read the object in a JSON file, or its content, without checking its fields. Raises as `read_file`."""
    with reporting_file_errors("read", file):
        content = file.read_bytes() if content is None else content
    try:
        found = json.loads(content)
    except ValueError as error:
        raise DamagedFileError(file, f"it is not JSON: {error}", advice) from None
    if not isinstance(found, dict):
        raise DamagedFileError(file, f"it is {shown(found)}, but must be an object", advice)
    return found
