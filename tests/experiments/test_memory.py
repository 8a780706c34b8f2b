"""Tasks for a long memory from the command to the report: runs, interruptions, other lengths later, wrong input."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lineartime import cli
from lineartime.errors import ArgumentError
from lineartime.experiments import worker
from lineartime.experiments.catalogue import Job
from lineartime.experiments.command import reproduce
from lineartime.experiments.config import ReproduceConfig
from lineartime.experiments.plan import make_plan, with_saved_options
from lineartime.experiments.report import write_report
from lineartime.experiments.runner import RunsResult, read_run, run_all
from lineartime.experiments.worker import TaskTrainer
from lineartime.runs.metrics import read_metrics

Options = Callable[..., ReproduceConfig]
Do = Callable[[Job], int]
TWO = ("flash", "transformer++")


def ignore(_: str) -> None:
    pass


def losses(folder: Path) -> list[tuple[float, ...]]:
    names = ("step", "loss", "validation_loss", "validation_accuracy")
    return [tuple(line.get(name, -1.0) for name in names) for line in read_metrics(folder)]


def test_every_task_is_trained_and_reported(options: Options, here: Do, done: list[str]) -> None:
    tasks = ("recall", "copying", "induction", "selective-copying", "needle")
    plan = make_plan(options("memory", tasks=tasks, systems=TWO, longer=(2,), steps=8))
    assert [str(each) for each in plan.settings][:2] == ["recall, 64 tokens, 4 to remember", "copying, 64 tokens"]
    assert run_all(plan, ignore, here) == RunsResult()
    assert done == ["memory"] * 5 * 2
    file, report, notes = write_report(plan)
    assert (notes, report["problems"]) == ([], [])
    assert {path.name for path in plan.folder.glob("*.png")} == {"lengths.png", "states.png", "longer.png"}
    for setting in report["settings"]:
        for row in setting["rows"][:: len(setting["rows"]) - 1]:  # flash and transformer++
            assert [run["state"] for run in row["runs"]] == ["finished"]
            assert [point[0] for point in row["runs"][0]["curve"]] == [2, 4, 6, 8]
            assert all(0 <= test["accuracy"] <= 1 for run in row["runs"] for test in run["tests"])
            assert (row["state_bytes"] or 0) > 0
            assert min(row["step_seconds"] or 0, row["decode_seconds"] or 0) > 0
    text = file.read_text()
    assert "before the needle" in text
    assert "| at 2 times the length |" in text
    assert not list(plan.folder.rglob("progress.safetensors"))
    flash, transformer = (report["settings"][1]["rows"][place] for place in (0, -1))
    assert (flash["state_bytes"] or 0) < (transformer["state_bytes"] or 0)


def test_the_best_rate_of_a_system_is_shown_with_all_its_seeds(options: Options, here: Do) -> None:
    values: dict[str, Any] = {"tasks": ("induction",), "systems": ("flash",), "steps": 4}
    plan = make_plan(options("memory", **values, seeds=2, rates=(1e-3, 1e-2)))
    assert run_all(plan, ignore, here) == RunsResult()
    row = write_report(make_plan(with_saved_options(options("memory", **values))))[1]["settings"][0]["rows"][0]
    assert [run["seed"] for run in row["runs"]] == [0, 1]
    accuracies = {
        f"{rate:g}": sum(
            point.accuracy or 0
            for seed in (0, 1)
            for point in read_run(plan.memory_job(plan.candidates[0], rate, seed)).points[-1:]
        )
        / 2
        for rate in plan.config.rates
    }
    assert row["grid"]["adamw"] == accuracies
    assert accuracies[f"{row['rate']:g}"] == max(accuracies.values())


@pytest.mark.parametrize("kill", [False, True])
def test_an_interrupted_run_ends_as_if_it_had_not_been(
    options: Options, here: Do, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kill: bool
) -> None:
    values: dict[str, Any] = {"tasks": ("recall",), "systems": ("flash",), "steps": 8}
    plan = make_plan(options("memory", **values))
    take = TaskTrainer.take_step

    def take_and_stop(self: TaskTrainer, step: int) -> dict[str, float]:
        if step == 4 and kill:
            raise OSError("killed")
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return take(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(TaskTrainer, "take_step", take_and_stop)
        assert run_all(plan, ignore, here).interrupted is not kill
    job = plan.memory_job(plan.candidates[0], 3e-3, 0)
    assert read_run(job).state == "interrupted"
    assert run_all(plan, ignore, here) == RunsResult()
    whole = make_plan(replace(options("memory", **values), out=tmp_path / "whole"))
    assert run_all(whole, ignore, here) == RunsResult()
    other = whole.memory_job(whole.candidates[0], 3e-3, 0)
    assert losses(job.folder) == losses(other.folder)
    assert read_run(job).outcome.tests == read_run(other).outcome.tests


def test_other_lengths_join_the_report_and_nothing_is_repeated(options: Options, here: Do, done: list[str]) -> None:
    shared: dict[str, Any] = {"tasks": ("recall",), "systems": ("flash",), "steps": 2}
    for lengths, pairs in (((32,), (2,)), ((64,), (2, 8)), ((32, 64), (2,))):
        plan = make_plan(with_saved_options(options("memory", **shared, lengths=lengths, pairs=pairs)))
        assert run_all(plan, ignore, here) == RunsResult()
    assert len(done) == 3
    file, report, _ = write_report(
        make_plan(with_saved_options(options("memory", tasks=("recall",), lengths=(32,), pairs=(2,))))
    )
    assert [each["label"] for each in report["settings"]] == ["recall-32-2", "recall-64-2", "recall-64-8"]
    assert "--tasks recall --lengths 32 64 --pairs 2 8" in file.read_text()
    with pytest.raises(ArgumentError, match=r"steps is 3, but the runs in .* were made with 2: use that, or give another"):
        reproduce(options("memory", steps=3))


def test_a_system_and_its_options_join_by_name(options: Options, here: Do) -> None:
    plan = make_plan(
        options(
            "memory", add=("linear-elu", "flash:chunk_size=8"), tasks=("copying",), systems=("flash:chunk_size=8",), steps=2
        )
    )
    assert run_all(plan, ignore, here) == RunsResult()
    assert plan.candidates[-1].model.mixer.options["chunk_size"] == 8
    states = [row["runs"][0]["state"] for row in write_report(plan)[1]["settings"][0]["rows"]]
    assert (states[-1], set(states[:-1])) == ("finished", {"missing"})


def test_seconds_of_training_decide_the_steps(options: Options, here: Do, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "step_seconds", lambda *_: 0.01)
    plan = make_plan(options("memory", tasks=("induction",), systems=("flash",), budget=0.07))
    assert run_all(plan, ignore, here) == RunsResult()
    assert read_run(plan.memory_job(plan.candidates[0], 3e-3, 0)).options["steps"] == 7


def test_a_run_that_diverges_is_told(options: Options, here: Do) -> None:
    plan = make_plan(options("memory", tasks=("recall",), systems=("flash",), rates=(1e30,), steps=8))
    [problem] = run_all(plan, ignore, here).problems
    assert "recall-64-4/flash/rate-1e+30-seed-0 failed: The loss became" in problem
    assert "a lower rate helps" in write_report(plan)[0].read_text()


def test_wrong_input_is_answered_with_one_sentence(
    options: Options, here: Do, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, values, message in (
        ("memory", {"lengths": (63,)}, "lengths has 63, but must be an even number of at least 16 for recall of 4"),
        ("memory", {"lengths": (64,), "pairs": (32,)}, "lengths has 64, but must be an even number of at least 128 for recall"),
        ("memory", {"optimizers": ("adamw", "adamw")}, "optimizers is adamw adamw, but this experiment uses one"),
        ("memory", {"scale": "paper"}, "name is memory, which the paper does not contain: use another scale"),
        ("lm", {"tasks": ("recall",)}, "tasks is recall, but only the experiment memory has that: leave it out"),
        ("lm", {"steps": 5}, "steps is 5, but only the experiment memory has that"),
    ):
        with pytest.raises(ArgumentError, match=message):
            make_plan(options(name, **values))
    short = tmp_path / "short.txt"
    short.write_text("a short text\n" * 40)
    plan = make_plan(options("memory", tasks=("needle",), lengths=(4096,), systems=("flash",), steps=2, data=(str(short),)))
    [problem] = run_all(plan, ignore, here).problems
    assert "fewer than a text of 4,096: give more text, or smaller `lengths`" in problem
    arguments = ["memory", "--scale", "trial", "--tasks", "recal"]
    with pytest.raises(SystemExit):
        cli.main(["reproduce", *arguments])
    assert "recall" in capsys.readouterr().err


def test_list_has_the_steps_of_a_run(options: Options, capsys: pytest.CaptureFixture[str]) -> None:
    reproduce(options("memory", list=True, systems=("flash",)))
    shown = capsys.readouterr().out
    assert "selective-copying, 64 tokens, 4 to remember\n  flash" in shown
    assert shown.count("1 run of 20 steps of 128 tokens") == 4
    assert "0 of 4 have ended" in shown
