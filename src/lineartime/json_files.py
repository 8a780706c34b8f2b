"""Read the JSON files that the library writes: their size is limited, and values are checked before use."""

import errno
import json
import stat
from pathlib import Path
from typing import IO, Any, TypeVar

from lineartime.errors import ArgumentError, LineartimeError, reporting_file_errors
from lineartime.fields import decode, shown

Content = TypeVar("Content")

LARGEST = 1 << 26
"""The maximum size of a JSON file, in bytes."""
_TOO_DEEP = "it has lists and objects nested too deeply"


class DamagedFileError(LineartimeError):
    """A file does not hold what the library writes into it.

    Args:
        file: the file.
        what: what is wrong, as a clause: "step is -1, but must be at least 0".
        advice: what to do.
    """

    def __init__(self, file: Path, what: str, advice: str = "restore it from a copy") -> None:
        super().__init__(f"{file} is damaged ({what}): {advice}.")
        self.args = (file, what, advice)
        self.file = file
        self.what = what


def read_file(file: Path, content: type[Content], advice: str = "restore it from a copy") -> Content:
    """Read a JSON file as a dataclass.

    Args:
        file: the file.
        content: the dataclass.
        advice: what to do if it is damaged.

    Raises:
        DamagedFileError: naming the field, its value and what is allowed.
        LineartimeError: if the file cannot be read.
    """
    found = read_plain(file, advice)
    try:
        return decoded(content, found)
    except ValueError as error:
        raise DamagedFileError(file, str(error), advice) from None


def read_plain(file: Path, advice: str = "restore it from a copy") -> dict[str, Any]:
    """Read the object in a JSON file without checking its fields. Raises as `read_file`."""
    with reporting_file_errors("read", file), open_regular(file) as opened:
        content = opened.read(LARGEST + 1)
    try:
        if len(content) > LARGEST:
            raise ValueError(f"it is larger than {LARGEST >> 20} MiB")
        found = parse(content)
        if not isinstance(found, dict):
            raise ValueError(f"it is {shown(found)}, but must be an object")
    except ValueError as error:
        raise DamagedFileError(file, str(error), advice) from None
    return found


def open_regular(file: Path) -> IO[bytes]:
    """Open a file for reading. Raises OSError for a pipe or a device, which could block or never end."""
    kind = file.stat().st_mode
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):  # `open` reports a folder
        raise OSError(errno.EINVAL, "It is a pipe or a device, and no file", str(file))
    return file.open("rb")


def parse(content: bytes) -> Any:
    """Parse a JSON text. Raises ValueError, with a clause that says what is wrong, for anything else.

    Infinities and NaN are accepted here, so that `decoded` can name their fields.
    """
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 at byte {error.start:,}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} at line {error.lineno:,}, column {error.colno:,}") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def decoded(content: type[Content], plain: Any) -> Content:
    """Convert plain data to a dataclass. Raises ValueError, with a clause that names field, value and what is allowed."""
    try:
        found: Content = decode(content, plain)
    except ArgumentError as error:
        raise ValueError(str(error).rstrip(".")) from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    return found
