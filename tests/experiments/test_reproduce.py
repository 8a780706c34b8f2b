"""The whole path of an experiment: runs, an interruption, the rest of the runs, a report."""

import json
import os
import re
import shutil
import signal
import statistics
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lineartime.checkpoint import list_checkpoints
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.experiments import catalogue, command, runner
from lineartime.experiments.config import ReproduceConfig
from lineartime.experiments.plan import Job, Plan, make_plan, with_device, with_saved_options
from lineartime.experiments.report import collect, write_report
from lineartime.experiments.runner import INTERRUPTED, all_jobs, in_own_process, read_run, run_all
from lineartime.models.systems import register_system
from lineartime.runs.metrics import read_metrics
from lineartime.training.loop import Trainer

from .conftest import Do, Options, make_options, perform
from .test_catalogue import Relu


@dataclass
class Story:
    """An experiment that was interrupted in its first run and then finished: what it did and said, and its reports."""

    out: Path
    done: list[list[str]]
    said: list[str]
    reports: list[tuple[str, dict[str, Any]]]


def folders(plan: Plan) -> list[Path]:
    """The folders of all arms."""
    return [each.folder for candidates in plan.candidates.values() for each in candidates]


@pytest.fixture(scope="module")
def story(tiny: None, room: Path) -> Story:
    plan = make_plan(make_options(room, room / "finished", "lm"))
    found = Story(room / "finished", [[]], [], [])
    take = Trainer.take_step

    def take_and_interrupt(self: Trainer, *arguments: Any) -> bool:
        if self.config.run_directory.name == "seed-0" and self.step == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return take(self, *arguments)

    def do(job: Job) -> int:
        found.done[-1].append(job.name)
        return perform(job)

    def report() -> None:
        file, data = write_report(plan)
        found.reports.append((file.read_text(), data))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "in_own_process", do)
        with patch.context() as first:
            first.setattr(Trainer, "take_step", take_and_interrupt)
            with pytest.raises(KeyboardInterrupt):
                run_all(plan)
        report()
        patch.setattr(runner, "say", found.said.append)
        for _ in range(2):
            found.done.append([])
            assert run_all(plan) == []
        report()
    return found


@pytest.fixture
def finished(story: Story, tmp_path: Path) -> None:
    """Put the runs of the story where `options` say."""
    shutil.copytree(story.out, tmp_path / "out")


def test_interrupted_experiment_resumes_where_it_was(story: Story) -> None:
    first, second, third = story.done
    kinds = [name.rpartition("/")[2].split("-")[-2] for name in first]
    assert kinds == ["speed"] * 4 + ["tune"] * 4 + ["seed"]  # speeds in two rounds, before anything else
    left = ["wikipedia-64/flash/seed-0", "wikipedia-64/transformer++/seed-0", "wikipedia-64/flash/seed-1"]
    assert second == left  # nothing that was finished is done again
    assert third == []
    assert story.said[0].startswith("3 of 11 jobs are left: ")
    assert story.said[1].startswith("resuming wikipedia-64/flash/seed-0")
    record = json.loads((story.out / "lm-trial" / left[0] / "run.json").read_text())
    assert len(record["processes"]) == 2
    assert not any("steps" in process["changed_options"] for process in record["processes"])

    text, report = story.reports[0]
    assert not report["complete"]
    assert sorted(report["missing"]) == sorted([f"{left[0]} (interrupted)", *left[1:]])
    assert "**Not complete.**" in text


def test_report_of_a_finished_experiment_has_everything(story: Story, options: Options, finished: None) -> None:
    text, report = story.reports[1]
    assert (report["complete"], report["missing"], report["problems"]) == (True, [], [])
    assert "Not complete" not in text
    assert "- precision of matrix products: fp32\n" in text
    flash, transformer = report["settings"][0]["rows"]
    assert [run["state"] for run in flash["runs"]] == ["finished"] * 2
    # Both seeds are in the table, as they are in the data.
    assert " / ".join(f"{run['tests'][0]['bits_per_byte']:.4f}" for run in flash["runs"]) in text
    assert flash["rate"] in (0.001, 0.01)
    assert f"**{flash['grid']['adamw'][format(flash['rate'], 'g')]:.4f}**" in text
    assert transformer["speedups"] == [1.0]
    assert transformer["relative_loss"] == 0
    plan = make_plan(options())
    assert (plan.folder / "quality.png").stat().st_size > 10_000
    for folder in folders(plan):  # of tuning, only the numbers are kept; of a run, its last checkpoint too
        assert not list_checkpoints(folder / "adamw-tune-0.001")
        assert len(list_checkpoints(folder / "seed-0")) == 1


