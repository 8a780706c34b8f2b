"""`lineartime train`: its options in a file, what it leaves, and that no interruption loses it."""

import json
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import lineartime
from lineartime.checkpoint import last_checkpoint, list_checkpoints
from lineartime.cli import main
from lineartime.cli.train import read_options, to_toml
from lineartime.errors import LineartimeError
from lineartime.training.config import TrainConfig

from .conftest import COMMAND, Fails, Fork, Prints

OPTIONS = TrainConfig(preset="gau-tiny", context_length=24, learning_rate=0.002, override=("d_model=16", "n_blocks=1"))
TEXTS = {
    "run.toml": 'preset = "gau-tiny"\ncontext-length = 24\nlearning_rate = 2e-3\noverride = ["d_model=16", "n_blocks=1"]\n',
    "run.yaml": "model: gau-tiny\ncontext: 24\nlearning-rate: 2e-3\noverride:\n  - d_model=16\n  - n_blocks=1\n",
    "run.json": '{"preset": "gau-tiny", "context_length": 24, "learning-rate": 2e-3, "override": ["d_model=16", "n_blocks=1"]}',
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
        ("a.json", '{"stepps": 3}', r"a.json: stepps is not a field here \(did you mean steps\?\)"),
        ("a.json", '{"model": "flash-tiny", "preset": "gau-tiny"}', "a.json has an option twice, under two names"),
        ("a.json", '{"steps": "many"}', "a.json: steps is 'many', but must be an integer"),
        ("a.json", '{"steps": 0}', "a.json: steps is 0, but must be at least 1"),
        ("a.txt", "steps = 3", "a.txt has the suffix '.txt': options are read from .toml, .yaml or .json"),
    ],
)
def test_file_that_holds_no_options_is_named(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(LineartimeError, match=message):
        read_options(tmp_path / name)


def test_command_line_wins_over_a_file_and_a_file_over_a_recipe(tmp_path: Path, prints: Prints) -> None:
    def printed(*arguments: str) -> dict[str, Any]:
        lines = [line.partition(" =") for line in prints("train", *arguments, "--print-config").splitlines()]
        return {name.removeprefix("# "): json.loads(value) if value else None for name, _, value in lines}

    file = tmp_path / "run.json"
    file.write_text('{"recipe": "quick", "steps": 7, "learning_rate": 0.1, "data": ["README.md"]}')
    found = printed("--config", str(file), "--learning-rate", "0.2")
    assert (found["preset"], found["optimizer"]) == ("flash-memory-tiny", "muon")  # from the recipe
    assert (found["steps"], found["learning_rate"]) == (7, 0.2)
    assert found["data"].endswith("README.md")
    assert printed("--config", str(file), "--data", "docs")["data"].endswith("docs")
    found = printed("--config", str(file), "--model", "gau-tiny", "--context=64")  # other names of --preset and its kin
    assert (found["preset"], found["context_length"]) == ("gau-tiny", 64)
    file.write_text('{"recipe": "lm-pg19", "preset": "flash-base", "override": ["d_model=32", "n_blocks=2"]}')
    found = printed("--config", str(file), "--override", "n_blocks=1", "dropout=0.1")  # fields of the model alike
    assert found["override"] == ["chunk_size=512", "d_model=32", "n_blocks=1", "dropout=0.1"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 reads no TOML")
def test_printed_options_are_read_back(tmp_path: Path) -> None:
    options = {**TrainConfig(preset="gau-tiny", data=('é "x".txt', "b"), override=("d_model=8",), out=Path("runs/ü")).to_dict()}
    (tmp_path / "run.toml").write_text(to_toml(options))
    assert TrainConfig(**read_options(tmp_path / "run.toml")).to_dict() == options


def test_all_commands_name_a_mistake_in_the_data_in_the_same_words(folder: Path, tmp_path: Path, fails: Fails) -> None:
    for command in (["train"], ["eval", str(folder / "run")], ["tokenize"]):
        message = "error: --data is missing.txt, which is neither a file or folder nor the name of a corpus: c4,"
        fails([*command, "--data", "missing.txt"], message)
    (tmp_path / "body.jsonl").write_text('{"body": "a"}\n' * 40)
    message = "--text-column is text, but .*body.jsonl, line 1, has the columns body: name the one"
    fails(["train", "--out", str(tmp_path / "run"), "--data", "body.jsonl"], message)


def test_texts_that_are_given_replace_those_of_a_recipe(folder: Path, tmp_path: Path, options: list[str], fails: Fails) -> None:
    (tmp_path / "a.txt").write_text((folder / "text.txt").read_text())
    data = ["--data", "a.txt", "--data", str(folder / "text.txt")]
    small = [*options[: options.index("--data")], "--cache", str(folder / "cache"), "--eval-windows", "2", "--steps", "1"]
    recipe = ["--recipe", "lm-wiki40b", "--tokenizer", "bytes", "--tokens-per-batch", "48", "--warmup-steps", "0"]
    assert main(["train", *small, *data, *recipe, "--out", "run"]) == 0
    both = [str(tmp_path / "a.txt"), str(folder / "text.txt")]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["options"]["data"] == both
    fails(["train", "--resume", "--out", "run", "--data", "a.txt"], "The text of the run in run has changed")


def test_resumed_run_takes_options_of_the_machine_even_if_they_are_the_defaults(tmp_path: Path, options: list[str]) -> None:
    run = str(tmp_path / "run")
    given = ["--recompute", "--max-skipped", "3", "--parallel", "fsdp"]
    assert main(["train", *options, "--out", run, "--steps", "1", *given]) == 0
    asked = ["--no-recompute", "--max-skipped", "10", "--parallel", "ddp"]  # the defaults
    assert main(["train", "--out", run, "--resume", *asked]) == 0
    changed = json.loads((tmp_path / "run" / "run.json").read_text())["processes"][1]["changed_options"]
    expected = {"recompute": False, "max_skipped": 10, "parallel": "ddp"}
    assert {name: changed.get(name) for name in expected} == expected


@pytest.mark.slow
def test_killed_at_any_moment_a_run_can_be_loaded_and_resumed(tmp_path: Path, options: list[str], fork: Fork) -> None:
    run = tmp_path / "run"
    arguments = ["train", *options, "--out", str(run), "--steps", "100000", "--eval-every", "1"]

    def wait_for_a_checkpoint(process: Any, before: list[Path]) -> None:
        deadline = time.monotonic() + 120
        while list_checkpoints(run)[-1:] == before[-1:]:
            assert process.is_running, process.output
            assert time.monotonic() < deadline, process.output
            time.sleep(0.01)

    for kill in range(3):
        before = list_checkpoints(run)
        process = fork(COMMAND.format([*arguments, *(["--resume"] if kill else [])]))
        wait_for_a_checkpoint(process, before)
        time.sleep(0.13 * kill)  # another moment each time
        process.kill()
        assert lineartime.load(run).config.d_model == 16
        assert lineartime.load(last_checkpoint(run))
    before = list_checkpoints(run)
    process = fork(COMMAND.format(["train", "--out", str(run), "--resume"]))
    wait_for_a_checkpoint(process, before)
    process.send(signal.SIGTERM)
    assert process.wait(60) == 0, process.output
    assert f"lineartime train --resume --out {run}" in process.output
    steps = [int(step) for step in re.findall(r'"step": (\d+), "loss"', (run / "metrics.jsonl").read_text())]
    assert steps == list(range(1, len(steps) + 1))  # no step is missing, none is there twice


@pytest.mark.slow
def test_disk_that_is_full_ends_in_a_sentence_and_leaves_the_last_good_checkpoint(
    tmp_path: Path, options: list[str], fork: Fork
) -> None:
    run = tmp_path / "run"
    assert main(["train", *options, "--out", str(run), "--steps", "1"]) == 0
    good = last_checkpoint(run)
    # No file may grow beyond 20 kB, as if there were no space for more.
    fill_the_disk = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
    process = fork(fill_the_disk + COMMAND.format(["train", *options, "--out", str(tmp_path / "other"), "--steps", "1"]))
    assert process.wait(60) == 1, process.output
    assert re.search(r"error: Cannot write the checkpoint .*step-00000000", process.output), process.output
    assert "Traceback" not in process.output
    assert lineartime.load(good)
