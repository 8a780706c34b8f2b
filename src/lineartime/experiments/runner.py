"""Read the results of jobs from their folders, and run those that have not finished, each in a process of its own."""

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lineartime
from lineartime.bench.results import Entry
from lineartime.checkpoint import list_checkpoints
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.experiments.catalogue import INTERRUPTED, MAX_TRIAL_RATIO, MIN_TRIAL_STEPS, Job
from lineartime.experiments.plan import Candidate, Plan, write_plan
from lineartime.fields import Count
from lineartime.files import RECORD_FILE, read_file
from lineartime.host import stop_signals
from lineartime.machine import choose_device, compiler_missing
from lineartime.runs.metrics import METRICS_FILE, Line, read_metrics
from lineartime.runs.record import Record, lock_run, read_record

State = Literal["missing", "interrupted", "finished", "failed", "damaged"]
"""An interrupted run is to be resumed; one that failed has an error, and is not repeated."""
OUTCOME_FILE = "outcome.json"
"""The measurements or the error of a run that has ended. An interrupted run has none."""
PROGRESS_FILE = "progress.safetensors"
"""Where a run on a task continues after an interruption."""
LOG_FILE = "log.txt"
PAUSE = 5.0
"""A step that takes more than this multiple of the median is a compilation or a pause, and counts as the median."""
_NO_RECORD = Record({}, ())

Perform = Callable[[Job], int]
"""Does a job and returns its exit status."""


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
    entries: tuple[Entry, ...] = ()  # the times
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
    """The runs that tried the rates of an optimiser for a candidate, by rate."""

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


def read_tunings(plan: Plan, candidate: Candidate) -> list[Tuning]:
    """Read the trials of a candidate with each optimiser, if rates are tuned."""
    return [
        Tuning(name, {rate: read_run(plan.tuning_job(candidate, name, rate)) for rate in plan.rates(name)})
        for name in (plan.config.optimizers if plan.tunes else ())
    ]


def best_tuning(tunings: Sequence[Tuning]) -> Tuning | None:
    """The tuning with the lowest loss, as soon as all are complete and one succeeded."""
    if not all(tuning.is_complete for tuning in tunings):
        return None
    return min((each for each in tunings if each.losses), key=lambda tuning: min(tuning.losses.values()), default=None)


def read_speed(plan: Plan, candidate: Candidate, optimizer: str) -> float | None:
    """The tokens per second of a candidate with an optimiser: the median of the measured rounds; None before the first."""
    runs = [read_run(plan.speed_job(candidate, optimizer, number)) for number in range(plan.scale.speed_rounds)]
    speeds = [run.speed for run in runs if run.state == "finished" and run.speed]
    return statistics.median(speeds) if speeds else None


@dataclass(frozen=True)
class RunsResult:
    """Whether running an experiment was interrupted, and a sentence for each run that is not as it should be."""

    interrupted: bool = False
    problems: tuple[str, ...] = ()


def all_jobs(plan: Plan) -> Iterator[tuple[Candidate, Job]]:
    """Every selected process of an experiment with its candidate, in order; of latency, the first stands for all.

    A job follows from the results that there are when it is asked for: trials have no steps before the speed of their model is
    measured, runs have neither steps nor a rate before the trials have ended. Time decides nothing after the speeds, which are
    measured in rounds over all arms, so that a slow minute of the machine slows all.
    """
    for setting in plan.settings:
        candidates = plan.selected(setting)
        if plan.experiment.kind == "latency":
            yield from ((first, plan.latency_job(setting)) for first in candidates[:1])
            continue
        seeds = [plan.config.seeds or plan.seeds(each.arm) for each in candidates]
        if plan.experiment.kind == "memory":
            for seed, rate in product(range(max(seeds, default=0)), plan.config.rates):
                yield from ((each, plan.memory_job(each, rate, seed)) for each in candidates)
            continue
        pairs = [(each, optimizer) for each in candidates for optimizer in plan.config.optimizers if plan.tunes]
        for number in range(plan.scale.speed_rounds):
            yield from ((each, plan.speed_job(each, optimizer, number)) for each, optimizer in pairs)
        for each, optimizer in pairs:
            for job in _trials(plan, each, optimizer):
                yield each, job
        for seed in range(max(seeds, default=0)):
            for each, count in zip(candidates, seeds, strict=True):
                if seed < count:
                    yield each, _final_job(plan, each, seed)


def _trials(plan: Plan, candidate: Candidate, optimizer: str) -> Iterator[Job]:
    """The trials of all rates. They last longer than planned, but not many times, if they have too few steps to choose by."""
    speed, tokens = read_speed(plan, candidate, optimizer), plan.tokens_per_step(candidate.setting)
    for rate in plan.rates(optimizer):
        job = plan.tuning_job(candidate, optimizer, rate)
        if speed is not None:
            steps = _steps(plan.config.tuning, speed, tokens)
            if plan.config.scale != "trial":
                steps = max(steps, min(MIN_TRIAL_STEPS, MAX_TRIAL_RATIO * steps))
            job = replace(plan.tuning_job(candidate, optimizer, rate, steps), seconds=steps * tokens / speed)
        yield job