def test_systems_read_the_same_batches_for_the_same_time(options: Options, finished: None) -> None:
    plan = make_plan(options())
    runs = [read_run(folder / "seed-0") for folder in folders(plan)]
    texts = [json.loads((list_checkpoints(run.folder)[0] / "training.json").read_text())["text"] for run in runs]
    assert texts[0] == texts[1]
    same = ("tokens_per_batch", "context_length", "data", "seed", "beta2", "weight_decay", "schedule", "warmup_steps")
    first, second = (run.record.options for run in runs)
    assert [first[name] for name in same] == [second[name] for name in same]
    for run, folder in zip(runs, folders(plan), strict=True):
        speeds = [read_run(folder / f"adamw-speed-{number}").speed or 0.0 for number in (0, 1)]
        assert run.record.options["steps"] == max(2, round(0.1 * sum(speeds) / 2 / 128))  # the median of two
    for row in collect(plan)["settings"][0]["rows"]:  # what the machine does during a run does not change its time
        data = row["runs"][0]
        assert data["curve"][-1][:2] == [data["steps"], pytest.approx(data["steps"] * 128 / row["tokens_per_second"])]


def test_run_in_its_own_process_stops_after_its_step(options: Options) -> None:
    plan = make_plan(options())
    speed = next(all_jobs(plan))
    job = replace(speed, kind="run", options={**speed.options, "steps": 1_000_000, "eval_every": 1_000_000})

    def interrupt() -> None:
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline:
            if (job.folder / "metrics.jsonl").exists() and len(read_metrics(job.folder)) > 2:
                break
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert in_own_process(job) == INTERRUPTED
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert read_run(job.folder).state == "interrupted"
    assert list_checkpoints(job.folder)[-1].name == f"step-{int(read_metrics(job.folder)[-1]['step']):08d}"
    assert "Stopped after step" in (job.folder / "log.txt").read_text()


def test_diverged_run_is_told_and_not_repeated(
    options: Options, here: Do, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(options(seeds=1, systems=("flash",)))

    def do(job: Job) -> int:
        diverges = job.kind == "tune" and "0.01" in job.folder.name
        return here(replace(job, options={**job.options, "learning_rate": 1e30, "steps": 40}) if diverges else job)

    monkeypatch.setattr(runner, "in_own_process", do)
    [problem] = run_all(plan)
    assert re.match(r"wikipedia-64/flash/adamw-tune-0.01 failed: .*(loss|its gradient)", problem, re.IGNORECASE)
    file, report = write_report(plan)
    row = report["settings"][0]["rows"][0]
    assert (row["grid"]["adamw"]["0.01"], row["rate"]) == ("failed", 0.001)
    assert "adamw-tune-0.01 failed" in file.read_text()
    count = len(done)
    run_all(plan)
    assert len(done) == count  # it would fail again


def test_run_that_ended_for_another_reason_is_tried_again(
    options: Options, here: None, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(options(seeds=1, systems=("flash",)))
    take = Trainer.take_step

    def full(self: Trainer, *arguments: Any) -> bool:
        if self.config.run_directory.name == "adamw-tune-0.01" and self.step == 1:
            raise LineartimeError("Cannot write x: No space left on device; free some space, then try again.")
        return take(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "take_step", full)
        problems = run_all(plan)
    assert problems == [
        "wikipedia-64/flash/adamw-tune-0.01 ended with an error: Cannot write x: No space left on device; free some space, "
        "then try again.",
        "flash (wikipedia, 64 tokens) has no learning rate: not all of its trials have ended.",
    ]
    with monkeypatch.context() as patch:  # the run is trained, but cannot be tested
        patch.setattr(runner, "evaluate", Mock(side_effect=OSError("check the network")))
        problems = run_all(plan)
    assert problems == ["wikipedia-64/flash/seed-0 ended with an error: OSError: check the network"]
    steps = len(read_metrics(folders(plan)[0] / "seed-0"))
    assert run_all(plan) == []
    assert done[-2:] == ["run", "run"]
    assert len(read_metrics(folders(plan)[0] / "seed-0")) == steps  # nothing was trained again
    row = collect(plan)["settings"][0]["rows"][0]
    assert row["runs"][0]["tests"]
    assert all(isinstance(loss, float) for loss in row["grid"]["adamw"].values())


def test_runs_of_other_options_and_damaged_ones_are_refused(
    options: Options, finished: None, tmp_path: Path, text: Path
) -> None:
    with pytest.raises(ArgumentError, match=r"budget is 3, but the runs in .* were made with 0.1: use that, or"):
        command.reproduce(options(budget=3, report=True))
    other = tmp_path / "other.txt"
    other.write_text(text.read_text())
    with pytest.raises(ArgumentError, match=r"data is .*other.txt, but the runs in .* were made with .*text.txt"):
        command.reproduce(options(data=(str(other),)))
    # What is not given is that of the runs there.
    command.reproduce(ReproduceConfig("lm", "trial", tmp_path / "out", report=True))
    assert json.loads((tmp_path / "out" / "lm-trial" / "report.json").read_text())["complete"]
    file = folders(make_plan(options()))[1] / "seed-0" / "outcome.json"
    file.write_text("{")
    for again in (options(report=True), options()):
        with pytest.raises(LineartimeError, match=rf"{re.escape(str(file))} is damaged \(.*\): restore it"):
            command.reproduce(again)
    (tmp_path / "out" / "lm-trial" / "plan.json").write_text("[]")
    with pytest.raises(LineartimeError, match=r"plan.json is damaged \(.*\): restore it from a copy, or delete it if"):
        command.reproduce(options(report=True))


def test_runs_in_another_precision_are_not_mixed(
    options: Options, finished: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def here(precision: str, out: Path) -> ReproduceConfig:  # neither call asks for a precision
        monkeypatch.setattr("lineartime.machine.faster_precision", lambda device: (precision, "faked"))
        return with_device(replace(options(precision="auto", device="auto"), out=out))

    monkeypatch.setattr(runner, "in_own_process", lambda job: 1)
    run_all(make_plan(replace(here("bf16", tmp_path / "began"), contexts=(64,), systems=("flash",))))
    with pytest.raises(ArgumentError, match=r"precision is fp32, but the runs in .* were made with bf16: use that, or give"):
        command.reproduce(here("fp32", tmp_path / "began"))
    there = with_saved_options(replace(options(precision="auto", device="auto"), out=tmp_path / "began"))
    assert (there.device, there.precision) == ("cpu", "bf16")


MEMORY: dict[str, Any] = {"name": "memory", "data": ()}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"contexts": (512,)}, "contexts has 512, which is not a context of this experiment here: use 64"),
        ({**MEMORY, "lengths": (63,)}, "lengths has 63, but must be an even number of at least 16 for recall of 4"),
        ({**MEMORY, "lengths": (64,), "pairs": (32,)}, "lengths has 64, but must be an even number of at least 128 for recall"),
        ({"name": "memory"}, "data is .*text.txt, which memory does not have: leave it out"),
        ({**MEMORY, "budget": 3.0}, "budget is 3.0, which memory does not have: leave it out"),
        ({"pairs": (4,)}, "pairs is 4, which lm does not have: leave it out"),
        ({"texts": ("recall",)}, "texts has 'recall', which is not a text of this experiment here: use wikipedia"),
    ],
)
def test_wrong_input_is_one_sentence(options: Options, values: dict[str, Any], message: str) -> None:
    with pytest.raises(LineartimeError, match=message):
        command.reproduce(options(**values))


