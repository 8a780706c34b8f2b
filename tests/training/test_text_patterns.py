"""The patterns that choose the files of a run's text."""

from pathlib import Path
from typing import Any

import pytest

import lineartime
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.runs.record import read_record

SMALL: dict[str, Any] = {
    "override": {"d_model": 16, "n_blocks": 1, "d_qk": 8, "chunk_size": 8},
    "context_length": 16,
    "eval_windows": 2,
    "steps": 2,
    "compile": "off",
}


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for folder, suffix in (("one", "py"), ("one", "md"), ("two", "md")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"text.{suffix}").write_text(f"a text in {suffix}, to learn\n" * 200)
    return tmp_path


def test_resuming_and_evaluating_read_the_files_of_training(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own: dict[str, Any] = {**SMALL, "cache": folders / "cache", "out": folders / "run"}
    lineartime.train(**own, data=folders / "one", include=["*.py"], max_time=1e-6)
    lineartime.train(out=folders / "run", resume=True, max_time=9)
    lineartime.evaluate(folders / "run", split="all", cache=folders / "cache", say=print)
    shown = capsys.readouterr()
    assert "text.md" not in shown.err + shown.out
    assert shown.err.count("90% of text.py") == 2
    assert read_record(folders / "run").options["include"] == ["*.py"]


def test_a_run_like_another_on_other_text_does_not_take_its_patterns(folders: Path) -> None:
    own: dict[str, Any] = {**SMALL, "cache": folders / "cache"}
    lineartime.train(**own, data=folders / "one", include=["*.py"], out=folders / "run")
    again = lineartime.train(like=folders / "run", out=folders / "again")
    other = lineartime.train(like=folders / "run", data=folders / "two", out=folders / "other")
    assert [read_record(result.run).options["include"] for result in (again, other)] == [["*.py"], []]
    with pytest.raises(ArgumentError, match=r"holds no text with these patterns"):
        lineartime.train(like=folders / "run", data=folders / "two", include=["*.rs"], out=folders / "none")


def test_a_test_split_that_cannot_be_read_is_told_before_training(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"a line of text\n" * 400 + b"caf\xe9 au lait\n")
    with pytest.raises(LineartimeError, match=r"text.txt is not UTF-8 text \(byte 0xe9 at offset 6003\)"):
        lineartime.train(**SMALL, data=text, cache=tmp_path / "cache", out=tmp_path / "run")
    assert not list((tmp_path / "run").glob("step-*"))
