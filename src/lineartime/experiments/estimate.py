"""List the runs of experiments, and estimate how long they take on this machine."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from lineartime.bench.measure import peak_flops
from lineartime.choices import Device, Precision
from lineartime.experiments import catalogue
from lineartime.experiments.config import ReproduceConfig
from lineartime.experiments.plan import Entry, Job, Plan, make_plan
from lineartime.experiments.results import read_run
from lineartime.experiments.texts import text_notes
from lineartime.machine import choose_device, choose_precision, using_threads
from lineartime.units import duration

SHARE_OF_PEAK = 0.3
"""The share of the peak of matrix products that a training step is assumed to reach."""
START = {"cpu": 8.0, "cuda": 25.0}
"""Seconds that a process needs before its first step; with torch.compile, more."""
COMPILE = 75.0


def describe_all(config: ReproduceConfig) -> Iterator[str]:
    """A line for each experiment at a scale: its name, its runs, and an estimate of the time."""
    for name, experiment in catalogue.EXPERIMENTS.items():
        if config.scale != "trial" and not experiment.settings[config.scale]:
            yield f"{name:20} {experiment.title}: not in the paper"
            continue
        plan = make_plan(replace(config, name=name, systems=(), add=(), contexts=(), texts=()))
        jobs = list(all_jobs(plan))
        seconds = sum(estimated_seconds(plan, *job) for job in jobs)
        yield f"{name:20} {experiment.title}: {_counted(jobs)}, about {duration(seconds)}"


def describe(plan: Plan) -> Iterator[str]:
    """Lines about one experiment: its settings and arms, its runs and their state, and an estimate of the time that is left."""
    yield f"{plan.config.name}: {plan.experiment.title}"
    yield plan.experiment.question
    yield f"scale {plan.config.scale}: {plan.scale.description}"
    jobs, notes = list(all_jobs(plan)), text_notes(plan)
    width = max(len(entry.arm.name) for entry in plan.entries)
    for setting in plan.settings:
        selected = list(filter(plan.is_selected, plan.entries_of(setting)))
        if selected:
            note = notes.pop(setting.text, "")  # once for each text
            yield f"{setting} ({note})" if note else f"{setting}"
        for entry in selected:
            own = [job for job in jobs if job[0] == entry]
            spent = sum(estimated_seconds(plan, *job) for job in own)
            if own and own[0][1].kind != "latency":
                options = " ".join([str(entry.options["preset"]), *map(str, entry.options["override"])])
                what = f"{_counted(own)}, about {duration(spent)}"
                yield f"  {entry.arm.name:{width}} {entry.parameters / 1e6:7.2f} M  {what}  {options}"
            else:
                yield f"  {entry.arm.name:{width}} {entry.parameters / 1e6:7.2f} M"
    left = [(entry, job) for entry, job in jobs if read_run(job).state in ("missing", "interrupted")]
    yield f"{_counted(jobs)}, of which {len(jobs) - len(left)} have ended"
    yield f"about {duration(sum(estimated_seconds(plan, *job) for job in left))} are left; {HOW}"


HOW = "an estimate, from the planned time of training and the speed of matrix products here, for an otherwise idle machine"


def all_jobs(plan: Plan) -> Iterator[tuple[Entry, Job]]:
    """Every selected process of an experiment with its entry; of latency, the first entry stands for all."""
    for setting in plan.settings:
        entries = [entry for entry in plan.entries_of(setting) if plan.is_selected(entry)]
        if plan.experiment.kind == "latency":
            yield from ((entry, plan.latency_job(setting)) for entry in entries[:1])
            continue
        for entry in entries:
            for optimizer in plan.optimizers if plan.tunes else ():
                yield from ((entry, plan.speed_job(entry, optimizer, number)) for number in range(plan.scale.speed_rounds))
                for rate in plan.rates(optimizer):
                    yield entry, plan.tuning_job(entry, optimizer, rate)
            for optimizer in plan.final_optimizers(plan.optimizers[0]):
                for seed in range(plan.seeds_now(entry.arm)):
                    yield entry, plan.final_job(entry, optimizer, seed)


def estimated_seconds(plan: Plan, entry: Entry, job: Job) -> float:
    """An estimate of how long a process takes."""
    start = START.get(choose_device(plan.config.device).type, 10.0)
    start += COMPILE if plan.compile == "on" and plan.tunes else 0.0
    if job.kind == "latency":
        tokens: int = 8 * max(job.options["tokens_per_batch"], entry.setting.context)
        return start + sum(tokens / _tokens_per_second(plan, arm) for arm in plan.entries_of(entry.setting))
    speed = _tokens_per_second(plan, entry)
    batch: int = job.options["tokens_per_batch"]
    if not plan.tunes:
        steps: int = job.options["steps"]
        return start + steps * batch / speed
    if job.kind == "speed":
        return start + plan.scale.speed_steps * batch / speed
    evaluations = 1 + (plan.scale.evaluations if job.kind == "run" else 1)
    tokens = evaluations * plan.scale.validation_tokens + len(job.tests) * plan.scale.test_tokens
    return start + (job.seconds or 0.0) + tokens / (3 * speed)  # an evaluation has no backward pass


def _tokens_per_second(plan: Plan, entry: Entry) -> float:
    return SHARE_OF_PEAK * _peak(plan.config.device, plan.config.precision, plan.config.threads) / (6 * entry.parameters)


@cache
def _peak(where: Device, precision: Precision, threads: int | None) -> float:
    device = choose_device(where)
    with using_threads(threads):
        return peak_flops(device, choose_precision(precision, device), 0.1)


def _counted(jobs: list[tuple[Entry, Job]]) -> str:
    kinds: list[str] = [job.kind for _, job in jobs]
    one = {"run": "run", "tune": "trial", "speed": "measurement of speed", "latency": "measurement of latency"}
    more = {"run": "runs", "tune": "trials", "speed": "measurements of speed", "latency": "measurements of latency"}
    counts = {kind: kinds.count(kind) for kind in one}
    return ", ".join(f"{count} {(more if count > 1 else one)[kind]}" for kind, count in counts.items() if count)
