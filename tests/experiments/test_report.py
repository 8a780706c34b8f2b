"""The numbers of a report, and its tables."""

import json
from pathlib import Path
from typing import Any

import pytest

from lineartime.experiments.config import ReproduceConfig
from lineartime.experiments.plan import make_plan
from lineartime.experiments.report import _compare, _run, _seeds, collect, render, seconds_to
from lineartime.experiments.runner import Run, State, best_trial, read_run, run_all
from lineartime.runs.record import Record

from .conftest import Options

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
    assert best_trial({("adamw", 1e-3): run(None, "failed"), **failed}) is None
    assert best_trial(waiting) == ("muon", 1e-2)  # without a choice, nothing is tried


def test_report_shows_measures_and_trials_of_its_task(options: Options, pretended: None) -> None:
    for name, unit in (("lm", "bits per byte"), ("mlm", "nats per masked token")):
        plan = make_plan(options(name, seeds=1))
        assert run_all(plan) == []
        report = collect(plan)
        row = report["settings"][0]["rows"][0]
        row["grid"]["adamw"]["0.01"], row["paper"], row["rate_at_edge"] = "failed", {"pplx": 16.5, "speedup": 1.6}, True
        file = render(plan, report)
        lines = file.read_text().splitlines()
        loss = row["runs"][0]["tests"][0]["loss"]
        assert f"| held-out {unit} | **test {unit}** |" in next(line for line in lines if line.startswith("| system | param"))
        shown = f"{loss:.4f}" if name == "mlm" else f"{loss / 2:.4f}"
        [own, tried] = [line for line in lines if line.startswith("| flash |")]
        assert own.startswith("| flash | 0.01 M | adamw 0.001* | 3 | 4,000 |")
        assert f"| {shown} | {shown} | 16.5 | +0.00 % | 1.00 | 1.00 | 1.6 |" in own
        assert tried == "| flash | 2 | **2.0010** | failed |"
        chance = "**Trials of fewer than 60 steps may choose a rate by chance**: flash (wikipedia, 64 tokens): 2, "
        assert any(line.startswith(chance) for line in lines)
        assert (plan.folder / "quality.png").exists()


def compared(losses: list[float | None], base: list[float], curves: list[Curve] | None = None) -> dict[str, Any]:
    """A row of these losses, beside a baseline of others."""
    shown = curves or [[] for _ in losses]
    row: dict[str, Any] = {
        "paper": {"latency_ms": 3},
        "tokens_per_second": 4.0,
        "runs": [{"loss": a, "curve": b} for a, b in zip(losses, shown, strict=True)],
    }
    runs = [{"loss": each, "curve": curve((10, 3.0), (20, each))} for each in base]
    _compare(row, {"paper": {"latency_ms": 2}, "tokens_per_second": 2.0, "runs": runs})
    return row


def test_loss_and_speed_are_compared_over_the_seeds_that_a_system_and_the_baseline_have() -> None:
    base, rows = [2.0, 4.0], ([2.0, 4.0], [1.0, 3.0], [1.5], [None])
    assert [compared(row, base)["relative_loss"] for row in rows] == [0.0, 4 / 6 - 1, 1.5 / 2 - 1, None]
    own = curve((10, 2.0), (20, 1.9))
    row = compared([2.1, 1.9, 1.9], [2.0, 2.0], [[], own, own])
    assert row["speedups"] == [None, 2.0]
    assert (row["relative_time"], row["paper_relative_time"]) == (0.5, 1.5)
    assert _seeds(row["speedups"], ".2f") == "not reached / 2.00"
    assert _seeds([], ".2f") == "-"


def test_report_says_the_command_that_makes_its_runs(tmp_path: Path) -> None:
    options: dict[str, Any] = {"budget": 300.0, "tuning": 30.0, "threads": 1, "wikipedia": ("my articles.txt",)}
    plan = make_plan(ReproduceConfig("lm", "cpu", tmp_path, **options))
    report = json.loads(json.dumps(collect(plan)))
    command = "lineartime reproduce lm --scale cpu --wikipedia 'my articles.txt' --budget 300 --tuning 30 --threads 1"
    plan.folder.mkdir()
    assert f"- command: `{command}`" in render(plan, report).read_text()
