"""Run the jobs of an experiment that have not finished, each in a process of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import lineartime
from lineartime.errors import ArgumentError
from lineartime.experiments.definitions import INTERRUPTED, MAX_TRIAL_RATIO, MIN_TRIAL_STEPS, Job
from lineartime.experiments.folder import write_plan
from lineartime.experiments.plan import Contender, Plan
from lineartime.experiments.results import best_tuning, read_run, read_speed, read_tuning
from lineartime.host import stop_signals
from lineartime.machine import choose_device, compiler_missing
from lineartime.runs.record import lock_run

LOG_FILE = "log.txt"

Perform = Callable[[Job], int]
"""Does a job and returns its exit status."""


@dataclass(frozen=True)
class RunsResult:
    """Whether running an experiment was interrupted, and a sentence for each run that is not as it should be."""

    interrupted: bool = False
    problems: tuple[str, ...] = ()


def all_jobs(plan: Plan) -> Iterator[tuple[Contender, Job]]:
    """Every selected process of an experiment with its contender, in order; of latency, the first stands for all.

    A job follows from the results that there are when it is asked for: trials have no steps before the speed of their model is
    measured, runs have neither steps nor a rate before the trials have ended. Time decides nothing after the speeds, which are
    measured in rounds over all arms, so that a slow minute of the machine slows all.
    """
    for setting in plan.settings:
        contenders = plan.selected(setting)
        if plan.experiment.kind == "latency":
            yield from ((first, plan.latency_job(setting)) for first in contenders[:1])
            continue
        seeds = [plan.config.seeds or plan.seeds(each.arm) for each in contenders]
        if plan.experiment.kind == "memory":
            for seed, rate in product(range(max(seeds, default=0)), plan.config.rates):
                yield from ((each, plan.memory_job(each, rate, seed)) for each in contenders)
            continue
        pairs = [(each, optimizer) for each in contenders for optimizer in plan.config.optimizers if plan.tunes]
        for number in range(plan.scale.speed_rounds):
            yield from ((each, plan.speed_job(each, optimizer, number)) for each, optimizer in pairs)
        for each, optimizer in pairs:
            for job in _trials(plan, each, optimizer):
                yield each, job
        for seed in range(max(seeds, default=0)):
            for each, count in zip(contenders, seeds, strict=True):
                if seed < count:
                    for job in _final_jobs(plan, each, seed):
                        yield each, job


def _trials(plan: Plan, contender: Contender, optimizer: str) -> Iterator[Job]:
    """The trials of all rates. They last longer than planned, but not many times, if they have too few steps to choose by."""
    speed, tokens = read_speed(plan, contender, optimizer), plan.tokens_per_step(contender.setting)
    for rate in plan.rates(optimizer):
        job = plan.tuning_job(contender, optimizer, rate)
        if speed is not None:
            steps = _steps(plan.config.tuning, speed, tokens)
            if plan.config.scale != "trial":
                steps = max(steps, min(MIN_TRIAL_STEPS, MAX_TRIAL_RATIO * steps))
            job = replace(plan.tuning_job(contender, optimizer, rate, steps), seconds=steps * tokens / speed)
        yield job


def _final_jobs(plan: Plan, contender: Contender, seed: int) -> Iterator[Job]:
    """The run of a seed with the optimiser that the trials choose, or with each."""
    tunings = [read_tuning(plan, contender, optimizer) for optimizer in plan.config.optimizers] if plan.tunes else []
    chosen = best_tuning(tunings)
    if chosen is None:
        names = plan.config.optimizers if plan.experiment.each_optimizer else plan.config.optimizers[:1]
        yield from (plan.final_job(contender, optimizer, seed) for optimizer in names)
        return
    for tuning in [each for each in tunings if each.losses] if plan.experiment.each_optimizer else [chosen]:
        speed = read_speed(plan, contender, tuning.optimizer)
        steps = None if speed is None else _steps(plan.config.budget, speed, plan.tokens_per_step(contender.setting))
        yield plan.final_job(contender, tuning.optimizer, seed, tuning.best, steps)


def _steps(seconds: float | None, tokens_per_second: float, tokens_per_step: int) -> int:
    """The steps that take the planned seconds."""
    return max(2, round((seconds or 0.0) * tokens_per_second / tokens_per_step))


def run_all(plan: Plan, say: Callable[[str], None], perform: Perform | None = None) -> RunsResult:
    """Run the selected jobs that have not finished, one after the other, by default each in a process of its own.

    Raises LineartimeError for a missing device or compiler, or a folder with runs of other options.
    """
    missing = compiler_missing(choose_device(plan.config.device))
    if missing and plan.tunes and plan.config.compile == "on":
        raise ArgumentError("compile", f"is on, but {missing}: install g++, or use off.")
    problems: dict[str, None] = {}  # each once: no rate is a problem of all seeds
    warned: set[int] = set()
    with lock_run(plan.folder):
        write_plan(plan)
        try:
            for contender, job in all_jobs(plan):
                rate, steps = job.options.get("learning_rate"), job.options.get("steps") or 0
                if job.kind == "run" and rate is None:
                    problems[_without_rate(plan, contender)] = None
                if job.kind not in ("latency", "memory") and (rate is None or not steps):
                    continue  # what it follows from is missing, and told
                if job.kind == "tune" and steps < MIN_TRIAL_STEPS and plan.config.scale != "trial" and steps not in warned:
                    warned.add(steps)
                    say(f"  trials of {steps} steps may choose a rate or an optimiser by chance: more seconds for tuning help")
                if problem := _do(job, say, perform or in_own_process):
                    problems[problem] = None
        except KeyboardInterrupt:
            return RunsResult(True, tuple(problems))
    return RunsResult(False, tuple(problems))


def _without_rate(plan: Plan, contender: Contender) -> str:
    ended = all(read_tuning(plan, contender, optimizer).is_complete for optimizer in plan.config.optimizers)
    why = "all of its trials failed" if ended else "not all of its trials have ended"
    return f"{contender.arm.name} ({contender.setting}) has no learning rate: {why}."


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
        elif run.final is not None and run.final.accuracy is not None:
            say(f"  {run.final.accuracy:.1%} of the answers on held-out texts after {run.final.seconds:,.1f} s of training")
        elif run.final is not None:
            bits = run.final.bits_per_byte
            quality = f"{run.final.loss:.4f} nats" if bits is None else f"{bits:.4f} bits per byte"
            say(f"  {quality} on held-out text after {run.final.seconds:,.1f} s of training")
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
