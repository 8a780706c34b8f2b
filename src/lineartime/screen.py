"""The terminal: standard error as a file that never fails, and standard streams that are closed when a program starts.

Messages and progress must not interrupt the work: training continues if the terminal is gone or nobody reads a pipe any more.
"""

import errno
import io
import os
import sys
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from rich.console import Console

_GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)
"""The system's errors for a terminal or a pipe that nobody reads any more."""


class _Screen:
    """The current standard error."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        try:
            return bool(sys.stderr.isatty())
        except (AttributeError, ValueError):  # there is none, or it is closed
            return False

    def write(self, text: str) -> int:
        """Write, ignoring failures. Characters that the encoding lacks are written as Python escapes."""
        try:
            self._forgiving(lambda: sys.stderr.write(text))
        except UnicodeEncodeError:
            self._forgiving(lambda: sys.stderr.write(text.encode("ascii", "backslashreplace").decode()))
        return len(text)

    def flush(self) -> None:
        """Flush, ignoring failures."""
        self._forgiving(lambda: sys.stderr.flush())

    @staticmethod
    def _forgiving(action: Any) -> None:
        try:
            action()
        except OSError as error:
            if error.errno in _GONE:
                discard(sys.stderr)
        except UnicodeEncodeError:
            raise
        except (AttributeError, ValueError):  # there is none, or it is closed
            pass


SCREEN = cast("IO[str]", _Screen())
"""Standard error, for messages and progress: writing to it never fails."""


def output_console(**options: Any) -> "Console":
    """A rich console for standard output. If nobody reads it, it raises BrokenPipeError for the command line to handle."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    return Output(highlight=False, **options)


def discard(stream: IO[str]) -> None:
    """Discard what is written to a stream and what it still holds; otherwise, Python reports the failure again at exit."""
    with suppress(OSError, ValueError, AttributeError):  # it is not a file of the system
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def open_standard_streams() -> None:
    """Open those standard streams that were closed when the program started, and let none fail on a character.

    Otherwise, the next files to be opened, such as a checkpoint, would get their file descriptors, and what libraries print.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            nowhere = os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8", errors="backslashreplace")
            setattr(sys, name, nowhere)
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
