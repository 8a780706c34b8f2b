"""Options of `lineartime train` in a file."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lineartime.cli import main
from lineartime.cli.config_file import read_options, to_toml
from lineartime.errors import LineartimeError
from lineartime.training.config import TrainConfig

Fails = Callable[..., None]
OPTIONS = TrainConfig(preset="flash-tiny", context_length=24, learning_rate=0.002, override=("d_model=16", "n_blocks=1"))
TEXTS = {
    "run.toml": 'model = "flash-tiny"\ncontext-length = 24\nlearning_rate = 2e-3\noverride = ["d_model=16", "n_blocks=1"]\n',
    "run.yaml": "model: flash-tiny\ncontext: 24\nlearning-rate: 2e-3\noverride:\n  - d_model=16\n  - n_blocks=1\n",
    "run.json": '{"preset": "flash-tiny", "context": 24, "learning_rate": 2e-3, "override": ["d_model=16", "n_blocks=1"]}',
}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 reads no TOML")
def test_every_format_gives_the_same_options(tmp_path: Path) -> None:
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert TrainConfig(**read_options(tmp_path / name)) == OPTIONS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", "steps: [", "a.yaml cannot be read as YAML: while parsing"),
        ("a.yaml", "- steps", "a.yaml holds a list, but must hold options by name"),
        ("a.json", b"\xff\xfe", "a.json cannot be read as JSON: 'utf-8' codec can't decode"),
        ("a.json", '{"stepps": 3}', r"a.json has the unknown option 'stepps' \(did you mean steps\?\)"),
        ("a.json", '{"model": "flash-tiny", "preset": "flash-tiny"}', "a.json has preset twice, under two names"),
        ("a.txt", "steps = 3", "a.txt has the suffix '.txt': options are read from .toml, .yaml or .json"),
    ],
)
def test_file_that_holds_no_options_is_named(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(LineartimeError, match=message):
        read_options(tmp_path / name)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The options that a command would train with; None for those that are comments."""
    assert main(["train", *arguments, "--print-config"]) == 0
    lines = [line.partition(" =") for line in capsys.readouterr().out.splitlines()]
    return {name.removeprefix("# "): json.loads(value) if value else None for name, _, value in lines}


def test_command_line_wins_over_a_file_and_a_file_over_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"recipe": "quick", "steps": 7, "learning_rate": 0.1, "data": ["README.md"]}')
    found = printed(capsys, "--config", str(file), "--learning-rate", "0.2")
    assert (found["preset"], found["optimizer"]) == ("flash-memory-tiny", "muon")  # from the recipe
    assert (found["steps"], found["learning_rate"]) == (7, 0.2)
    assert found["data"].endswith("README.md")
    assert printed(capsys, "--config", str(file), "--data", "docs")["data"].endswith("docs")
    file.write_text('{"recipe": "lm-pg19", "preset": "flash-base", "override": ["d_model=32", "n_blocks=2"]}')
    found = printed(capsys, "--config", str(file), "--override", "n_blocks=1", "dropout=0.1")  # fields of the model alike
    assert found["override"] == ["chunk_size=512", "d_model=32", "n_blocks=1", "dropout=0.1"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 reads no TOML")
def test_printed_options_are_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {**TrainConfig(preset="gau-tiny", data=('é "x".txt', "b"), override=("d_model=8",), out=Path("runs/ü")).to_dict()}
    (tmp_path / "run.toml").write_text(to_toml(options))
    assert TrainConfig(**read_options(tmp_path / "run.toml")).to_dict() == options


def test_wrong_value_is_named_with_its_file(tmp_path: Path, fails: Fails) -> None:
    file = tmp_path / "run.json"
    for content, message in (
        ('{"steps": "many"}', "run.json: steps is 'many', but must be an integer"),
        ('{"steps": 0}', "run.json: steps is 0, but must be at least 1"),
        ('{"data": ["\\ud800"]}', r"run.json: data\[0\] is '\\ud800', but must be a text that UTF-8 can hold"),
    ):
        file.write_text(content)
        fails(["train", "--config", str(file)], message)


def test_dry_run_tells_what_a_run_takes_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [tmp_path / "run" / name for name in ("step-00000001", ".step-00000002.partial")]  # of a run that is going on
    for other in others:
        other.mkdir(parents=True)
    try_out = ["train", *options, "--steps", "50", "--dry-run", "--out", str(tmp_path / "run")]
    assert main(try_out) == 0
    shown = capsys.readouterr().out
    for part in ("vocabulary of 258", "a step ", "tokens/s", "an evaluation ", "the run ", "a checkpoint ", "memory "):
        assert part in shown
    assert sorted((tmp_path / "run").iterdir()) == sorted(others)
    fails([*try_out, "--context-parallel", "2"], "--context-parallel is 2, but a dry run is one process: leave it out")
    fails([*try_out, "--resume"], "--dry-run tries a new run, and cannot be combined with --resume")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    fails(try_out, "torchrun started 2 processes, but a dry run is one process: leave torchrun")
