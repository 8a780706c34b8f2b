"""Progress of work that takes seconds or hours: a bar after the first second, or a line without a terminal."""

import threading
import time
from typing import ClassVar

from rich.console import Console
from rich.errors import LiveError
from rich.filesize import decimal
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from lineartime.screen import SCREEN

_PATIENCE = 1.0  # seconds before a bar appears
_PAUSE = 0.1  # seconds between updates


class Progress:
    """A context manager that shows what is being done, with the bytes read so far or the share of a total.

    The display appears after a second, even if nothing is counted. Nested displays have lines of their own.

    Args:
        description: what is being done.
        total: the total of what is counted; None to count bytes, whose total is unknown.
    """

    _lock: ClassVar[threading.RLock] = threading.RLock()
    _bar: ClassVar[Bar | None] = None  # the bar on the screen, shared by all instances
    _in_bar: ClassVar[int] = 0

    def __init__(self, description: str, total: int | None = None) -> None:
        self._description = description
        self._total = total
        self._start = self._updated = time.monotonic()
        self._done = 0
        self._task: TaskID | None = None
        self._ended = False
        self._timer = threading.Timer(_PATIENCE, self._appear)
        self._timer.daemon = True

    def __enter__(self) -> "Progress":
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._ended = True
            if self._task is None or Progress._bar is None:
                return
            Progress._bar.remove_task(self._task)
            Progress._in_bar -= 1
            if Progress._in_bar == 0:
                Progress._bar.stop()
                Progress._bar = None

    def advance(self, count: int) -> None:
        """Add `count` to what is done."""
        self._done += count
        now = time.monotonic()
        if self._task is not None and Progress._bar is not None and now - self._updated > _PAUSE:
            self._updated = now
            Progress._bar.update(self._task, description=self._state(now))

    def _appear(self) -> None:
        with self._lock:
            if self._ended:
                return
            if not SCREEN.isatty():
                print(f"{self._description} ...", file=SCREEN, flush=True)
                return
            if Progress._bar is None:
                columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
                bar = Bar(*columns, console=Console(file=SCREEN), transient=True)
                try:
                    bar.start()
                except LiveError:  # the caller shows a bar of their own
                    return
                Progress._bar = bar
            Progress._in_bar += 1
            self._task = Progress._bar.add_task(self._state(time.monotonic()))

    def _state(self, now: float) -> str:
        if self._total is not None:
            return f"{self._description}: {min(self._done / max(1, self._total), 1.0):.0%}"
        if not self._done:
            return self._description
        return f"{self._description}: {decimal(self._done)}, {decimal(round(self._done / max(now - self._start, 1e-3)))}/s"
