"""The jobs of a plan in their order, each done in a process of its own, and what they leave in their folders.

A job follows from the results that there are when it is its turn: trials have no steps before the speed of their model is
measured, and runs have neither steps nor a rate before the trials have ended.
"""

import json
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

from lineartime.checkpoint import list_checkpoints
from lineartime.errors import ArgumentError, DivergedError, reporting_file_errors, typed_first_line
from lineartime.evaluation import evaluate
from lineartime.experiments import catalogue, memory
from lineartime.experiments.catalogue import MAX_TRIAL_RATIO, MIN_TRIAL_STEPS
from lineartime.experiments.plan import PLAN_FILE, Candidate, Job, Plan, plan_options
from lineartime.files import RECORD_FILE, read_plain, write_file
from lineartime.host import stop_signals
from lineartime.machine import choose_device, compiler_missing, using_threads
from lineartime.runs.metrics import METRICS_FILE, Line, read_metrics
from lineartime.runs.record import Record, lock_run, read_record
from lineartime.screen import SCREEN
from lineartime.training.config import TrainConfig
from lineartime.training.loop import train
from lineartime.units import duration

State = Literal["missing", "interrupted", "finished", "failed"]
"""An interrupted run is to be resumed; one that failed has an error, and is not repeated."""
INTERRUPTED = 130
"""The exit status of a process that was asked to stop."""
OUTCOME_FILE = "outcome.json"
"""The measurements or the error of a run that has ended. An interrupted run has none."""
LOG_FILE = "log.txt"
MEMORY_TRAINING = {"beta2": 0.98, "weight_decay": 0.1}
"""Options of training on tasks: with them, small models leave chance sooner than with those of language models."""
say = partial(print, file=SCREEN, flush=True)
"""Tell what happens meanwhile, on standard error."""


@dataclass(frozen=True)
class Run:
    """What a job has left in its folder."""

    folder: Path
    state: State
    record: Record  # empty before it begins
    speed: float | None  # tokens of a second, the median over the steps after the first quarter
    evaluations: tuple[Line, ...]  # on held-out text during training
    outcome: Mapping[str, Any] = field(repr=False)  # of outcome.json

    @property
    def final(self) -> Line:
        """The last evaluation of a finished run; empty without one."""
        return self.evaluations[-1] if self.state == "finished" and self.evaluations else {}