def test_optimiser_joins_by_one_entry(
    options: Options, pretended: None, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(catalogue.OPTIMIZERS, "second", {"beta2": 0.9})
    plan = make_plan(options(seeds=1, systems=("transformer++",)))
    assert run_all(plan) == []
    assert done == ["speed"] * 4 + ["tune"] * 4 + ["run"]  # only the better one is trained
    [row] = collect(plan)["settings"][0]["rows"]
    losses = {(name, rate): loss for name, grid in row["grid"].items() for rate, loss in grid.items()}
    best = min(losses, key=lambda each: losses[each])
    assert (row["optimizer"], f"{row['rate']:g}") == best
    trained = read_run(folders(plan)[1] / "seed-0").record.options
    assert trained["beta2"] == (0.9 if best[0] == "second" else 0.99)

    assert "| second: steps | second 0.001 |" in write_report(plan)[0].read_text()
    # Runs of one optimiser are continued as such, whatever joins later.
    monkeypatch.setitem(catalogue.OPTIMIZERS, "third", {})
    assert make_plan(with_saved_options(options(systems=("transformer++",)))).config.optimizers == ("adamw", "second")


def test_further_seeds_join_the_report(options: Options, pretended: None, done: list[str], finished: None) -> None:
    plan = make_plan(options(seeds=4, systems=("transformer++",)))
    assert [job.kind for job in all_jobs(plan)].count("run") == 4
    assert run_all(plan) == []
    assert done == ["run"] * 3  # the first one had ended
    file, report = write_report(make_plan(options()))
    row = report["settings"][0]["rows"][1]
    assert [run["state"] for run in row["runs"]] == ["finished"] * 4
    losses = [run["bits_per_byte"] for run in row["runs"]]
    line = next(line for line in file.read_text().splitlines() if line.startswith("| transformer++ "))
    assert f"{statistics.fmean(losses):.4f} ± {statistics.stdev(losses):.4f} (4)" in line
    assert "| 1.00 ± 0.00 (4) |" in line  # the speed-up against itself


@pytest.mark.usefixtures("only_systems_of_the_library_afterwards", "finished")
def test_system_of_ones_own_joins_a_finished_experiment(options: Options, pretended: None, done: list[str]) -> None:
    register_system("relu", Relu, "mlp")
    added = ("relu", "flash:chunk_size=8")
    plan = make_plan(with_saved_options(options(seeds=1, add=added, systems=("relu",))))
    assert run_all(plan) == []
    assert done == ["speed"] * 2 + ["tune"] * 2 + ["run"]
    file, report = write_report(plan)
    states = {row["name"]: row["runs"][0]["state"] for row in report["settings"][0]["rows"]}
    assert states == {"flash": "finished", "transformer++": "finished", "relu": "finished"}
    assert report["missing"] == []  # of what was asked for
    text = file.read_text()
    assert "--add relu flash:chunk_size=8" in text
    later = make_plan(with_saved_options(options()))  # the folder remembers what was added
    assert [each.arm.name for candidates in later.candidates.values() for each in candidates] == [
        "flash",
        "transformer++",
        *added,
    ]
