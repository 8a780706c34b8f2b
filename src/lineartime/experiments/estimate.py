"""List the runs of experiments, and estimate how long they take on this machine."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from lineartime.bench.measure import peak_flops
from lineartime.choices import Device, Precision
from lineartime.experiments import catalogue
from lineartime.experiments.config import ReproduceConfig
from lineartime.experiments.definitions import Job, JobKind
from lineartime.experiments.memory import step_seconds
from lineartime.experiments.plan import Contender, Plan, make_plan
from lineartime.experiments.results import read_run
from lineartime.experiments.runner import all_jobs
from lineartime.machine import choose_device, choose_precision, using_threads
from lineartime.models.config import ModelConfig
from lineartime.runs.record import texts_of
from lineartime.units import duration

SHARE_OF_PEAK = 0.3
"""The share of the peak of matrix products that a training step is assumed to reach."""
START = {"cpu": 8.0, "cuda": 25.0}
"""Seconds that a process needs before its first step; with torch.compile, more."""
COMPILE = 75.0
NAMES: dict[JobKind, tuple[str, str]] = {
    "run": ("run", "runs"),
    "tune": ("trial", "trials"),
    "speed": ("measurement of speed", "measurements of speed"),
    "latency": ("measurement of latency", "measurements of latency"),
    "memory": ("run", "runs"),
}
"""What one job and more of a kind are called."""
HOW = "an estimate, from the planned training and the speed of this machine, for an otherwise idle one"


def describe_all(config: ReproduceConfig) -> Iterator[str]:
    """A line for each experiment at a scale: its name, its runs, and an estimate of the time."""
    for name, experiment in catalogue.EXPERIMENTS.items():
        if config.scale != "trial" and not experiment.settings[config.scale]:
            yield f"{name:20} {experiment.title}: not in the paper"
            continue
        plan = make_plan(replace(config, name=name, systems=(), add=(), contexts=(), texts=()))
        yield f"{name:20} {experiment.title}: {_counted(plan, list(all_jobs(plan)))}"
    yield f"The times are {HOW}."


def describe(plan: Plan) -> Iterator[str]:
    """Lines about one experiment: its settings and arms, its runs and their state, and an estimate of the time that is left."""
    yield f"{plan.config.name}: {plan.experiment.title}"
    yield plan.experiment.question
    yield f"scale {plan.config.scale}: {plan.scale.description}"
    jobs, notes = list(all_jobs(plan)), text_notes(plan)
    width = max(len(each.arm.name) for each in plan.contenders)
    for setting in plan.settings:
        selected = plan.selected(setting)
        if selected:
            note = notes.pop(setting.text, "")  # once for each text
            yield f"{setting} ({note})" if note else f"{setting}"
        for each in selected:
            line = f"  {each.arm.name:{width}} {each.parameters / 1e6:7.2f} M"
            if plan.experiment.kind != "latency":
                own = _counted(plan, [(contender, job) for contender, job in jobs if contender is each])
                line += f"  {own}  {' '.join([each.options['preset'], *each.options['override']])}"
            yield line
    left = _left(jobs)
    yield f"{_counted(plan, jobs, time=False)}, of which {len(jobs) - len(left)} have ended"
    yield f"about {_time(plan, left)} are left; {HOW}"


def time_left(plan: Plan) -> str:
    """A line that says how many runs are left, and for about how long; empty if none is."""
    left = _left(list(all_jobs(plan)))
    return f"{_counted(plan, left)} ({HOW})" if left else ""


def _left(jobs: list[tuple[Contender, Job]]) -> list[tuple[Contender, Job]]:
    return [(each, job) for each, job in jobs if read_run(job).state in ("missing", "interrupted")]


def text_notes(plan: Plan) -> dict[str, str]:
    """For the name of each kind of text that the selected runs read, the text that they read, in words.

    Models whose speed is measured read no text.
    """
    notes: dict[str, str] = {}
    for setting in plan.settings if plan.experiment.kind != "latency" else ():
        for each in plan.selected(setting) if setting.reads_text else ():
            other = "" if getattr(plan.config, setting.text) else f"; the option {setting.text} gives another"
            notes[setting.text] = f"text: {', '.join(texts_of(each.options))}{other}"
    return notes


def estimated_seconds(plan: Plan, contender: Contender, job: Job) -> float:
    """An estimate of how long a process takes."""
    start = START.get(choose_device(plan.config.device).type, 10.0)
    start += COMPILE if plan.config.compile == "on" and plan.tunes else 0.0
    batch: int = job.options["tokens_per_batch"]
    if job.kind == "latency":
        tokens = 8 * max(batch, contender.setting.context)
        return start + sum(tokens / _tokens_per_second(plan, each) for each in plan.contenders_of(contender.setting))
    if job.kind == "memory":
        length, rows = contender.setting.context, batch // contender.setting.context
        step = _step_seconds(contender.model.override(vocab_size=256), rows, length, plan.config.device, plan.config.threads)
        tests = plan.scale.evaluations * plan.scale.validation_tokens + len(job.tests) * plan.scale.test_tokens
        return start + (job.seconds or step * job.options["steps"]) + step * tests / (3 * batch)
    speed = _tokens_per_second(plan, contender)
    if not plan.tunes or job.kind == "speed":
        steps: int = job.options["steps"]
        return start + steps * batch / speed
    evaluations = 1 + (plan.scale.evaluations if job.kind == "run" else 1)
    tokens = evaluations * plan.scale.validation_tokens + len(job.tests) * plan.scale.test_tokens
    return start + (job.seconds or 0.0) + tokens / (3 * speed)  # an evaluation has no backward pass


def _tokens_per_second(plan: Plan, contender: Contender) -> float:
    peak = _peak(plan.config.device, plan.config.precision, plan.config.threads)
    return SHARE_OF_PEAK * peak / (6 * contender.parameters)


@cache
def _peak(where: Device, precision: Precision, threads: int | None) -> float:
    device = choose_device(where)
    with using_threads(threads):
        return peak_flops(device, choose_precision(precision, device), 0.1)


@cache
def _step_seconds(model: ModelConfig, rows: int, length: int, where: Device, threads: int | None) -> float:
    with using_threads(threads):
        return step_seconds(model, rows, length, choose_device(where))


def _time(plan: Plan, jobs: list[tuple[Contender, Job]]) -> str:
    return duration(sum(estimated_seconds(plan, *job) for job in jobs))


def _counted(plan: Plan, jobs: list[tuple[Contender, Job]], time: bool = True) -> str:
    """The number of jobs of each kind, and how long they take."""
    counts = Counter(job.kind for _, job in jobs)
    words = [f"{counts[kind]} {more if counts[kind] > 1 else one}" for kind, (one, more) in NAMES.items() if counts[kind]]
    return ", ".join([*words, f"about {_time(plan, jobs)}"] if time else words)
