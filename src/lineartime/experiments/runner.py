"""Run the jobs of an experiment that have not finished, each in a process of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lineartime
from lineartime.data import load_corpus, missing_split
from lineartime.errors import ArgumentError
from lineartime.experiments.definitions import MAX_TRIAL_RATIO, MIN_TRIAL_STEPS
from lineartime.experiments.folder import write_plan
from lineartime.experiments.plan import Entry, Job, Plan
from lineartime.experiments.results import Run, Tuning, best_tuning, read_run, read_speed, read_tuning
from lineartime.experiments.worker import INTERRUPTED
from lineartime.host import stop_signals
from lineartime.machine import choose_device, compiler_missing
from lineartime.runs.lock import lock_run

LOG_FILE = "log.txt"

Perform = Callable[[Job, dict[str, Any]], int]
"""Does a job and returns its exit status."""


@dataclass(frozen=True)
class RunsResult:
    """The result of running the jobs of an experiment.

    Attributes:
        interrupted: whether it was asked to stop.
        problems: a sentence for each run that is not as it should be.
    """

    interrupted: bool = False
    problems: tuple[str, ...] = ()


def run_all(plan: Plan, say: Callable[[str], None], perform: Perform | None = None) -> RunsResult:
    """Run the selected jobs that have not finished, one after the other.

    Args:
        plan: the experiment.
        say: is told of every run.
        perform: does a job; by default in a process of its own.

    Raises:
        LineartimeError: for a text that is missing, or a folder with runs of other options.
    """
    check_machine(plan)
    check_texts(plan)
    with lock_run(plan.folder):
        write_plan(plan)
        return _Runner(plan, say, perform or in_own_process).run()


def check_machine(plan: Plan) -> None:
    """Raise ArgumentError if there is no such device, or no compiler for models that are to be compiled."""
    missing = compiler_missing(choose_device(plan.config.device))
    if missing and plan.tunes and plan.compile == "on":
        raise ArgumentError("compile", f"is on, but {missing}: install g++, or use off.")


def check_texts(plan: Plan) -> None:
    """Raise ArgumentError for a text that is missing or cannot be trained on."""
    if plan.experiment.kind == "latency":
        return
    for text in dict.fromkeys(entry.setting.text for entry in plan.entries if plan.is_selected(entry)):
        data = next(entry.options["data"] for entry in plan.entries if entry.setting.text == text)
        own = bool(getattr(plan.config, text))
        if not own and not plan.config.data and plan.config.scale == "paper":
            continue  # that of the recipe, which the run itself loads
        try:
            corpus = load_corpus(data or None)
        except ArgumentError as error:
            raise ArgumentError(text if own else "data", *error.predicate) from None
        if corpus.describe("train") is None:
            raise missing_split(corpus, "train")


class _Runner:
    def __init__(self, plan: Plan, say: Callable[[str], None], perform: Perform) -> None:
        self._plan = plan
        self._say = say
        self._perform = perform
        self._problems: list[str] = []

    def run(self) -> RunsResult:
        try:
            for setting in self._plan.settings:
                entries = [entry for entry in self._plan.entries_of(setting) if self._plan.is_selected(entry)]
                if self._plan.experiment.kind == "latency":
                    if entries:
                        self._do(self._plan.latency_job(setting))
                else:
                    self._setting(entries)
        except KeyboardInterrupt:
            return RunsResult(True, tuple(self._problems))
        return RunsResult(False, tuple(self._problems))

    def _setting(self, entries: list[Entry]) -> None:
        """Measure the speed of all arms, tune them, then train the first seed of all, then the others."""
        plan = self._plan
        if plan.tunes:
            self._measure_speeds(entries)
            for entry in entries:
                for optimizer in plan.optimizers:
                    self._tune(entry, optimizer)
        for seed in range(max((plan.seeds_now(entry.arm) for entry in entries), default=0)):
            for entry in entries:
                if seed < plan.seeds_now(entry.arm):
                    self._final(entry, seed)

    def _measure_speeds(self, entries: list[Entry]) -> None:
        """Measure all arms in rounds, so that a slow minute of the machine slows all. Later, time decides nothing."""
        for number in range(self._plan.scale.speed_rounds):
            for entry in entries:
                for optimizer in self._plan.optimizers:
                    self._do(self._plan.speed_job(entry, optimizer, number))

    def _tune(self, entry: Entry, optimizer: str) -> None:
        plan = self._plan
        speed = read_speed(plan, entry, optimizer)
        if speed is None:
            return
        tokens = plan.tokens_per_step(entry)
        steps = _trial_steps(plan, speed, tokens)
        if steps < MIN_TRIAL_STEPS and plan.config.scale != "trial":
            self._say(f"  trials of {steps} steps may choose a rate or an optimiser by chance: more seconds for tuning help")
        for rate in plan.rates(optimizer):
            self._do(replace(plan.tuning_job(entry, optimizer, rate, steps), seconds=steps * tokens / speed))

    def _final(self, entry: Entry, seed: int) -> None:
        plan = self._plan
        if not plan.tunes:
            self._do(plan.final_job(entry, "adamw", seed))
            return
        tunings = {optimizer: read_tuning(plan, entry, optimizer) for optimizer in plan.optimizers}
        chosen = best_tuning(list(tunings.values()))
        if chosen is None:
            ended = all(tuning.is_complete for tuning in tunings.values())
            why = "all of its trials failed" if ended else "not all of its trials have ended"
            problem = f"{entry.arm.name} ({entry.setting}) has no learning rate: {why}."
            if problem not in self._problems:  # once for all seeds
                self._problems.append(problem)
            return
        for optimizer in plan.final_optimizers(chosen.optimizer):
            self._train(entry, tunings[optimizer], seed)

    def _train(self, entry: Entry, tuning: Tuning, seed: int) -> None:
        plan = self._plan
        speed, rate = read_speed(plan, entry, tuning.optimizer), tuning.best
        if speed is None or rate is None:
            return
        steps = _steps(plan.budget, speed, plan.tokens_per_step(entry))
        self._do(plan.final_job(entry, tuning.optimizer, seed, rate, steps))

    def _do(self, job: Job) -> Run:
        """Do a job unless it has ended, and read its results."""
        run = read_run(job)
        name = job.folder.relative_to(self._plan.folder).as_posix()
        if run.state in ("missing", "interrupted"):
            planned = "" if job.seconds is None else f", {round(job.seconds, 1):g} s of training"
            steps = f", {job.options['steps']:,} steps" if "steps" in job.options else ""
            self._say(f"{'resuming ' if run.state == 'interrupted' else ''}{name}{steps}{planned}")
            status = self._perform(job, self._message(job))
            run = read_run(job)
            if status == INTERRUPTED:
                raise KeyboardInterrupt
            if job.kind == "speed" and run.speed is not None:
                self._say(f"  {run.speed:,.0f} tokens/s")
            elif run.final is not None:
                bits = run.final.bits_per_byte
                quality = f"{run.final.loss:.4f} nats" if bits is None else f"{bits:.4f} bits per byte"
                self._say(f"  {quality} on held-out text after {run.seconds:,.1f} s of training")
            elif run.state in ("missing", "interrupted"):
                run = Run(job, run.state, f"{name} {_why(job, status)}")
        if run.problem:
            problem = f"{name} failed: {run.problem}" if run.state == "failed" else run.problem
            self._say(f"  {problem}")
            self._problems.append(problem)
        return run

    def _message(self, job: Job) -> dict[str, Any]:
        return {
            "folder": str(job.folder),
            "kind": job.kind,
            "options": dict(job.options),
            "tests": [asdict(test) for test in job.tests],
            "test_tokens": self._plan.scale.test_tokens if self._plan.tunes else None,
        }


def _steps(seconds: float | None, tokens_per_second: float, tokens_per_step: int) -> int:
    """The steps that take the planned seconds."""
    return max(2, round((seconds or 0.0) * tokens_per_second / tokens_per_step))


def _trial_steps(plan: Plan, tokens_per_second: float, tokens_per_step: int) -> int:
    """The steps of a trial: those of its planned seconds, or the fewest, if these do not take many times as long."""
    planned = _steps(plan.tuning, tokens_per_second, tokens_per_step)
    return planned if plan.config.scale == "trial" else max(planned, min(MIN_TRIAL_STEPS, MAX_TRIAL_RATIO * planned))


def _why(job: Job, status: int) -> str:
    """Why a process left no outcome: the last line of its output, if it ended by itself."""
    log = job.folder / LOG_FILE
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if status == 1 and log.exists() else []
    return f"ended with an error: {lines[-1]}" if lines else f"ended with status {status}: see {log}."


def in_own_process(job: Job, message: dict[str, Any]) -> int:
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
            process.stdin.write(json.dumps(message) + "\n")
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
