"""Requests to stop: between steps, the training loop checks for a signal and for the end of its time."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lineartime.host import stop_signals


@dataclass
class Stop:
    """Whether a signal has asked the run to stop, or its deadline has passed, a time of `time.monotonic`."""

    signalled: bool = False
    deadline: float = math.inf

    @property
    def requested(self) -> bool:
        """Whether the run has to stop."""
        return self.signalled or self.is_late

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.deadline


@contextmanager
def interrupts(alone: bool, seconds: float = math.inf) -> Iterator[Stop]:
    """Turn SIGINT (Ctrl-C), SIGTERM, SIGHUP (a closed terminal) and the end of `seconds` into a request to stop.

    If the process is `alone`, a second SIGINT acts as usual. Otherwise, a signal may arrive many times, because it is sent to
    the process group and torchrun also forwards it to each of its processes.
    """
    stop = Stop(deadline=time.monotonic() + seconds)
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield stop
        return
    previous = {number: signal.getsignal(number) for number in stop_signals()}

    def request(number: int, _frame: object) -> None:
        stop.signalled = True
        if alone and number == signal.SIGINT:
            signal.signal(number, previous[number])

    for number in previous:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
