"""`lineartime eval`."""

import json
import re
import shutil
from pathlib import Path

import pytest

from lineartime.cli import main

from .conftest import Fails


def test_eval_prints_all_measures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for context in ("windowed", "carried"):
        arguments = ["eval", str(folder / "run"), "--context", context, "--cache", str(folder / "cache")]
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        for words in ("the test split of", "computed on cpu, ", "run 1: ", context.rstrip("ed")):
            assert words in shown
        rows = re.findall(r"^ +([a-z].*?)  +\d[\d.e+]*(?: ± \d\.\d{4})? *$", shown, re.MULTILINE)
        assert rows[:4] == ["nats per token", "bits per byte", "perplexity per token", "perplexity per word"]
    assert "24 tokens read at a time" in shown  # of the carried context
    assert "nats, 16 to 31 tokens read" in rows


def test_eval_takes_other_text_and_another_split(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = folder / "other.txt"
    other.write_text("something else\n" * 100)
    arguments = ["eval", str(folder / "run"), "--data", str(other), "--split", "train", "--cache", str(folder / "cache")]
    assert main([*arguments, "--max-tokens", "100", "--context-length", "10", "--stride", "5"]) == 0
    shown = capsys.readouterr().out
    assert "the train split of" in shown
    assert "100 tokens" in shown
    assert "windows of 10 tokens, one every 5, the last 5 tokens of each counted" in shown


def test_another_checkpoint_than_the_best_can_be_chosen(folder: Path, capsys: pytest.CaptureFixture[str], fails: Fails) -> None:
    run = str(folder / "run")
    for which, step in (("best", "4"), ("last", "4"), ("2", "2")):
        assert main(["eval", run, "--checkpoint", which, "--cache", str(folder / "cache")]) == 0
        assert f"step-0000000{step}\n" in capsys.readouterr().out
    for command in ("eval", "generate"):
        fails([command, run, "--checkpoint", "3"], "--checkpoint is 3, but must be best, last, or the step .*, which has 2, 4")
        fails([command, f"{run}/step-00000004", "--checkpoint", "last"], "--checkpoint is last, but .* is a checkpoint itself")


def test_masked_model_is_measured_and_cannot_generate(masked: str, capsys: pytest.CaptureFixture[str], fails: Fails) -> None:
    assert main(["eval", masked]) == 0
    assert " per masked token" in capsys.readouterr().out
    fails(["generate", masked], "model is a masked language model, which cannot generate: train one with `task=.?clm")


def test_several_runs_are_compared_window_by_window(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, last = str(folder / "run"), str(folder / "run" / "step-00000002")
    arguments = ["eval", first, last, "--cache", str(folder / "cache")]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert shown.count("the test split of") == 1  # the same text and windows
    trained, untrained = re.findall(
        r"nats per token +(\d\.\d{4}) ± \d\.\d{4} +(\d\.\d{4}) ± \d\.\d{4} *$", shown, re.MULTILINE
    )[0]
    [apart] = re.findall(r"nats above run 1 +- +(\+\d\.\d{4}) ± \d\.\d{4} *$", shown, re.MULTILINE)
    assert re.search(r"nats, 16 to 24 tokens read +\d\.\d{4} ± \d\.\d{4} +\d\.\d{4} ± ", shown)  # the losses of both
    assert float(apart) == pytest.approx(float(untrained) - float(trained), abs=2e-4)
    assert main([*arguments, "--json"]) == 0
    results = list(map(json.loads, capsys.readouterr().out.splitlines()))
    assert "difference_from_first" not in results[0]
    assert results[1]["difference_from_first"]["loss"] == pytest.approx(results[1]["loss"] - results[0]["loss"])


def test_measured_runs_are_shown_if_a_later_one_fails(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder / "run" / "step-00000002", tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"\0" * 64)
    assert main(["eval", str(folder / "run"), str(tmp_path / "damaged"), "--cache", str(folder / "cache")]) == 1
    shown = capsys.readouterr()
    assert re.search(r"nats per token +\d\.\d{4} ± \d\.\d{4} *$", shown.out, re.MULTILINE)
    assert "damaged" in shown.err
