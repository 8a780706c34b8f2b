"""Times of training, times to a quality, and choices: what the numbers of a report are made of."""

from pathlib import Path
from typing import Any

import pytest

from lineartime.experiments.catalogue import Job
from lineartime.experiments.collect import settings_with_results
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


def test_the_time_to_a_quality_is_interpolated() -> None:
    curve = points((10, 4.0), (20, 3.0), (30, 2.5))
    assert seconds_to(curve, 3.5) == pytest.approx(15)
    assert seconds_to(curve, 2.5) == pytest.approx(30)
    assert seconds_to(curve, 5.0) == 10
    assert seconds_to(curve, 2.4) is None
    assert seconds_to([], 2.4) is None
    assert seconds_to(points((10, 4.0), (20, 2.0), (30, 2.5)), 2.5) == pytest.approx(17.5)  # the first time counts


def test_the_rate_and_the_optimiser_with_the_lowest_loss_are_chosen() -> None:
    adamw = Tuning("adamw", {1e-3: run(3.0, 10.0), 1e-2: run(2.9, 30.0)})
    muon = Tuning("muon", {1e-3: run(2.8), 1e-2: run(None)})
    chosen = best_tuning([adamw, muon])
    assert chosen is muon
    assert (muon.best, adamw.best) == (1e-3, 1e-2)
    waiting = Tuning("muon", {1e-3: Run(Job(Path("x"), "tune", {}), "missing")})
    assert best_tuning([adamw, waiting]) is None  # not before all have had their turn
    assert best_tuning([Tuning("adamw", {1e-3: run(None)})]) is None
    assert best_tuning([]) is None


def test_a_setting_and_a_system_of_which_nothing_has_run_are_in_no_table() -> None:
    def row(tried: str | float, run: str) -> dict[str, Any]:
        return {"grid": {"adamw": {"0.1": tried}}, "runs": [{"state": run}]}

    not_begun, tuned, run = row("missing", "missing"), row(3.0, "missing"), row("missing", "finished")
    settings = [{"rows": [not_begun]}, {"rows": [tuned, not_begun]}, {"rows": [not_begun, run]}]
    assert settings_with_results({"settings": settings}) == [{"rows": [tuned]}, {"rows": [run]}]
