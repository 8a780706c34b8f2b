"""Progress of work that takes seconds or hours: a bar after the first second, or without a terminal a line now and then."""

import threading

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from lineartime.screen import SCREEN

_PATIENCE, _PAUSE = 1.0, 20.0  # seconds before anything is shown, and between lines


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
        columns = (TextColumn("{task.description}", markup=False), _Counted(), BarColumn(20), TimeElapsedColumn())
        self._bar = Bar(*columns, console=Console(file=SCREEN), transient=True)
        self._bar.add_task(description, total=total)
        self._task = self._bar.tasks[0]
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if self._bar.live.is_started:
            self._bar.stop()

    def advance(self, count: int) -> None:
        """Add `count` to what is done."""
        self._bar.advance(self._task.id, count)

    def begin(self, description: str) -> None:
        """Go on to something of which nothing is counted."""
        self._task.description, self._task.total, self._task.completed = description, None, 0

    def _show(self) -> None:
        pause = _PATIENCE
        while not self._done.wait(pause):
            if SCREEN.isatty():
                self._bar.start()
                break
            numbers = f" {_Counted().render(self._task)} after {self._task.elapsed:.0f} s" if pause == _PAUSE else ""
            print(f"{self._task.description} ...{numbers}", file=SCREEN, flush=True)
            pause = _PAUSE
