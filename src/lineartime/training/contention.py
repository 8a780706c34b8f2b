"""Detect whether other programs use the cores that the training threads need."""

import time
from collections.abc import Callable
from typing import NamedTuple

from lineartime.host import available_cores, busy_seconds

WINDOW = 5.0
"""Seconds over which the use of the cores is averaged."""
_NOTICEABLE = 0.5
"""Cores that other programs must use in two consecutive windows to be reported; an idle machine stays far below."""


class Usage(NamedTuple):
    """Readings in seconds: wall-clock time, CPU time of this process, CPU time of all programs on the cores it may use."""

    clock: float
    own: float
    all: float


def read_usage() -> Usage | None:
    """Read the usage until now; None if the system does not report it."""
    busy = busy_seconds(available_cores())
    return None if busy is None else Usage(time.perf_counter(), time.process_time(), busy)


class Contention:
    """Watches how many cores other programs use while this process computes with several threads.

    PyTorch divides every operation over its threads and waits for the slowest. If another program takes a core from one thread,
    all threads wait, and several threads can take many times as long as one.

    Args:
        threads: the number of threads of this process.
        processes: the number of processes of the run; with several, which count as other programs, nothing is watched.
        read: reads the usage.
        cores: the number of cores that this process may use.
    """

    def __init__(
        self,
        threads: int,
        processes: int = 1,
        *,
        read: Callable[[], Usage | None] = read_usage,
        cores: int | None = None,
    ) -> None:
        self._threads = threads
        self._read = read
        self._cores = len(available_cores()) if cores is None else cores
        self._before = read() if threads > 1 and processes == 1 else None
        self._in_a_row = 0

    def advice(self) -> str | None:
        """Advice, once, when other programs have taken cores for two windows; otherwise None. Cheap enough for every step."""
        before = self._before
        if before is None or time.perf_counter() - before.clock < WINDOW:
            return None
        now = self._before = self._read()
        if now is None:
            return None
        others = ((now.all - before.all) - (now.own - before.own)) / (now.clock - before.clock)
        taken = others >= _NOTICEABLE and self._threads + others > self._cores
        self._in_a_row = self._in_a_row + 1 if taken else 0
        if self._in_a_row < 2:
            return None
        self._before = None
        return (
            f"Other programs use {others:.1f} of {self._cores} cores, so that {self._threads} threads wait for each other: "
            f"it is probably faster to set threads to {max(1, int(self._cores - others))}."
        )
