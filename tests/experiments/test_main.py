"""`python -m lineartime.experiments`, for machines with PyTorch and little else."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from lineartime.experiments import command
from lineartime.experiments.__main__ import main
from lineartime.experiments.config import ReproduceConfig
from lineartime.experiments.plan import make_plan
from lineartime.experiments.runner import RunsResult
from lineartime.models.registering import VARIABLE

Options = Callable[..., ReproduceConfig]
OWN = """
import lineartime
from lineartime.experiments.catalogue import EXPERIMENTS
from lineartime.baselines.kernel_attention import KernelAttention
from lineartime.training.loop import train

class Own(KernelAttention):
    name = "own"
    def features(self, x):
        return x.relu() + 0.001

lineartime.register_system("own", Own, "mlp")
"""


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lm", "--out", ""], "out is empty: give a path"),
        (["lm", "--compile", "auto"], "compile is auto, which compiles long runs alone, .* use on or off"),
    ],
)
def test_wrong_options_are_one_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    assert re.search(f"error: {message}", capsys.readouterr().err)


def test_a_reader_of_the_list_that_has_seen_enough_is_no_error() -> None:
    script = f"{sys.executable} -m lineartime.experiments --list --scale trial | true"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_run_needs_neither_tyro_nor_datasets_nor_tensorboard(options: Options) -> None:
    plan = make_plan(options())
    job = plan.final_job(plan.contenders[0], "adamw", 0, 1e-3, 2)
    script = """
import sys
for name in ("tyro", "datasets", "tensorboardX", "tokenizers", "pyarrow"):
    sys.modules[name] = None
from lineartime.experiments import __main__, command, worker
sys.exit(worker.main())
"""
    line = json.dumps(asdict(job), default=str) + "\n"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(line)
        process.stdin.flush()  # it stays open: its end would tell the process to stop
        assert process.wait() == 0
    assert json.loads((job.folder / "outcome.json").read_text())["tests"][0]["bits_per_byte"] > 0


@pytest.mark.usefixtures("only_systems_of_the_library_afterwards", "tiny")
def test_it_imports_modules_of_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    assert main(["lm", "--scale", "trial", "--list", "--add", "own", "--systems", "own", "--import", "own.py"]) == 0
    assert "own-tiny" in capsys.readouterr().out
    assert os.environ[VARIABLE] == str(tmp_path / "own.py")  # so that the processes of runs import it, too
