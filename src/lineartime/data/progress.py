"""Progress of work that takes seconds or hours: a bar after the first second, or a line if there is no terminal."""

import sys
import time

from rich.console import Console
from rich.filesize import decimal
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

_PATIENCE = 1.0  # seconds without a bar


class Progress:
    """Shows how many bytes of text have been read; the total is unknown."""

    def __init__(self, description: str) -> None:
        self._description = description
        self._start = time.monotonic()
        self._shown = self._start
        self._bytes = 0
        self._bar: Bar | None = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, n_bytes: int) -> None:
        """Count `n_bytes` more."""
        self._bytes += n_bytes
        now = time.monotonic()
        if now - self._shown < _PATIENCE:
            return
        first, self._shown = self._shown == self._start, now
        if not sys.stderr.isatty():
            if first:
                print(f"{self._description} ...", file=sys.stderr, flush=True)
            return
        if self._bar is None:
            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task("")
            self._bar.start()
        speed = decimal(round(self._bytes / (now - self._start)))
        self._bar.update(self._bar.task_ids[0], description=f"{self._description}: {decimal(self._bytes)}, {speed}/s")