def read_run(folder: Path) -> Run:
    """Read the results of a job. Raises LineartimeError for files that cannot be read."""
    outcome = read_plain(folder / OUTCOME_FILE) if (folder / OUTCOME_FILE).exists() else {}
    lines = read_metrics(folder) if (folder / METRICS_FILE).exists() else []
    record = read_record(folder) if (folder / RECORD_FILE).exists() else Record({}, ())
    state: State = "interrupted" if list_checkpoints(folder) else "missing"
    if outcome:
        state = "failed" if outcome.get("error") else "finished"
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    speed = statistics.median(speeds[len(speeds) // 4 :]) if speeds else None
    evaluations = tuple(line for line in lines if "validation_loss" in line and line["step"])
    return Run(folder, state, record, speed, evaluations, outcome)


def choices(plan: Plan) -> list[tuple[str, float]]:
    """The optimisers and rates among which trials choose; if there is one alone, no trial is needed."""
    return [(optimizer, rate) for optimizer, rates in plan.rates.items() for rate in rates]


def read_trials(plan: Plan, candidate: Candidate) -> dict[tuple[str, float], Run]:
    """The runs that try the rates of all optimisers for a candidate."""
    return {(name, rate): read_run(candidate.folder / f"{name}-tune-{rate:g}") for name, rate in choices(plan)}


def best_trial(trials: Mapping[tuple[str, float], Run]) -> tuple[str, float] | None:
    """The optimiser and the rate with the lowest loss on held-out text, as soon as all are tried; None if all failed, too."""
    if len(trials) == 1:
        return next(iter(trials))
    if any(run.state in ("missing", "interrupted") for run in trials.values()):
        return None
    losses = {tried: run.final["validation_loss"] for tried, run in trials.items() if run.final}
    return min(losses, key=losses.__getitem__, default=None)


def read_speed(plan: Plan, candidate: Candidate, optimizer: str) -> float | None:
    """The tokens per second of a candidate with an optimiser: the median of the measured rounds; None before the first."""
    runs = [read_run(candidate.folder / f"{optimizer}-speed-{number}") for number in range(plan.scale.speed_rounds)]
    speeds = [run.speed for run in runs if run.state == "finished" and run.speed]
    return statistics.median(speeds) if speeds else None


def all_jobs(plan: Plan) -> Iterator[Job]:
    """Every selected job of an experiment, in order, complete as far as the results are there that it follows from.

    Time decides nothing after the speeds, which are measured in rounds over all arms, so that a slow minute of the machine
    slows all.
    """
    for setting, candidates in plan.selected.items():
        seeds = {each.folder: plan.config.seeds or each.arm.seeds for each in candidates}
        pairs = list(product(candidates, plan.rates))
        for number, (each, optimizer) in product(range(plan.scale.speed_rounds if plan.config.budget else 0), pairs):
            rates, few = plan.rates[optimizer], plan.scale.speed_steps
            options = _training(plan, each, optimizer, rates[len(rates) // 2], 0, few)
            short = {"eval_every": few, "eval_windows": 1}
            yield Job(each.folder / f"{optimizer}-speed-{number}", "speed", setting, options | short)
        for each, (optimizer, rate) in product(candidates, choices(plan) if len(choices(plan)) > 1 else ()):
            steps = _steps(plan, each, optimizer, plan.config.tuning)
            if steps and plan.config.scale != "trial":
                steps = max(steps, min(MIN_TRIAL_STEPS, MAX_TRIAL_RATIO * steps))
            options = _training(plan, each, optimizer, rate, 0, steps) | {"eval_every": steps}
            yield Job(each.folder / f"{optimizer}-tune-{rate:g}", "tune", setting, options)
        for seed, each in product(range(max(seeds.values(), default=0)), candidates):
            if seed < seeds[each.folder]:
                yield _final_job(plan, each, seed)


def _training(plan: Plan, candidate: Candidate, optimizer: str, rate: float, seed: int, steps: int | None) -> dict[str, Any]:
    """The options of training of a candidate."""
    context, scale = candidate.setting.context, plan.scale
    return {
        **candidate.options,
        **catalogue.OPTIMIZERS[optimizer],
        **(MEMORY_TRAINING if candidate.setting.task else {}),
        "context_length": context,
        "tokens_per_batch": max(scale.tokens_per_batch, context),
        "batch_size": max(1, scale.tokens_at_once // context),
        "learning_rate": rate,
        "steps": steps,
        "seed": seed,
        "eval_every": None if steps is None else max(1, -(-steps // scale.evaluations)),
        "eval_windows": max(1, scale.validation_tokens // context),
    }


def _steps(plan: Plan, candidate: Candidate, optimizer: str, seconds: float | None) -> int | None:
    """The steps that are given, or that take these seconds; None before the speed is measured."""
    if seconds is None:
        return plan.config.steps
    speed, tokens = read_speed(plan, candidate, optimizer), max(plan.scale.tokens_per_batch, candidate.setting.context)
    return None if speed is None else max(2, round(seconds * speed / tokens))


def _final_job(plan: Plan, candidate: Candidate, seed: int) -> Job:
    """The run of a seed with the optimiser and the rate that the trials choose."""
    folder, setting, longest = candidate.folder / f"seed-{seed}", candidate.setting, candidate.model.longest_sequence
    trials = read_trials(plan, candidate)
    best = best_trial(trials)
    if best is None:
        ended = all(run.state in ("finished", "failed") for run in trials.values())
        why = "all of its trials failed" if ended else "not all of its trials have ended"
        problem = f"{candidate.arm.name} ({setting}) has no learning rate: {why}."
        return Job(folder, "run", setting, {}, problem=problem)
    options = _training(plan, candidate, *best, seed, _steps(plan, candidate, best[0], plan.config.budget))
    contexts = dict.fromkeys((*plan.experiment.tested_at, *plan.config.longer))
    tests = tuple(times for times in contexts if longest is None or times * setting.context <= longest)
    return Job(folder, "run", setting, options, tests, plan.scale.test_tokens)


def run_all(plan: Plan) -> list[str]:
    """Run the selected jobs that have not finished, one after the other, each in a process of its own.

    Returns a sentence for each run that is not as it should be. Raises LineartimeError for a missing device or compiler, and
    KeyboardInterrupt as soon as a run that was asked to stop has done so.
    """
    missing = compiler_missing(choose_device(plan.config.device))
    if missing and plan.config.compile == "on":
        raise ArgumentError("compile", f"is on, but {missing}: install g++, or use off.")
    problems: dict[str, None] = {}  # each once: no rate is a problem of all seeds
    with lock_run(plan.folder):
        write_file(plan.folder / PLAN_FILE, json.dumps(plan_options(plan.config), indent=1) + "\n")
        jobs = list(all_jobs(plan))
        left = [job for job in jobs if read_run(job.folder).state in ("missing", "interrupted")]
        given = {"tune": plan.config.tuning or 0, "run": plan.config.budget or 0}
        seconds = sum(given.get(job.kind, 0) for job in left)
        say(f"{len(left)} of {len(jobs)} jobs are left{f': {duration(seconds)} of training' if seconds else ''}")
        for job in all_jobs(plan):  # anew: options follow from the results of the jobs before
            problem = job.problem
            if not problem and job.options.get("steps", 1) is not None:  # otherwise, that its speed is missing is told
                problem = _do(job)
            if problem and problem not in problems:
                problems[problem] = None
                say(f"  {problem}")
    return [*problems]


def _do(job: Job) -> str:
    """Do a job unless it has ended, and return a sentence if it is not as it should be."""
    run = read_run(job.folder)
    if run.state in ("missing", "interrupted"):
        steps = f", {job.options['steps']:,} steps" if job.options.get("steps") else ""
        say(f"{'resuming ' if run.state == 'interrupted' else ''}{job.name}{steps}")
        status = in_own_process(job)
        run = read_run(job.folder)
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        if run.state in ("missing", "interrupted"):
            return f"{job.name} {_why(job.folder / LOG_FILE, status)}"
        if job.kind == "speed" and run.speed is not None:
            say(f"  {run.speed:,.0f} tokens/s")
        elif "validation_accuracy" in run.final:
            say(f"  {run.final['validation_accuracy']:.1%} of the answers on held-out text")
        elif run.final:
            say(f"  {run.final['validation_loss']:.4f} nats on held-out text")
    return f"{job.name} failed: {run.outcome['error']}" if run.state == "failed" else ""


def _why(log: Path, status: int) -> str:
    """Why a process left no outcome: the last line of its output, if it ended by itself."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if status == 1 and log.exists() else []
    return f"ended with an error: {lines[-1]}" if lines else f"ended with status {status}: see {log}."


def in_own_process(job: Job) -> int:
    """Do a job in a process of its own, with its output in a file. A request to stop is passed on to it.

    Returns:
        Its exit status, or that of an interrupt if there was one, even if the job has ended.
    """
    with reporting_file_errors("write", job.folder):
        job.folder.mkdir(parents=True, exist_ok=True)
    forks = sys.platform == "linux"  # elsewhere, libraries of the system may not be forked
    context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload([__name__, "matplotlib.figure"])  # what takes seconds to import, once for all
    process = context.Process(target=work, args=(job,))
    asked: list[int] = []

    def request(number: int, _frame: object) -> None:
        asked.append(number)
        if process.pid is not None:
            os.kill(process.pid, signal.SIGINT)

    before = {number: signal.signal(number, request) for number in stop_signals()}
    try:
        process.start()
        process.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return INTERRUPTED if asked else process.exitcode or 0


def work(job: Job) -> None:
    """Do a job in this process, and exit: with 0, also for a run that failed; 1 to be tried again; 130 if interrupted."""
    with suppress(OSError, AttributeError):
        os.setpgrp()  # Ctrl-C reaches the parent alone, which passes it on once
    with (job.folder / LOG_FILE).open("a") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        status = 0 if perform(job) else INTERRUPTED
    except KeyboardInterrupt:
        status = INTERRUPTED
    except Exception as error:  # whatever it is, the other runs continue, and the report tells it
        print(typed_first_line(error), file=SCREEN)
        status = 1
    sys.exit(status)


def _end_with_parent() -> None:
    """Stop after the current step, which is saved, when the process that started this one has ended."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os.kill(os.getpid(), signal.SIGINT)


def perform(job: Job) -> bool:
    """Do a job, and write its outcome; return whether it has ended, and was not interrupted.

    That training diverges is an outcome: the same steps would diverge again. After any other error, such as a full disk, which
    is raised, the next call tries again.
    """
    try:
        outcome = memory.train_on_task(job) if job.setting.task else _train(job)
    except DivergedError as error:
        outcome = {"error": str(error)}
        print(error, file=SCREEN)
    if outcome is None:
        return False
    write_file(job.folder / OUTCOME_FILE, json.dumps({"kind": job.kind, **outcome}, indent=1) + "\n")
    return True


def _train(job: Job) -> dict[str, Any] | None:
    """Train on text, or resume, and measure the last model on the beginning of the test split; None if interrupted."""
    if list_checkpoints(job.folder):
        trained = train(out=job.folder, resume=True)
    else:
        trained = train(TrainConfig.from_dict({**job.options, "out": str(job.folder)}))
    if not trained.finished:
        return None
    config, tests = TrainConfig.from_dict(read_record(job.folder).options), []
    with using_threads(config.threads):
        for times in job.tests:
            length = config.context_length * times
            found = evaluate(
                job.folder,
                checkpoint="last",
                context_length=length,
                batch_size=max(1, config.batch_size * config.context_length // length),
                max_tokens=max(job.test_tokens, length),
                device=config.device,
                precision=config.precision,
                cache=config.cache,
            )
            measures = {name: getattr(found, name) for name in ("loss", "bits_per_byte", "word_perplexity", "tokens")}
            tests.append({"name": memory.test_name(times), "context_length": length, **measures})
    for checkpoint in list_checkpoints(job.folder)[: -1 if job.kind == "run" else None]:  # no longer needed
        shutil.rmtree(checkpoint, ignore_errors=True)
    return {"tests": tests}