def _final_job(plan: Plan, candidate: Candidate, seed: int) -> Job:
    """The run of a seed with the optimiser and the rate that the trials choose."""
    chosen = best_tuning(read_tunings(plan, candidate))
    if chosen is None:
        return plan.final_job(candidate, plan.config.optimizers[0], seed)
    speed = read_speed(plan, candidate, chosen.optimizer)
    steps = None if speed is None else _steps(plan.config.budget, speed, plan.tokens_per_step(candidate.setting))
    return plan.final_job(candidate, chosen.optimizer, seed, chosen.best, steps)


def _steps(seconds: float | None, tokens_per_second: float, tokens_per_step: int) -> int:
    """The steps that take the planned seconds."""
    return max(2, round((seconds or 0.0) * tokens_per_second / tokens_per_step))


def run_all(plan: Plan, say: Callable[[str], None], perform: Perform | None = None) -> RunsResult:
    """Run the selected jobs that have not finished, one after the other, by default each in a process of its own.

    Raises LineartimeError for a missing device or compiler.
    """
    missing = compiler_missing(choose_device(plan.config.device))
    if missing and plan.tunes and plan.config.compile == "on":
        raise ArgumentError("compile", f"is on, but {missing}: install g++, or use off.")
    problems: dict[str, None] = {}  # each once: no rate is a problem of all seeds
    with lock_run(plan.folder):
        write_plan(plan)
        try:
            for candidate, job in all_jobs(plan):
                rate, steps = job.options.get("learning_rate"), job.options.get("steps") or 0
                if job.kind == "run" and rate is None:
                    ended = all(tuning.is_complete for tuning in read_tunings(plan, candidate))
                    why = "all of its trials failed" if ended else "not all of its trials have ended"
                    problems[f"{candidate.arm.name} ({candidate.setting}) has no learning rate: {why}."] = None
                if job.kind not in ("latency", "memory") and (rate is None or not steps):
                    continue  # what it follows from is missing, and told
                if problem := _do(job, say, perform or in_own_process):
                    problems[problem] = None
        except KeyboardInterrupt:
            return RunsResult(True, tuple(problems))
    return RunsResult(False, tuple(problems))


def _do(job: Job, say: Callable[[str], None], perform: Perform) -> str:
    """Do a job unless it has ended, and return a sentence if it is not as it should be."""
    run = read_run(job)
    problem = run.problem
    if run.state in ("missing", "interrupted"):
        planned = "" if job.seconds is None else f", {round(job.seconds, 1):g} s of training"
        steps = f", {job.options['steps']:,} steps" if job.options.get("steps") else ""
        say(f"{'resuming ' if run.state == 'interrupted' else ''}{job.name}{steps}{planned}")
        status = perform(job)
        run = read_run(job)
        problem = run.problem
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        if job.kind == "speed" and run.speed is not None:
            say(f"  {run.speed:,.0f} tokens/s")
        elif (final := run.final) is not None:
            quality = f"{final.loss:.4f} nats" if final.accuracy is None else f"{final.accuracy:.1%} of the answers"
            say(f"  {quality} on held-out text after {final.seconds:,.1f} s of training")
        elif run.state in ("missing", "interrupted"):
            problem = f"{job.name} {_why(job, status)}"
    if problem:
        say(f"  {problem}")
    return problem


def _why(job: Job, status: int) -> str:
    """Why a process left no outcome: the last line of its output, if it ended by itself."""
    log = job.folder / LOG_FILE
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if status == 1 and log.exists() else []
    return f"ended with an error: {lines[-1]}" if lines else f"ended with status {status}: see {log}."


def in_own_process(job: Job) -> int:
    """Do a job in a process of its own, with its output in a file. A request to stop is passed on to it.

    Returns:
        Its exit status, or that of an interrupt if there was one, even if the job has ended.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    source = str(Path(lineartime.__file__).parents[1])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])  # it is the same library there
    command = [sys.executable, "-m", "lineartime.experiments.worker"]
    with (job.folder / LOG_FILE).open("a", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, env={**os.environ, "PYTHONPATH": path}
        )
    with process, _passing_on(process) as asked:
        with suppress(BrokenPipeError):  # it has ended already
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(job), default=str) + "\n")
            process.stdin.flush()  # it stays open: its end would tell the process to stop
        status = process.wait()
    return INTERRUPTED if asked else status


@contextmanager
def _passing_on(process: "subprocess.Popen[str]") -> Iterator[list[int]]:
    """Pass requests to stop on to the process, which stops after its step. The list that is yielded records them."""
    asked: list[int] = []

    def request(number: int, _frame: object) -> None:
        asked.append(number)
        process.send_signal(signal.SIGINT)

    before = {number: signal.signal(number, request) for number in stop_signals()}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
