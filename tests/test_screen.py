"""Progress: a bar on a terminal, and elsewhere a line now and then."""

import io
import sys

import pytest

from lineartime import screen
from lineartime.screen import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_now_and_then_tell_what_is_done(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Progress("thinking") as shown:
        shown.advance(3)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(screen, "_PAUSE", 0)
    with Progress("reading") as shown:
        shown.advance(3)
        shown.advance(2000)
    with Progress("measuring", 4) as shown:
        shown.advance(3)
    assert capsys.readouterr().err.splitlines() == ["reading ... 3 bytes", "reading ... 2.0 kB", "measuring ... 75%"]


def test_a_terminal_shows_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    with Progress("encoding") as shown:
        shown.advance(2000)
    assert "encoding 2.0 kB" in terminal.getvalue()


def test_output_to_a_file_stays_out_of_the_terminal_with_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setattr(sys, "stdout", file := io.StringIO())
    with Progress("counting"):
        print("a result")
    assert (file.getvalue(), "a result" in terminal.getvalue()) == ("a result\n", False)
    monkeypatch.setattr(sys, "stdout", terminal)
    with Progress("counting"):
        print("a result")
    assert "a result" in terminal.getvalue()
