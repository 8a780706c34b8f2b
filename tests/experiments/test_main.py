"""`python -m lineartime.experiments`, for machines with PyTorch and little else."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lineartime.experiments import command
from lineartime.experiments.__main__ import main
from lineartime.experiments.config import ReproduceConfig
from lineartime.experiments.plan import make_plan
from lineartime.experiments.runner import RunsResult

Options = Callable[..., ReproduceConfig]


def test_it_takes_the_options_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[ReproduceConfig] = []

    def interrupted(config: ReproduceConfig) -> RunsResult:
        asked.append(config)
        return RunsResult(interrupted=True)

    monkeypatch.setattr(command, "reproduce", interrupted)
    arguments = "lm --scale gpu --books a b --contexts 8192 1024 --systems flash --budget 60 --threads 2 --compile off --report"
    assert main([*arguments.split(), "--out", str(tmp_path)]) == 130
    assert "run the same command again to resume" in capsys.readouterr().err
    expected = ReproduceConfig(
        "lm", "gpu", tmp_path, report=True, books=("a", "b"), contexts=(8192, 1024), systems=("flash",), budget=60.0, threads=2
    )
    assert asked == [ReproduceConfig(**{**vars(expected), "compile": "off"})]
    monkeypatch.undo()
    assert main(["lmm"]) == 1
    assert capsys.readouterr().err.startswith("error: name is 'lmm', which is no experiment (did you mean lm")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", ""], "out is empty: give a path"),
        (["--cache", ""], "cache is empty: give a path"),
        (["--compile", "auto"], "compile is auto, which compiles long runs alone, .* use on or off"),
        (["--optimizers", "muon", "--rates", "0.001", "0.0010000001"], "rates is 0.001 0.001, but must be numbers that differ"),
    ],
)
def test_wrong_options_are_one_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lm", *arguments]) == 1
    assert re.search(f"error: {message}", capsys.readouterr().err)


def test_a_reader_of_the_list_that_has_seen_enough_is_no_error() -> None:
    script = f"{sys.executable} -m lineartime.experiments --list --scale trial | true"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_run_needs_neither_tyro_nor_datasets_nor_tensorboard(options: Options, tmp_path: Path) -> None:
    plan = make_plan(options())
    job = plan.final_job(plan.entries[0], "adamw", 0, 1e-3, 2)
    test = {"name": "", "times_context": 2, "chunk_size": None}
    message = {
        "folder": str(tmp_path / "run"),
        "kind": "run",
        "options": dict(job.options),
        "tests": [test],
        "test_tokens": 256,
    }
    script = f"""
import sys
for name in ("tyro", "datasets", "tensorboardX", "tokenizers", "pyarrow"):
    sys.modules[name] = None
from lineartime.experiments import __main__, command, worker
print(worker.perform({message!r}))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "'tests': [{'name': '', 'context_length': 128" in result.stdout, result.stderr
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["tests"][0]["bits_per_byte"] > 0
