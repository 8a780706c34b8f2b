"""Progress of work that takes seconds or hours: a bar, or without a terminal a line now and then."""

import time

from rich.filesize import decimal
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from lineartime.screen import SCREEN, progress_bar

_PAUSE = 20.0  # seconds between lines


class Progress:
    """A context manager that shows what is being done, and its share of a `total`, or without one the bytes so far."""

    def __init__(self, description: str, total: int | None = None) -> None:
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
        task, completed = self._bar.tasks[0], int(self._bar.tasks[0].completed) + count
        done = f"{completed / task.total:.0%}" if task.total else decimal(completed)
        self._bar.update(self._task, advance=count, done=done)
        if self._bar.disable and time.monotonic() - self._shown > _PAUSE:
            self._shown = time.monotonic()
            print(f"{task.description} ... {done}", file=SCREEN, flush=True)
