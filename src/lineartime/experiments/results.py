"""Read the results of runs from their folders."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from lineartime.checkpoint import list_checkpoints
from lineartime.errors import LineartimeError
from lineartime.experiments.outcome import OUTCOME_FILE, Measurement, Outcome
from lineartime.experiments.plan import Entry, Job, Plan
from lineartime.files import RECORD_FILE
from lineartime.json_files import read_file
from lineartime.runs.metrics import METRICS_FILE, Line, read_metrics
from lineartime.runs.record import read_record

State = Literal["missing", "interrupted", "finished", "failed", "damaged"]
PAUSE = 5.0
"""A step that takes more than this multiple of the median is a compilation or a pause, and counts as the median."""


@dataclass(frozen=True)
class Point:
    """An evaluation on held-out text during training.

    Attributes:
        step: the number of steps before it.
        seconds: of training until then, without evaluations and compilation.
        loss: in nats per token.
        bits_per_byte: None for masked tokens.
    """

    step: int
    seconds: float
    loss: float
    bits_per_byte: float | None


@dataclass(frozen=True)
class Run:
    """The results of a run.

    Attributes:
        job: what was asked for.
        state: "finished" with its measurements, "failed" with an error, "interrupted" (to be resumed), "missing" or "damaged".
        problem: a sentence about a run that failed or is damaged; empty for others.
        options: those it was trained with.
        seconds: of training, without evaluations and compilation.
        speed: tokens of a second, the median over the steps after the first quarter.
        points: the evaluations during training.
        tests: those at the end.
        outcome: everything in its outcome file.
    """

    job: Job
    state: State
    problem: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    speed: float | None = None
    points: tuple[Point, ...] = ()
    tests: tuple[Measurement, ...] = ()
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def final(self) -> Point | None:
        """The last evaluation of a finished run."""
        return self.points[-1] if self.state == "finished" and self.points else None


def read_run(job: Job) -> Run:
    """Read the results of a job; files that cannot be read make it "damaged"."""
    folder = job.folder
    try:
        outcome = read_file(folder / OUTCOME_FILE, Outcome) if (folder / OUTCOME_FILE).exists() else None
        if outcome is not None and job.kind == "latency":
            return Run(job, "failed" if outcome.error else "finished", outcome.error or "", outcome=outcome)
        lines = read_metrics(folder) if (folder / METRICS_FILE).exists() else []
        options = read_record(folder).options if (folder / RECORD_FILE).exists() else {}
    except LineartimeError as error:
        what = str(error).rstrip(".")
        return Run(job, "damaged", f"{folder} holds damaged files: delete it, and run the experiment again ({what}).")
    if outcome is None:
        return Run(job, "interrupted" if list_checkpoints(folder) else "missing", options=options)
    if outcome.error:
        return Run(job, "failed", outcome.error, options=options, outcome=outcome)
    if not isinstance(options.get("steps"), int) or max((line["step"] for line in lines), default=0) < options["steps"]:
        return Run(job, "damaged", f"{folder} says that it is finished, but its metrics do not: delete it, and run again.")
    if options.get("tokens_per_batch") is None:
        return Run(job, "damaged", f"{folder} does not tell how many tokens a step has: delete it, and run again.")
    seconds = training_seconds(lines, options["tokens_per_batch"])
    return Run(
        job,
        "finished",
        options=options,
        seconds=max(seconds.values(), default=0.0),
        speed=_speed(lines),
        points=tuple(
            Point(int(line["step"]), seconds[int(line["step"])], line["validation_loss"], line.get("validation_bits_per_byte"))
            for line in lines
            if "validation_loss" in line and int(line["step"]) in seconds
        ),
        tests=outcome.tests,
        outcome=outcome,
    )


def training_seconds(lines: Sequence[Line], tokens_per_step: int) -> dict[int, float]:
    """The seconds of training until each step, without evaluations, compilation and pauses of the machine."""
    durations = {
        int(line["step"]): tokens_per_step / line["tokens_per_second"] for line in lines if "tokens_per_second" in line
    }
    usual = statistics.median(durations.values()) if durations else 0.0
    seconds, total = {}, 0.0
    for step, duration in durations.items():
        total += duration if duration < PAUSE * usual else usual
        seconds[step] = total
    return seconds


def _speed(lines: Sequence[Line]) -> float | None:
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    return statistics.median(speeds[len(speeds) // 4 :]) if speeds else None


def seconds_to(points: Sequence[Point], loss: float) -> float | None:
    """The seconds of training after which a loss is reached, interpolated between evaluations; None if it never is."""
    if points and points[0].loss <= loss:
        return points[0].seconds
    for before, after in pairwise(points):
        if after.loss <= loss:
            share = (before.loss - loss) / (before.loss - after.loss)
            return before.seconds + share * (after.seconds - before.seconds)
    return None


@dataclass(frozen=True)
class Tuning:
    """The runs that tried the rates of an optimiser for an entry.

    Attributes:
        optimizer: its name.
        runs: by rate.
    """

    optimizer: str
    runs: dict[float, Run]

    @property
    def is_complete(self) -> bool:
        """Whether all rates were tried."""
        return all(run.state in ("finished", "failed") for run in self.runs.values())

    @property
    def best(self) -> float | None:
        """The rate with the lowest loss on held-out text."""
        losses = {rate: run.final.loss for rate, run in self.runs.items() if run.final is not None}
        return min(losses, key=lambda rate: losses[rate]) if losses else None

    @property
    def loss(self) -> float:
        """The loss of the best rate; infinite if no run reached its end."""
        best = None if self.best is None else self.runs[self.best].final
        return float("inf") if best is None else best.loss


def read_tuning(plan: Plan, entry: Entry, optimizer: str) -> Tuning:
    """Read the trials of an entry with an optimiser."""
    runs = {rate: read_run(plan.tuning_job(entry, optimizer, rate)) for rate in plan.rates(optimizer)}
    return Tuning(optimizer, runs)


def read_speed(plan: Plan, entry: Entry, optimizer: str) -> float | None:
    """The tokens per second of an entry with an optimiser: the median of the measured rounds; None before the first."""
    runs = [read_run(plan.speed_job(entry, optimizer, number)) for number in range(plan.scale.speed_rounds)]
    speeds = [run.speed for run in runs if run.state == "finished" and run.speed]
    return statistics.median(speeds) if speeds else None


def best_tuning(tunings: Sequence[Tuning]) -> Tuning | None:
    """The tuning with the lowest loss, as soon as all are complete and one succeeded."""
    if not tunings or not all(tuning.is_complete for tuning in tunings):
        return None
    best = min(tunings, key=lambda tuning: tuning.loss)
    return best if best.best is not None else None
