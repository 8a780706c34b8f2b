"""Read the results of runs from their folders."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from lineartime.bench.results import Entry
from lineartime.checkpoint import list_checkpoints
from lineartime.errors import LineartimeError
from lineartime.experiments.definitions import Job
from lineartime.experiments.plan import Contender, Plan
from lineartime.fields import Count
from lineartime.files import RECORD_FILE, read_file
from lineartime.runs.metrics import METRICS_FILE, Line, read_metrics
from lineartime.runs.record import Record, read_record

State = Literal["missing", "interrupted", "finished", "failed", "damaged"]
"""An interrupted run is to be resumed; one that failed has an error, and is not repeated."""
OUTCOME_FILE = "outcome.json"
"""The measurements or the error of a run that has ended. An interrupted run has none."""
PROGRESS_FILE = "progress.safetensors"
"""Where a run on a task continues after an interruption."""
PAUSE = 5.0
"""A step that takes more than this multiple of the median is a compilation or a pause, and counts as the median."""
_NO_RECORD = Record({}, ())


@dataclass(frozen=True)
class FinalResult:
    """A trained model on its test split, or on held-out texts of a task."""

    name: str  # what differed from training; empty for nothing
    context_length: Count  # of a window, in tokens
    loss: float  # the mean in nats per token
    bits_per_byte: float | None  # None for masked tokens
    word_perplexity: float | None  # None where words cannot be counted
    tokens: Count  # how many were measured
    text: str  # its name
    by_position: tuple[tuple[float, ...], ...] = ()  # the first place, the last place and the loss of each part of the window
    accuracy: float | None = None  # the share of right answers of a task
    depth: float | None = None  # of the needles, as the share of the text before them; any if None


@dataclass(frozen=True)
class Outcome:
    """The content of outcome.json: what was measured, or the error that ended the run."""

    kind: str = ""  # of the job
    error: str | None = None
    tests: tuple[FinalResult, ...] = ()
    time: str | None = None  # when the times of steps were measured
    machine: dict[str, str | int | None] = field(default_factory=dict)  # where
    entries: tuple[Entry, ...] = ()  # the times; earlier versions wrote some of their fields
    state_bytes: int | None = None  # of a stream after a text of a task, in float32
    decode_seconds: float | None = None  # of a further token of that stream


class Point(NamedTuple):
    """An evaluation on held-out text after a number of steps, and seconds of training without evaluations and compilation."""

    step: int
    seconds: float
    loss: float
    bits_per_byte: float | None
    accuracy: float | None = None  # on a task


@dataclass(frozen=True)
class Run:
    """The results of a job."""

    job: Job
    state: State
    problem: str = ""  # a sentence about a run that failed or is damaged
    record: Record = _NO_RECORD  # empty before it begins, and for a measurement of latency
    speed: float | None = None  # tokens of a second, the median over the steps after the first quarter
    points: tuple[Point, ...] = ()  # the evaluations during training
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def options(self) -> dict[str, Any]:
        """Those it was trained with."""
        return self.record.options

    @property
    def final(self) -> Point | None:
        """The last evaluation of a finished run."""
        return self.points[-1] if self.state == "finished" and self.points else None


def read_run(job: Job) -> Run:
    """Read the results of a job; files that cannot be read make it "damaged"."""
    folder = job.folder
    try:
        outcome = read_file(folder / OUTCOME_FILE, Outcome) if (folder / OUTCOME_FILE).exists() else None
        lines = read_metrics(folder) if (folder / METRICS_FILE).exists() else []
        record = read_record(folder) if (folder / RECORD_FILE).exists() else _NO_RECORD
    except LineartimeError as error:
        what = str(error).rstrip(".")
        return Run(job, "damaged", f"{folder} holds damaged files: delete it, and run the experiment again ({what}).")
    if outcome is None:
        began = list_checkpoints(folder) or (folder / PROGRESS_FILE).exists()
        return Run(job, "interrupted" if began else "missing", record=record)
    if outcome.error:
        return Run(job, "failed", f"{job.name} failed: {outcome.error}", record, outcome=outcome)
    if job.kind == "latency":
        return Run(job, "finished", outcome=outcome)
    steps, tokens_per_step = record.options.get("steps"), record.options.get("tokens_per_batch")
    if not (isinstance(steps, int) and isinstance(tokens_per_step, int) and any(line["step"] >= steps for line in lines)):
        return Run(job, "damaged", f"{folder} says that it is finished, but its metrics do not: delete it, and run again.")
    seconds = training_seconds(lines, tokens_per_step)
    points = tuple(
        Point(
            int(line["step"]),
            seconds[int(line["step"])],
            line["validation_loss"],
            line.get("validation_bits_per_byte"),
            line.get("validation_accuracy"),
        )
        for line in lines
        if "validation_loss" in line and int(line["step"]) in seconds
    )
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    speed = statistics.median(speeds[len(speeds) // 4 :]) if speeds else None
    return Run(job, "finished", "", record, speed, points, outcome)


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
    """The runs that tried the rates of an optimiser for a contender, by rate."""

    optimizer: str
    runs: dict[float, Run]

    @property
    def is_complete(self) -> bool:
        """Whether all rates were tried."""
        return all(run.state in ("finished", "failed") for run in self.runs.values())

    @property
    def losses(self) -> dict[float, float]:
        """The loss on held-out text of each rate whose run reached its end."""
        return {rate: run.final.loss for rate, run in self.runs.items() if run.final is not None}

    @property
    def best(self) -> float | None:
        """The rate with the lowest loss."""
        return min(self.losses, key=self.losses.__getitem__, default=None)


def read_tuning(plan: Plan, contender: Contender, optimizer: str) -> Tuning:
    """Read the trials of a contender with an optimiser."""
    runs = {rate: read_run(plan.tuning_job(contender, optimizer, rate)) for rate in plan.rates(optimizer)}
    return Tuning(optimizer, runs)


def best_tuning(tunings: Sequence[Tuning]) -> Tuning | None:
    """The tuning with the lowest loss, as soon as all are complete and one succeeded."""
    if not all(tuning.is_complete for tuning in tunings):
        return None
    return min((each for each in tunings if each.losses), key=lambda tuning: min(tuning.losses.values()), default=None)


def read_speed(plan: Plan, contender: Contender, optimizer: str) -> float | None:
    """The tokens per second of a contender with an optimiser: the median of the measured rounds; None before the first."""
    runs = [read_run(plan.speed_job(contender, optimizer, number)) for number in range(plan.scale.speed_rounds)]
    speeds = [run.speed for run in runs if run.state == "finished" and run.speed]
    return statistics.median(speeds) if speeds else None
