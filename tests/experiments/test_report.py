"""The numbers of a report, its tables, and what the paper measured on the same text beside them."""

import json
from pathlib import Path
from typing import Any

import pytest

from lineartime.experiments.catalogue import Job
from lineartime.experiments.collect import add_relative_losses, collect
from lineartime.experiments.config import ReproduceConfig
from lineartime.experiments.plan import Plan, make_plan
from lineartime.experiments.report import _speedups, render
from lineartime.experiments.runner import Point, Run, Tuning, best_tuning, seconds_to, training_seconds


def points(*pairs: tuple[float, float]) -> list[Point]:
    return [Point(step, seconds, loss, None) for step, (seconds, loss) in enumerate(pairs)]


def run(loss: float | None, speed: float = 1.0) -> Run:
    job = Job(Path("x"), "tune", {})
    if loss is None:
        return Run(job, "failed", "it diverged")
    return Run(job, "finished", speed=speed, points=tuple(points((1.0, loss))))


def test_compilation_and_evaluations_are_no_time_of_training() -> None:
    lines: list[dict[str, Any]] = [{"step": 1, "loss": 5.0, "tokens_per_second": 1.0}]  # compiles for 100 s
    lines += [{"step": step, "loss": 5.0, "tokens_per_second": 50.0} for step in (2, 3, 4)]
    lines.append({"step": 4, "validation_loss": 4.0, "seconds": 1000.0})
    assert training_seconds(lines, 100) == pytest.approx({1: 2.0, 2: 4.0, 3: 6.0, 4: 8.0})


def test_time_to_a_quality_is_interpolated() -> None:
    curve = points((10, 4.0), (20, 3.0), (30, 2.5))
    assert seconds_to(curve, 3.5) == pytest.approx(15)
    assert seconds_to(curve, 2.5) == pytest.approx(30)
    assert seconds_to(curve, 5.0) == 10
    assert seconds_to(curve, 2.4) is None
    assert seconds_to([], 2.4) is None
    assert seconds_to(points((10, 4.0), (20, 2.0), (30, 2.5)), 2.5) == pytest.approx(17.5)  # the first time counts


def test_rate_and_optimiser_with_the_lowest_loss_are_chosen() -> None:
    adamw = Tuning("adamw", {1e-3: run(3.0, 10.0), 1e-2: run(2.9, 30.0)})
    muon = Tuning("muon", {1e-3: run(2.8), 1e-2: run(None)})
    chosen = best_tuning([adamw, muon])
    assert chosen is muon
    assert (muon.best, adamw.best) == (1e-3, 1e-2)
    waiting = Tuning("muon", {1e-3: Run(Job(Path("x"), "tune", {}), "missing")})
    assert best_tuning([adamw, waiting]) is None  # not before all have had their turn
    assert best_tuning([Tuning("adamw", {1e-3: run(None)})]) is None
    assert best_tuning([]) is None


STORED = Path(__file__).parents[2] / "benchmarks" / "results" / "reproduce"


def report_of(plan: Plan, bits: dict[str, list[float]]) -> dict[str, Any]:
    """The report of an experiment that has not begun, with test losses, by arm and seed, filled in."""
    report = collect(plan)
    for setting in report["settings"]:
        for row in setting["rows"]:
            for run, value in zip(row["runs"], bits.get(row["name"], []), strict=False):
                run["state"] = "finished"
                run["tests"] = [{"name": "", "bits_per_byte": value, "loss": value, "by_position": []}]
    return report


def rendered(plan: Plan, report: Any) -> str:
    plan.folder.mkdir(parents=True)
    return render(plan, report)[0].read_text()


def stored(name: str, out: Path) -> tuple[Plan, dict[str, Any]]:
    """A report in the repository, and its plan."""
    report: dict[str, Any] = json.loads((STORED / name / "report.json").read_text())
    return make_plan(ReproduceConfig(report["experiment"], report["scale"], out, **report["options"])), report


