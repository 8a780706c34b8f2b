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
    monkeypatch.setattr(progress, "_PATIENCE", 0)
    with Progress("thinking") as shown:
        shown._timer.join()
    assert capsys.readouterr().err == "thinking ...\n"


def test_a_terminal_shows_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    for description, total, done, expected in (("first", None, 2000, "first 2.0 kB"), ("later", 10, 5, "later 50%")):
        with Progress(description, total) as shown:
            shown._timer.join()
            shown.advance(done)
            time.sleep(0.3)  # for the bar to be drawn
        assert expected in terminal.getvalue()
