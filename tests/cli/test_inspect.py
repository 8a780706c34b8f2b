"""`lineartime inspect`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lineartime.cli import main

Fails = Callable[..., None]


def test_inspect_draws_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder / "run"), "--text", "7 * 7"]) == 0
    short = "The text is no longer than a chunk of 8 tokens, so the global part of FLASH is empty: inspect a longer text."
    assert capsys.readouterr().out == f"inspection.png: 5 tokens. {short}\n"
    assert Path("inspection.png").read_bytes().startswith(b"\x89PNG")
    file = str(folder / "text.txt")
    assert main(["inspect", str(folder / "run"), "--text-file", file, "--out", "new/a.svg", "--max-tokens", "24"]) == 0
    assert "new/a.svg: 24 tokens. " in (said := capsys.readouterr().out)
    assert "more tokens were left out." in said


def test_wrong_options_end_with_a_sentence(folder: Path, fails: Fails) -> None:
    Path("empty").touch()
    fails(["inspect", str(folder / "run")], "--text is missing or empty, but must hold a text, here or in a file")
    fails(["inspect", str(folder / "run"), "--text-file", "empty"], "--text-file is missing or empty")
    fails(["inspect", "nothing", "--text", "a", "--out", "a.txt"], "a.txt has a suffix that is no picture format")  # at once
