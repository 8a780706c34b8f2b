"""The numbers of a report, and its tables."""

import json
from pathlib import Path
from typing import Any

import pytest

from lineartime.experiments.config import ReproduceConfig
from lineartime.experiments.plan import Plan, make_plan
from lineartime.experiments.report import _compare, _run, _seeds, collect, render, seconds_to
from lineartime.experiments.runner import Run, State, best_trial, read_run
from lineartime.runs.record import Record

Curve = list[list[Any]]


def curve(*pairs: tuple[float, float]) -> Curve:
    return [[step, seconds, loss, None] for step, (seconds, loss) in enumerate(pairs)]


def run(loss: float | None, state: State = "finished") -> Run:
    return Run(Path("x"), state, Record({}, ()), 1.0, () if loss is None else ({"step": 9, "validation_loss": loss},), {})


def test_compilation_and_evaluations_are_no_time_of_training(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"step": 1, "loss": 5.0, "tokens_per_second": 1.0}]  # compiles for 100 s
    lines += [{"step": step, "loss": 5.0, "tokens_per_second": 50.0} for step in (2, 3, 4)]
    lines.append({"step": 4, "validation_loss": 4.0, "seconds": 1000.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "run.json").write_text('{"options": {"tokens_per_batch": 100}, "processes": []}')
    assert _run(read_run(tmp_path), None)["curve"] == [[4, 8.0, 4.0, None]]


def test_time_to_a_quality_is_interpolated() -> None:
    falling = curve((10, 4.0), (20, 3.0), (30, 2.5))
    assert seconds_to(falling, 3.5) == pytest.approx(15)
    assert seconds_to(falling, 2.5) == pytest.approx(30)
    assert seconds_to(falling, 5.0) == 10
    assert seconds_to(falling, 2.4) is None
    assert seconds_to([], 2.4) is None
    assert seconds_to(curve((10, 4.0), (20, 2.0), (30, 2.5)), 2.5) == pytest.approx(17.5)  # the first time counts


def test_rate_and_optimiser_with_the_lowest_loss_are_chosen() -> None:
    adamw = {("adamw", 1e-3): run(3.0), ("adamw", 1e-2): run(2.9)}
    failed, waiting = {("muon", 1e-2): run(None, "failed")}, {("muon", 1e-2): run(None, "missing")}
    assert best_trial(adamw) == ("adamw", 1e-2)
    assert best_trial({**adamw, ("muon", 1e-3): run(2.8), **failed}) == ("muon", 1e-3)
    assert best_trial({**adamw, **waiting}) is None  # not before all have had their turn
    assert best_trial(failed) is None
    assert best_trial({}) is None


STORED = Path(__file__).parents[2] / "benchmarks" / "results" / "reproduce"


def stored(name: str, out: Path) -> tuple[Plan, dict[str, Any], str]:
    """A report in the repository that has run in one setting, its plan, and its text as it is written now."""
    report: dict[str, Any] = json.loads((STORED / name / "report.json").read_text())
    plan = make_plan(ReproduceConfig(report["experiment"], report["scale"], out, **report["options"]))
    settings = []
    for setting in report["settings"]:  # what has not begun was listed, too
        rows = [row for row in setting["rows"] if any(run["curve"] for run in row["runs"])]
        settings += [{**setting, "files": ["text"], "rows": rows}] if rows else []
    report["settings"] = settings
    plan.folder.mkdir(parents=True)
    return plan, report, render(plan, report).read_text()


def test_masked_models_are_measured_in_nats(tmp_path: Path) -> None:
    _, report, text = stored("mlm-cpu", tmp_path)
    run = next(run for row in report["settings"][0]["rows"] for run in row["runs"] if run["tests"])
    assert run["bits_per_byte"] is None
    assert "**test nats per masked token**" in text
    assert f"{run['tests'][0]['loss']:.4f}" in text


def test_stored_report_is_drawn_with_its_trials(tmp_path: Path) -> None:
    plan, report, text = stored("lm-cpu-600s-wikipedia-2048-fp32", tmp_path)
    row = next(row for setting in report["settings"] for row in setting["rows"] if row["tokens_per_second"])
    assert f"**{row['grid'][row['optimizer']][format(row['rate'], 'g')]:.4f}**" in text
    assert "**Trials of fewer than 60 steps may choose a rate by chance**: performer (wikipedia, 2,048 tokens): 16." in text
    assert "| 1.58 / 1.61 | 1.6 |" in text  # the speed-up here and in the paper
    assert {file.name for file in plan.folder.iterdir()} >= {"quality.png", "report.md"}


def compared(losses: list[float | None], base: list[float], curves: list[Curve] | None = None) -> dict[str, Any]:
    """A row of these losses, beside a baseline of others."""
    shown = curves or [[] for _ in losses]
    row: dict[str, Any] = {"paper": {}, "runs": [{"loss": a, "curve": b} for a, b in zip(losses, shown, strict=True)]}
    _compare(row, {"paper": {}, "runs": [{"loss": each, "curve": curve((10, 3.0), (20, each))} for each in base]})
    return row


def test_loss_and_speed_are_compared_over_the_seeds_that_a_system_and_the_baseline_have() -> None:
    base, rows = [2.0, 4.0], ([2.0, 4.0], [1.0, 3.0], [1.5], [None])
    assert [compared(row, base)["relative_loss"] for row in rows] == [0.0, 4 / 6 - 1, 1.5 / 2 - 1, None]
    own = curve((10, 2.0), (20, 1.9))
    row = compared([2.1, 1.9, 1.9], [2.0, 2.0], [[], own, own])
    assert row["speedups"] == [None, 2.0]
    assert _seeds(row["speedups"], ".2f") == "not reached / 2.00"
    assert _seeds([], ".2f") == "-"


def test_report_says_the_command_that_makes_its_runs(tmp_path: Path) -> None:
    options: dict[str, Any] = {"budget": 300.0, "optimizers": ("muon",), "threads": 1, "wikipedia": ("my articles.txt",)}
    plan = make_plan(ReproduceConfig("lm", "cpu", tmp_path, **options))
    report = json.loads(json.dumps(collect(plan)))
    command = "lineartime reproduce lm --scale cpu --wikipedia 'my articles.txt' --budget 300 --optimizers muon --threads 1"
    plan.folder.mkdir()
    assert f"- command: `{command}`" in render(plan, report).read_text()
