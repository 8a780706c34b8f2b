"""`lineartime eval`."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lineartime.checkpoint import best_checkpoint
from lineartime.cli import main

Fails = Callable[..., None]


def test_eval_prints_all_measures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for context in ("windowed", "carried"):
        assert main(["eval", str(folder / "run"), "--context", context, "--cache", str(folder / "cache")]) == 0
        shown = capsys.readouterr().out
        for word in (
            "the test split of",
            "nats per token",
            "bits per byte",
            "perplexity",
            "per word",
            "loss by position",
            context.rstrip("ed"),
        ):
            assert word in shown
    assert re.search(r"│ +16 to 31 │ +\d\.\d{4} │ +\d+ │", shown)


def test_eval_prints_json_for_other_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(folder / "run"), "--json", "--cache", str(folder / "cache")]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert sum(position["count"] for position in result["by_position"]) == result["tokens"]


def test_eval_takes_other_text_and_another_split(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = folder / "other.txt"
    other.write_text("something else\n" * 100)
    arguments = ["eval", str(folder / "run"), "--data", str(other), "--split", "train", "--cache", str(folder / "cache")]
    assert main([*arguments, "--max-tokens", "100", "--context-length", "10", "--stride", "5"]) == 0
    shown = capsys.readouterr().out
    assert "the train split of" in shown
    assert "100 tokens" in shown
    assert "windows of 10 tokens, one every 5, the last 5 tokens of each counted" in shown


def test_a_context_longer_than_the_model_reads_ends_in_a_sentence(
    folder: Path, tmp_path: Path, options: list[str], fails: Fails
) -> None:
    arguments = [argument for argument in options if not argument.startswith(("d_qk", "chunk_size"))]
    arguments[arguments.index("n_blocks=1")] = "max_positions=30"
    run = str(tmp_path / "learned")
    assert main(["train", "--preset", "transformer-tiny", *arguments, "--out", run, "--steps", "1"]) == 0
    message = r"There are \d+ tokens in .*, but this model reads at most 30 in one sequence"
    fails(["eval", run, "--context", "carried", "--cache", str(folder / "cache")], message)
    message = "--context-length is 40, but this model reads at most 30 tokens"
    fails(["eval", run, "--context-length", "40", "--cache", str(folder / "cache")], message)
    message = "--max-tokens is 28 after a prompt of 4 tokens, which makes 31 tokens to read, but this model reads at most 30"
    fails(["generate", run, "--prompt", "the ", "--max-tokens", "28", "--temperature", "0"], message)
    assert main(["generate", run, "--prompt", "the ", "--max-tokens", "27", "--temperature", "0"]) == 0


def test_a_masked_model_cannot_generate_or_carry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], fails: Fails
) -> None:
    run = str(tmp_path / "run")
    assert main(["train", *options, "--out", run, "--steps", "1", "--task", "mlm"]) == 0
    assert main(["eval", run]) == 0
    assert " per masked token" in capsys.readouterr().out
    fails(["generate", run], "model is a masked language model, which cannot generate: train one with task='clm'")
    fails(["eval", run, "--context", "carried"], "--context is carried, which needs a causal model")


def test_a_damaged_checkpoint_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], fails: Fails
) -> None:
    run = tmp_path / "run"
    assert main(["train", *options, "--out", str(run), "--steps", "1"]) == 0
    file = best_checkpoint(run) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    for arguments in (["eval", str(run)], ["generate", str(run)]):
        fails(arguments, r"The checkpoint .* is damaged \(model.safetensors is not what was written\)")
    assert main(["train", "--out", str(run), "--resume"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "is damaged (model.safetensors is not what was written): resuming from step-00000000." in said
    assert main(["eval", str(run)]) == 0
