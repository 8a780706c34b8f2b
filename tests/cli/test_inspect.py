"""`lineartime inspect`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lineartime.cli import main

Fails = Callable[..., None]


def test_a_run_is_shown_as_a_page(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder / "run"), "--text", "the square of <b>7</b>"]) == 0
    assert "inspection/index.html: 1 layer," in capsys.readouterr().out
    assert "&lt;" in (tmp_path / "inspection" / "index.html").read_text()
    assert (tmp_path / "inspection" / "layer-01.png").exists()
    text = str(folder / "text.txt")
    assert main(["inspect", str(folder / "run"), "--text-file", text, "--out", "other", "--max-tokens", "24"]) == 0
    assert "more tokens were left out" in capsys.readouterr().out


def test_wrong_options_end_with_a_sentence(folder: Path, fails: Fails) -> None:
    run = str(folder / "run")
    Path("full").mkdir()
    Path("full/file").touch()
    Path("empty").touch()
    fails(["inspect", run], "--text is missing or empty: give a text, or a file with one by --text-file")
    fails(["inspect", run, "--text-file", "empty"], "--text-file is empty, which is empty: give a file with a text")
    fails(["inspect", "nothing", "--text", "a", "--out", "full"], "--out is full, which exists already")  # before it is read
    fails(["inspect", run, "--text", "a", "--max-tokens", "5000"], "--max-tokens is 5000, but must be")
