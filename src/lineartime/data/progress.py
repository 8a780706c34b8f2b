"""Progress of work that takes seconds or hours: a bar after the first second, or a line without a terminal."""

import threading

from rich.console import Console
from rich.filesize import decimal
from rich.progress import Progress as Bar
from rich.progress import ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from lineartime.screen import SCREEN

_PATIENCE = 1.0  # seconds before anything is shown


class _Counted(ProgressColumn):
    """The share of a total, or the bytes so far; nothing if nothing is counted."""

    def render(self, task: Task) -> Text:
        if task.total is not None:
            return Text(f"{task.percentage / 100:.0%}")
        return Text(f"{decimal(int(task.completed))}, {decimal(int(task.speed or 0))}/s" if task.completed else "")


class Progress:
    """A context manager that shows what is being done, one thing at a time.

    Args:
        description: what is being done.
        total: the total of what is counted; None to count bytes, whose total is unknown, or nothing.
    """

    def __init__(self, description: str, total: int | None = None) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), _Counted(), TimeElapsedColumn())
        self._bar = Bar(*columns, console=Console(file=SCREEN), transient=True)
        self._task = self._bar.add_task(description, total=total)
        self._description = description
        self._timer = threading.Timer(_PATIENCE, self._appear)
        self._timer.daemon = True

    def __enter__(self) -> "Progress":
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()
        if self._bar.live.is_started:
            self._bar.stop()

    def advance(self, count: int) -> None:
        """Add `count` to what is done."""
        self._bar.advance(self._task, count)

    def _appear(self) -> None:
        if SCREEN.isatty():
            self._bar.start()
        else:
            print(f"{self._description} ...", file=SCREEN, flush=True)
