"""Experiments of a second: models of a few hundred parameters, two systems, two rates."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lineartime.errors import typed_first_line
from lineartime.experiments import catalogue, runner
from lineartime.experiments.catalogue import Arm, Scale
from lineartime.experiments.config import ReproduceConfig
from lineartime.experiments.plan import Job
from lineartime.experiments.runner import INTERRUPTED
from lineartime.models.systems import Size
from lineartime.training.config import TrainConfig

Options = Callable[..., ReproduceConfig]
Do = Callable[[Job], int]


_SIZE = Size(16, gated_blocks=1, attention_blocks=1, n_heads=2, d_qk=8, chunk_size=16)
TINY = Scale(
    "for tests",
    _SIZE,
    _SIZE,
    tokens_per_batch=128,
    tokens_at_once=128,
    budget=0.1,
    tuning=0.02,
    rates={"adamw": (1e-3, 1e-2), "second": (1e-3, 1e-2)},
    speed_steps=3,
    speed_rounds=2,
    evaluations=4,
    validation_tokens=256,
    test_tokens=512,
)
ARMS = (Arm("flash", "flash", seeds=2), Arm("transformer++", "transformer++"))


@pytest.fixture(scope="module")
def tiny() -> Iterator[None]:
    """Two arms, two rates, and a scale of a second, without the pictures of single runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(catalogue.SCALES, "trial", TINY)
        patch.setattr(catalogue, "OPTIMIZERS", {"adamw": {}})
        for name in ("lm", "mlm"):
            patch.setitem(catalogue.EXPERIMENTS, name, replace(catalogue.EXPERIMENTS[name], arms=ARMS))
        patch.setattr("lineartime.runs.metrics.draw_curve", lambda run: run)
        yield


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and a cache."""
    folder = tmp_path_factory.mktemp("experiments")
    (folder / "text.txt").write_text("".join(f"the square of {i} is {i * i}, and so on.\n" for i in range(400)))
    return folder


def make_options(room: Path, out: Path, name: str, **values: Any) -> ReproduceConfig:
    usual = {"data": (str(room / "text.txt"),), "cache": room / "cache", "precision": "fp32", "device": "cpu"}
    return ReproduceConfig(**{"name": name, "scale": "trial", "out": out, **usual, **values})


@pytest.fixture
def options(tiny: None, room: Path, tmp_path: Path) -> Options:
    """`options("lm")`: options of an experiment, which go to a folder of the test."""
    return lambda name="lm", **values: make_options(room, tmp_path / "out", name, **values)


@pytest.fixture
def done() -> list[str]:
    """The kinds of the jobs that `here` and `pretended` have done."""
    return []


@pytest.fixture
def here(done: list[str], monkeypatch: pytest.MonkeyPatch) -> Do:
    """Do each job in this process, which takes no time to start."""

    def do(job: Job) -> int:
        done.append(job.kind)
        return perform(job)

    monkeypatch.setattr(runner, "in_own_process", do)
    return do


@pytest.fixture
def pretended(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave what a run leaves, without training: the smaller its rate and its seed, the lower its loss."""

    def do(job: Job) -> int:
        done.append(job.kind)
        loss = 2 + job.options["learning_rate"] + job.options["seed"] / 8
        lines = [{"step": step, "loss": 5.0, "tokens_per_second": 4000.0} for step in range(1, job.options["steps"] + 1)]
        bits = None if job.options["task"] == "mlm" else loss / 2
        lines.append(
            {"step": job.options["steps"], "validation_loss": loss} | ({"validation_bits_per_byte": bits} if bits else {})
        )
        tests = [{"name": "", "loss": loss, "bits_per_byte": bits} for _ in job.tests]
        job.folder.mkdir(parents=True)
        record = {"options": TrainConfig.from_dict({**job.options, "out": str(job.folder)}).to_dict(), "processes": []}
        (job.folder / "run.json").write_text(json.dumps(record))
        (job.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (job.folder / "outcome.json").write_text(json.dumps({"kind": job.kind, "tests": tests}))
        return 0

    monkeypatch.setattr(runner, "in_own_process", do)


def perform(job: Job) -> int:
    """Do a job, and end as its process does."""
    try:
        return 0 if runner.perform(job) else INTERRUPTED
    except Exception as error:
        job.folder.mkdir(parents=True, exist_ok=True)
        (job.folder / "log.txt").write_text(f"before\n{typed_first_line(error)}\n")
        return 1
