"""Progress: after a second, even if nothing is counted, and one within another."""

import io
import sys
import time

import pytest

from lineartime.data import progress
from lineartime.data.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.05)
    monkeypatch.setattr(progress, "_PAUSE", 0.0)


def test_work_that_counts_nothing_is_announced_after_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("thinking") as shown:
        shown._timer.join()
    assert capsys.readouterr().err == "thinking ...\n"


def test_work_that_has_ended_is_not_announced(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("thinking") as shown:
        shown.advance(3)
    shown._appear()  # as a timer that is late
    assert capsys.readouterr().err == ""


def test_work_within_work_shares_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    with Progress("outer") as outer:
        outer._timer.join()
        with Progress("inner", total=10) as inner:
            inner._timer.join()
            inner.advance(5)
            outer.advance(2000)
            assert Progress._in_bar == 2
            time.sleep(0.3)  # for the bar to be drawn
        assert Progress._in_bar == 1
    assert (Progress._bar, Progress._in_bar) == (None, 0)
    shown = terminal.getvalue()
    assert "inner: 50%" in shown
    assert "outer: 2.0 kB" in shown
