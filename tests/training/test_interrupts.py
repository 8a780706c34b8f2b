"""Requests to stop a run."""

import os
import signal
import time

import pytest

from lineartime.training.loop import interrupts


def test_second_interrupt_of_a_process_that_is_alone_acts_as_usual() -> None:
    with interrupts(alone=True) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_end_of_the_terminal_asks_a_run_to_stop_unless_it_was_started_to_outlive_it() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with interrupts(alone=True) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.requested
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        with interrupts(alone=True) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_one_of_several_processes_may_get_any_number_of_interrupts_before_it_has_saved() -> None:
    with interrupts(alone=False) as stop:
        for number in 2 * (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert stop.requested


def test_end_of_its_time_asks_a_run_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with interrupts(alone=True, seconds=60) as stop:
        now += 59.9
        assert not stop.requested
        now += 0.2
        assert stop.requested
        assert stop.is_late
        assert not stop.signalled
    with interrupts(alone=True) as stop:
        now += 1e9
        assert not stop.requested
