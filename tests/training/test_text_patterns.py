"""The patterns that choose the files of a run's text."""

from collections.abc import Callable
from pathlib import Path

import pytest

import lineartime
from lineartime.errors import LineartimeError
from lineartime.runs.record import read_record
from lineartime.training.config import TrainConfig
from lineartime.training.loop import train

MakeConfig = Callable[..., TrainConfig]


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for folder, suffix in (("one", "py"), ("one", "md"), ("two", "md")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"text.{suffix}").write_text(f"a text in {suffix}, to learn\n" * 200)
    return tmp_path


def test_resuming_and_evaluating_read_the_files_of_training(
    folders: Path, config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(config(data=folders / "one", include=["*.py"], max_time=1e-6)).run
    train(out=run, resume=True, max_time=9)
    lineartime.evaluate(run, split="all", cache=folders / "cache", say=print)
    shown = capsys.readouterr()
    assert "text.md" not in shown.err + shown.out
    assert shown.err.count("90% of text.py") == 2
    assert read_record(run).options["include"] == ["*.py"]


def test_a_test_split_that_cannot_be_read_is_told_before_training(tmp_path: Path, config: MakeConfig) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"a line of text\n" * 400 + b"caf\xe9 au lait\n")
    with pytest.raises(LineartimeError, match=r"text.txt is not UTF-8 text \(byte 0xe9 at offset 6003\)"):
        train(config(data=text))
    assert not list((tmp_path / "run").glob("step-*"))