def test_cost_of_an_approximation_stands_beside_the_papers(tmp_path: Path) -> None:
    plan = make_plan(ReproduceConfig("lm", "cpu", tmp_path))
    ran = {"flash-quad": [2.0, 2.5], "flash": [1.9, 2.6], "transformer++": [2.0, 2.1], "mc-tfm++": [2.1]}
    text = rendered(plan, report_of(plan, ran))
    assert "| wikipedia, 2,048 tokens | FLASH-Quad -> FLASH | -0.1000 / +0.1000 | -5.00 % / +4.00 % | +0.22 |" in text
    assert "| wikipedia, 512 tokens | TFM++ -> MC-TFM++ | +0.1000 | +5.00 % | +0.54 |" in text
    # The paper's +0.30 at 4,096 tokens is of Wiki-40B.
    assert "| books, 4,096 tokens | FLASH-Quad -> FLASH | -0.1000 / +0.1000 | -5.00 % / +4.00 % | - |" in text

    masked = make_plan(ReproduceConfig("mlm", "cpu", tmp_path))
    text = rendered(masked, report_of(masked, {"flash-quad": [2.0], "flash": [1.9]}))
    assert "| context | from -> to | nats | loss | paper: perplexity |" in text
    assert "| wikipedia, 2,048 tokens | FLASH-Quad -> FLASH | -0.1000 | -5.00 % | +0.06 |" in text
    assert "MC-TFM++ |" not in text  # which has not run


def test_masked_models_are_measured_in_nats(tmp_path: Path) -> None:
    plan, report = stored("mlm-cpu", tmp_path)
    text = rendered(plan, report)
    run = next(run for row in report["settings"][0]["rows"] for run in row["runs"] if run["tests"])
    assert run["bits_per_byte"] is None
    assert "test nats per masked token" in text
    assert f"{run['tests'][0]['loss']:.4f}" in text


def test_stored_report_is_drawn_with_its_positions_and_trials(tmp_path: Path) -> None:
    plan, report = stored("lm-cpu-600s-wikipedia-2048-fp32", tmp_path)
    text = rendered(plan, report)
    assert "Test loss by the place of a token in its context" in text
    row = next(row for setting in report["settings"] for row in setting["rows"] if row["tokens_per_second"])
    assert f"| {row['name']} | {row['trial_steps'][row['optimizer']]} |" in text
    assert {file.name for file in plan.folder.iterdir()} >= {"quality.png", "report.md"}


def test_loss_is_compared_with_the_baseline_over_the_seeds_that_both_have(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"name": "transformer++", "runs": [{"loss": 2.0}, {"loss": 4.0}]},
        {"name": "flash", "runs": [{"loss": 1.0}, {"loss": 3.0}]},
        {"name": "combiner", "runs": [{"loss": 1.5}]},
        {"name": "performer", "runs": [{"loss": None}]},
    ]
    for row in rows:
        row["paper_loss"] = None
        for run in row["runs"]:
            run["curve"] = []
    add_relative_losses(make_plan(ReproduceConfig("lm", "cpu", tmp_path)), rows)
    assert [row["relative_loss"] for row in rows] == [0.0, 4 / 6 - 1, 1.5 / 2 - 1, None]


def test_speedup_is_of_the_seeds_that_a_system_and_the_baseline_have(tmp_path: Path) -> None:
    base, own = points((10, 3.0), (20, 2.0)), points((10, 2.0), (20, 1.9))
    rows: list[dict[str, Any]] = [
        {"name": "transformer++", "runs": [{"loss": 2.0, "curve": base}] * 2},
        {"name": "flash", "runs": [{"loss": 2.1, "curve": []}, *[{"loss": 1.9, "curve": own}] * 2]},
    ]
    for row in rows:
        row["paper_loss"] = None
    add_relative_losses(make_plan(ReproduceConfig("lm", "cpu", tmp_path)), rows)
    assert rows[1]["speedups"] == [None, 2.0]
    assert _speedups(rows[1]["speedups"]) == "not reached / 2.00"
    assert _speedups([]) == "-"


def test_report_says_the_command_that_makes_its_runs(tmp_path: Path) -> None:
    options: dict[str, Any] = {"budget": 300.0, "optimizers": ("muon",), "threads": 1, "wikipedia": ("my articles.txt",)}
    plan = make_plan(ReproduceConfig("lm", "cpu", tmp_path, **options))
    report = json.loads(json.dumps(collect(plan)))
    command = "lineartime reproduce lm --scale cpu --wikipedia 'my articles.txt' --budget 300 --optimizers muon --threads 1"
    assert f"- command: `{command}`" in rendered(plan, report)
