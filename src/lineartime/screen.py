"""The terminal: standard error as a file that never fails, and standard streams that are closed when a program starts.

Messages and progress must not interrupt the work: training continues if the terminal is gone or nobody reads a pipe any more.
"""

import errno
import io
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import ProgressColumn
    from rich.table import Table

_PAUSE = 20.0  # seconds between lines


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
        """Write, ignoring failures."""
        with _ignoring_failures():
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, ignoring failures."""
        with _ignoring_failures():
            sys.stderr.flush()


@contextmanager
def _ignoring_failures() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO):  # nobody reads the terminal or pipe any more
            discard(sys.stderr)
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


def new_table(headers: Sequence[str], left: Collection[str] = (), folded: Collection[str] = (), title: str = "") -> "Table":
    """A rich table: the columns `left` are aligned left, all others right; on a narrow screen, the columns `folded` fold."""
    from rich import box
    from rich.table import Column, Table

    columns = [
        Column(name, justify="left" if name in left else "right", overflow="fold", no_wrap=name not in folded)
        for name in headers
    ]
    return Table(*columns, title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def print_markdown(text: str) -> None:
    """Print Markdown to standard output: laid out on a terminal, and as it is in a file or a pipe."""
    from rich.markdown import Markdown

    if sys.stdout.isatty():
        output_console().print(Markdown(text))
    else:
        print(text, end="")


def progress_bar(*columns: "ProgressColumn") -> "Bar":
    """A progress bar on standard error, where one can be shown. Its console prints lines everywhere."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(file=SCREEN, highlight=False, markup=False, soft_wrap=True)
    in_notebook = console.is_jupyter and find_spec("ipywidgets") is not None  # without it, rich warns and shows no bar
    hidden, together = not (console.is_terminal or in_notebook), sys.stdout is not None and sys.stdout.isatty()
    # On a terminal, output is printed above the bar; in a file or a pipe, it must not be moved to the terminal.
    return Bar(*columns, console=console, disable=hidden, transient=True, redirect_stdout=in_notebook or together)


class Progress:
    """A context manager that shows what is being done, and its share of a `total`, or without one the bytes so far.

    It is a bar, or without a terminal a line now and then.
    """

    def __init__(self, description: str, total: int | None = None) -> None:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

        text = TextColumn("{task.description} {task.fields[done]}", markup=False)
        self._bar = progress_bar(text, BarColumn(20), TimeElapsedColumn())
        self._task = self._bar.add_task(description, total=total, done="")
        self._shown = time.monotonic()

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, count: int) -> None:
        """Add `count` to what is done."""
        from rich.filesize import decimal

        task, completed = self._bar.tasks[0], int(self._bar.tasks[0].completed) + count
        done = f"{completed / task.total:.0%}" if task.total else decimal(completed)
        self._bar.update(self._task, advance=count, done=done)
        if self._bar.disable and time.monotonic() - self._shown > _PAUSE:
            self._shown = time.monotonic()
            print(f"{task.description} ... {done}", file=SCREEN, flush=True)


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
