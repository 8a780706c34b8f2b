"""`lineartime eval`."""

import json
import re
import shutil
from pathlib import Path

import pytest

from lineartime.cli import main

from .conftest import Fails, Prints


@pytest.fixture
def measured(folder: Path, prints: Prints) -> Prints:
    """`measured(run)`: what `eval` prints of it."""
    return lambda *arguments: prints("eval", *arguments, "--cache", folder / "cache")


def test_eval_prints_all_measures(folder: Path, measured: Prints) -> None:
    for context in ("windowed", "carried"):
        shown = measured(folder / "run", "--context", context)
        for words in ("the test split of", "computed on cpu, ", "run 1: ", context.rstrip("ed")):
            assert words in shown
        rows = re.findall(r"^ +([a-z].*?)  +\d[\d.e+]*(?: ± \d\.\d{4})? *$", shown, re.MULTILINE)
        assert rows[:4] == ["nats per token", "bits per byte", "perplexity per token", "perplexity per word"]
    assert "24 tokens read at a time" in shown  # of the carried context
    assert "nats, 16 to 31 tokens read" in rows


def test_eval_takes_other_text_and_another_split(folder: Path, tmp_path: Path, measured: Prints) -> None:
    (tmp_path / "other.txt").write_text("something else\n" * 100)
    other = ["--data", "other.txt", "--split", "train", "--max-tokens", 100, "--context-length", 10, "--stride", 5]
    shown = measured(folder / "run", *other)
    for words in ("the train split of", "100 tokens", "windows of 10 tokens, one every 5, the last 5 tokens of each counted"):
        assert words in shown


def test_another_checkpoint_than_the_best_can_be_chosen(folder: Path, measured: Prints, fails: Fails) -> None:
    run = str(folder / "run")
    for which, step in (("best", 4), ("last", 4), (2, 2)):
        assert f"step-0000000{step}\n" in measured(run, "--checkpoint", which)
    for command in ("eval", "generate"):
        fails([command, run, "--checkpoint", "3"], "--checkpoint is 3, but must be best, last, or the step .*, which has 2, 4")
        fails([command, f"{run}/step-00000004", "--checkpoint", "last"], "--checkpoint is last, but .* is a checkpoint itself")


def test_masked_model_is_measured_and_cannot_generate(masked: str, measured: Prints, fails: Fails) -> None:
    assert " per masked token" in measured(masked)
    fails(["generate", masked], "model is a masked language model, which cannot generate: train one with `task=.?clm")


def test_several_runs_are_compared_window_by_window(folder: Path, measured: Prints) -> None:
    both = folder / "run", folder / "run" / "step-00000002"
    shown = measured(*both)
    assert shown.count("the test split of") == 1  # the same text and windows
    trained, untrained = re.findall(
        r"nats per token +(\d\.\d{4}) ± \d\.\d{4} +(\d\.\d{4}) ± \d\.\d{4} *$", shown, re.MULTILINE
    )[0]
    [apart] = re.findall(r"nats above run 1 +- +(\+\d\.\d{4}) ± \d\.\d{4} *$", shown, re.MULTILINE)
    assert re.search(r"nats, 16 to 24 tokens read +\d\.\d{4} ± \d\.\d{4} +\d\.\d{4} ± ", shown)  # the losses of both
    assert float(apart) == pytest.approx(float(untrained) - float(trained), abs=2e-4)
    first, last = map(json.loads, measured(*both, "--json").splitlines())
    assert "difference_from_first" not in first
    assert last["difference_from_first"]["loss"] == pytest.approx(last["loss"] - first["loss"])


def test_measured_runs_are_shown_if_a_later_one_fails(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder / "run" / "step-00000002", tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"\0" * 64)
    assert main(["eval", str(folder / "run"), "damaged", "--cache", str(folder / "cache")]) == 1
    shown = capsys.readouterr()
    assert re.search(r"nats per token +\d\.\d{4} ± \d\.\d{4} *$", shown.out, re.MULTILINE)
    assert "damaged" in shown.err
