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


def test_lines_now_and_then_tell_what_is_done(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Progress("thinking") as shown:
        shown.advance(3)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "_PATIENCE", 0)
    monkeypatch.setattr(progress, "_PAUSE", 0.2)
    with Progress("reading", 4) as shown:
        shown.advance(3)
        time.sleep(0.5)
        shown.begin("thinking")
        time.sleep(0.5)
    first, second, *_, last = capsys.readouterr().err.splitlines()
    assert (first, second) == ("reading ...", "reading ... 75% after 0 s")
    assert last.startswith("thinking ...")


def test_a_terminal_shows_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    for description, total, done, expected in (("first", None, 2000, "first 2.0 kB"), ("later", 10, 5, "later 50%")):
        with Progress(description, total) as shown:
            shown.advance(done)
            time.sleep(0.3)  # for the bar to be drawn
        assert expected in terminal.getvalue()
