"""Requests to stop: signals set a flag that the training loop checks between steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Stop:
    """Whether a signal has asked the run to stop."""

    requested: bool = False


@contextmanager
def interrupts(alone: bool) -> Iterator[Stop]:
    """Turn SIGINT (Ctrl-C) and SIGTERM into a flag; if the process is `alone`, a second SIGINT acts as usual.

    Otherwise each may arrive many times: sent to a process group, and passed on by torchrun to each of its processes.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield stop
        return
    numbers: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.getsignal(number) for number in numbers}

    def request(number: int, _frame: object) -> None:
        stop.requested = True
        if alone and number == signal.SIGINT:
            signal.signal(number, previous[number])

    for number in previous:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
