"""Being asked to end: a flag that the training loop looks at between steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Stop:
    """Whether an interrupt has asked the run to end."""

    requested: bool = False


@contextmanager
def interrupts() -> Iterator[Stop]:
    """Turn Ctrl-C, or a polite request to end, into a flag; a second Ctrl-C acts as always.

    Of polite requests there can be many: to a group of processes, and by torchrun to each of its own.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield stop
        return
    numbers: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.getsignal(number) for number in numbers}

    def request(number: int, _frame: object) -> None:
        stop.requested = True
        if number == signal.SIGINT:
            signal.signal(number, previous[number])

    for number in previous:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
