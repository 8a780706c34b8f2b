"""Progress: after a second, even if nothing is counted."""

import io
import sys
import time

import pytest

from lineartime.data import progress
from lineartime.data.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_work_is_announced_after_a_while(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Progress("thinking") as shown:
        shown.advance(3)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "_PATIENCE", 0.05)
    with Progress("thinking") as shown:
        shown._timer.join()
    assert capsys.readouterr().err == "thinking ...\n"


def test_a_terminal_shows_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.05)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    with Progress("first") as first:
        first._timer.join()
        first.advance(2000)
        time.sleep(0.3)  # for the bar to be drawn
    with Progress("later", total=10) as later:
        later._timer.join()
        later.advance(5)
        time.sleep(0.3)
    assert "first 2.0 kB" in terminal.getvalue()
    assert "later 50%" in terminal.getvalue()
