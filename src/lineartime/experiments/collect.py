"""The content of report.json: the results of all runs as plain data, with the paper's numbers from paper_tables.json."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict

from lineartime.choices import ScaleName, Task
from lineartime.experiments.catalogue import Job, Setting
from lineartime.experiments.config import TEXT_OPTIONS
from lineartime.experiments.plan import Candidate, Plan, plan_options
from lineartime.experiments.runner import Run, State, all_jobs, best_tuning, read_run, read_speed, read_tunings, seconds_to
from lineartime.host import threads_in_words
from lineartime.runs.record import texts_of

TestMetric = Literal["loss", "bits_per_byte", "word_perplexity", "accuracy"]


class RunData(TypedDict):
    """The run of a system with one seed; None for what it does not have yet."""

    seed: int
    state: State
    steps: int | None
    seconds: float | None  # of training, at the speed that was measured alone
    loss: float | None  # nats per token on held-out text, at the end
    bits_per_byte: float | None  # the same in bits per byte; None for masked tokens
    curve: list[Any]  # the evaluations, each a `Point`; in a report that was read, lists of the same numbers
    tests: list[dict[str, Any]]  # each `FinalResult`, without its text


Metric = Callable[[RunData], float | None]
"""A number of a run, if it has it."""


class SystemRow(TypedDict, total=False):
    """An arm in a setting: its runs, or the time of its steps."""

    name: str  # the arm
    parameters: int
    parameters_over_first: float  # the relative difference from those of the first arm
    paper: dict[str, float]  # the paper's numbers: "pplx", "latency_ms" and "speedup", as far as it has them
    override: list[str]  # what differs from the preset of the size tiny
    # Of runs:
    optimizer: str | None  # of its runs, chosen by the trials, as is the rate; None before
    rate: float | None
    rate_at_edge: bool  # whether the rate is at an end of the grid
    grid: dict[str, dict[str, float | str]]  # by optimiser and rate: the trial's loss in nats per token, or its state
    trial_steps: dict[str, int | None]  # by optimiser
    tokens_per_second: float | None  # the speed that was measured alone
    runs: list[RunData]  # one for each seed
    paper_loss: float | None  # in nats
    relative_loss: float | None  # the relative difference from the baseline's
    paper_relative_loss: float | None
    speedups: list[float | None]  # by seed of both: the baseline's time to its final quality over the time of this system to it
    # Of runs on tasks, whose trials of a rate are runs with accuracies; means over the seeds:
    state_bytes: int | None  # of a stream after a text
    step_seconds: float | None  # of training
    decode_seconds: float | None  # of a further token
    # Of steps, forward and backward:
    problem: str | None  # why their time could not be measured
    microseconds_per_token: float | None  # the median
    milliseconds: float | None
    precision: str | None  # of matrix products
    relative: float | None  # the time over the baseline's
    paper_relative: float | None


class SettingRows(TypedDict):
    """The systems in a setting."""

    label: str  # the name of its folder
    name: str  # in words
    text: str
    context: int
    rows: list[SystemRow]


class Report(TypedDict):
    """The content of report.json."""

    experiment: str
    scale: ScaleName
    options: dict[str, Any]  # what its runs depend on, by the names of `reproduce`; texts are names of files
    complete: bool
    missing: list[str]  # runs that were asked for
    problems: list[str]  # a sentence for each run that failed or is damaged
    machines: list[str]
    precisions: list[str]  # of matrix products
    started: list[str]  # when the first and the last run began
    texts: dict[str, str]  # the files of each setting
    settings: list[SettingRows]


def baseline_row(rows: Iterable[SystemRow], baseline: str) -> SystemRow | None:
    """The row of the baseline; None if there is none."""
    return next((row for row in rows if row["name"] == baseline), None)


def values_of_row(row: SystemRow, metric: Metric) -> list[float]:
    """The values of a metric over the seeds of a row that have one."""
    return [value for run in row["runs"] if (value := metric(run)) is not None]


def metric_of_test(name: str, metric: TestMetric) -> Metric:
    """A metric of a run: a number of one of its tests."""
    return lambda run: next((test[metric] for test in run["tests"] if test["name"] == name), None)


def metric_of_report(plan: Plan) -> tuple[TestMetric, str]:
    """The metric by which systems are compared on the test split, and its unit."""
    return ("loss", "nats per masked token") if plan.experiment.task == "mlm" else ("bits_per_byte", "bits per byte")


def steps_to(run: RunData, accuracy: float) -> float | None:
    """The steps after which the held-out texts of a task first had this accuracy; None if they never had."""
    return next((point[0] for point in run["curve"] if point[4] is not None and point[4] >= accuracy), None)


def settings_with_results(report: Report) -> list[SettingRows]:
    """The settings of which anything has run, each with the systems that have. Rows of latency have, as they run together."""

    def has_begun(row: SystemRow) -> bool:
        tried = [cell for grid in row.get("grid", {}).values() for cell in grid.values()]
        return "runs" not in row or any(state != "missing" for state in [*tried, *(run["state"] for run in row["runs"])])

    found = [SettingRows({**setting, "rows": list(filter(has_begun, setting["rows"]))}) for setting in report["settings"]]
    return [setting for setting in found if setting["rows"]]


@cache
def paper_tables() -> dict[str, Any]:
    """The tables of the paper by name, each for one kind of text or for any.

    A row has values by context: "pplx", the perplexity, "latency_ms" of a step on 64 TPU-v4 cores, and "speedup", the time to
    the final quality of the baseline, null where that is not reached or not legible. Rows of ablations have a perplexity by
    task. Costs are differences of perplexities.
    """
    tables: dict[str, Any] = json.loads((files(__package__) / "paper_tables.json").read_text(encoding="utf-8"))
    return tables


def paper_numbers(tables: Sequence[str], row: str, setting: Setting, task: Task = "clm") -> dict[str, float]:
    """What the first of some tables that has a row reports of it in a setting: "pplx", "latency_ms", "speedup"."""
    for table in _tables_of(tables, setting):
        if (values := table["rows"].get(row)) is not None:
            if "context" not in table:
                return {"pplx": values[task]}
            found = {name: _at(setting.context, column, table) for name, column in values.items()}
            return {name: value for name, value in found.items() if value is not None}
    return {}


def paper_cost(tables: Sequence[str], pair: str, setting: Setting) -> float | None:
    """By how much the perplexity of an approximation exceeds that of the exact model; None if the paper has no number."""
    costs = [(table["costs"][pair], table) for table in _tables_of(tables, setting) if "costs" in table]
    return next((_at(setting.context, *each) for each in costs), None)


def _tables_of(names: Sequence[str], setting: Setting) -> list[dict[str, Any]]:
    tables = [paper_tables()[name] for name in names]
    return [table for table in tables if table.get("text", setting.text) == setting.text]


def _at(context: int, values: Sequence[float | None], table: Mapping[str, Any]) -> float | None:
    return dict(zip(table["context"], values, strict=True)).get(context)


def collect(plan: Plan) -> Report:
    """Collect the results of all runs of an experiment, with the paper's numbers."""
    runs: list[Run] = []
    kind = plan.experiment.kind
    rows_of = {"latency": _times, "quality": _qualities, "memory": _memories}[kind]
    settings = [
        SettingRows(label=each.label, name=str(each), text=each.text, context=each.context, rows=rows_of(plan, each, runs))
        for each in plan.settings
    ]
    given = {name: _names(getattr(plan.config, name)) for name in TEXT_OPTIONS}
    marks = {"missing": "", "interrupted": " (interrupted)"}
    asked = {job.folder for _, job in all_jobs(plan)}
    missing = [f"{run.job.name}{marks[run.state]}" for run in runs if run.state in marks and run.job.folder in asked]
    problems = [run.problem for run in runs if run.problem]
    processes = [process for run in runs for process in _processes(run)]
    precisions = {str(run.options["precision"]) for run in runs if "precision" in run.options}
    precisions |= {entry.dtype for run in runs for entry in run.outcome.entries}
    times = [time for _, time in processes if time]
    return {
        "experiment": plan.config.name,
        "scale": plan.config.scale,
        "options": plan_options(plan.config) | given | _tasks(plan),
        "complete": not missing and not problems,
        "missing": missing,
        "problems": problems,
        "machines": list(dict.fromkeys(machine for machine, _ in processes)),
        "precisions": sorted(precisions),
        "started": [min(times), max(times)] if times else [],
        "texts": {
            each.label: ", ".join(_names(texts_of(plan.candidates_of(each)[-1].options)))
            for each in plan.settings
            if each.reads_text and kind != "latency"
        },
        "settings": settings,
    }


def _tasks(plan: Plan) -> dict[str, Any]:
    """The options of the tasks, lengths and pairs that there are."""
    settings = [each for each in plan.settings if each.task]
    found = {
        "tasks": dict.fromkeys(each.task for each in settings),
        "lengths": sorted({each.context for each in settings}),
        "pairs": sorted({each.pairs for each in settings if each.pairs}),
    }
    return {name: list(values) for name, values in found.items() if settings}


def _names(paths: Iterable[str]) -> list[str]:
    """Names of files, because folders mean nothing on other machines."""
    return [Path(path).name for path in paths]


def _processes(run: Run) -> Iterator[tuple[str, str | None]]:
    """The machine and the start of each process of a run."""
    if machine := run.outcome.machine:  # of latency
        where = machine.get("gpu") or f"{machine.get('cpu')}, {threads_in_words(machine.get('threads'))}"
        yield f"{where}; torch {machine.get('torch')}, Python {machine.get('python')}", run.outcome.time
    for each in run.record.processes:
        where = ", ".join(each.machine.gpus) or f"{each.machine.processor}, {threads_in_words(each.machine.threads)}"
        yield f"{where}; torch {each.versions.get('torch')}, Python {each.versions.get('python')}", each.time


def _qualities(plan: Plan, setting: Setting, seen: list[Run]) -> list[SystemRow]:
    """A row for each arm. The runs that are read join those that were `seen`."""
    rows = [_row(plan, candidate, seen) for candidate in plan.candidates_of(setting)]
    add_relative_losses(plan, rows)
    return rows


def _shared(plan: Plan, candidate: Candidate) -> SystemRow:
    """What a row says of an arm before anything has run."""
    experiment = plan.experiment
    return {
        "name": candidate.arm.name,
        "override": list(candidate.options["override"]),
        "parameters": candidate.parameters,
        "parameters_over_first": candidate.parameters / plan.candidates_of(candidate.setting)[0].parameters - 1,
        "paper": paper_numbers(experiment.paper_tables, candidate.arm.paper_row, candidate.setting, experiment.task),
    }


def _row(plan: Plan, candidate: Candidate, seen: list[Run]) -> SystemRow:
    """An arm in a setting: its grid, its choice and its runs."""
    tunings = read_tunings(plan, candidate)
    chosen = best_tuning(tunings)
    optimizer = plan.config.optimizers[0] if chosen is None else chosen.optimizer
    runs = list(_runs(plan, candidate, partial(plan.final_job, candidate, optimizer)))
    seen += [*(run for tuning in tunings for run in tuning.runs.values()), *runs]
    rate = next((run.options["learning_rate"] for run in runs if run.options), None if chosen is None else chosen.best)
    speed = read_speed(plan, candidate, optimizer) if plan.tunes else None
    grids = {tuning.optimizer: tuning.runs for tuning in tunings}
    rates = list(grids.get(optimizer, ()))
    shared = _shared(plan, candidate)
    return {
        **shared,
        "optimizer": optimizer if chosen is not None or not plan.tunes else None,
        "rate": rate,
        "rate_at_edge": len(rates) > 1 and rate in (min(rates), max(rates)),
        "grid": {
            name: {f"{each:g}": run.final.loss if run.final else run.state for each, run in tried.items()}
            for name, tried in grids.items()
        },
        "trial_steps": {
            name: next((run.options["steps"] for run in tried.values() if run.options), None) for name, tried in grids.items()
        },
        "tokens_per_second": speed,
        "runs": [_run(run, seed, speed) for seed, run in enumerate(runs)],
        "paper_loss": math.log(shared["paper"]["pplx"]) if "pplx" in shared["paper"] else None,
    }


def _runs(plan: Plan, candidate: Candidate, job_of: Callable[[int], Job]) -> Iterator[Run]:
    """The run of each seed of the experiment, and of further ones, which `seeds` has asked for, that have begun."""
    for seed in count():
        job = job_of(seed)
        if seed >= plan.seeds(candidate.arm) and not job.folder.exists():
            return
        yield read_run(job)


def _run(run: Run, seed: int, speed: float | None) -> RunData:
    """The data of a run. Its seconds follow from the speed that was measured alone, if there is one."""
    final = run.final
    tokens_per_step: int = run.options.get("tokens_per_batch") or 0
    points = [point._replace(seconds=point.step * tokens_per_step / speed) if speed else point for point in run.points]
    return {
        "seed": seed,
        "state": run.state,
        "steps": run.options.get("steps"),
        "seconds": None if final is None else points[-1].seconds,
        "loss": None if final is None else final.loss,
        "bits_per_byte": None if final is None else final.bits_per_byte,
        "curve": points,
        "tests": [{name: value for name, value in asdict(test).items() if name != "text"} for test in run.outcome.tests],
    }


def add_relative_losses(plan: Plan, rows: list[SystemRow]) -> None:
    """Add to each row its loss relative to the baseline's, and for each seed its speed-up."""
    base = baseline_row(rows, plan.experiment.baseline)
    for row in rows:
        pairs = zip(row["runs"], base["runs"] if base else [], strict=False)  # seed by seed
        both = [
            (run["loss"], other["loss"], _speedup(run, other, other["loss"]))
            for run, other in pairs
            if run["loss"] is not None and other["loss"] is not None
        ]
        row["relative_loss"] = sum(loss for loss, *_ in both) / sum(other for _, other, _ in both) - 1 if both else None
        over_paper = _ratio(row["paper_loss"], base["paper_loss"] if base else None)
        row["paper_relative_loss"] = None if over_paper is None else over_paper - 1
        row["speedups"] = [speedup for *_, speedup in both]


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def _speedup(run: RunData, baseline: RunData, quality: float) -> float | None:
    """The time in which the baseline reaches a quality, divided by the run's; None if the run does not reach it."""
    needed, of_baseline = (seconds_to(each["curve"], quality) for each in (run, baseline))
    return None if needed is None or of_baseline is None else of_baseline / needed


def _memories(plan: Plan, setting: Setting, seen: list[Run]) -> list[SystemRow]:
    """A row for each arm: the runs of the rate with the best mean accuracy on held-out texts."""
    rows: list[SystemRow] = []
    for candidate in plan.candidates_of(setting):
        tried = {rate: list(_runs(plan, candidate, partial(plan.memory_job, candidate, rate))) for rate in plan.config.rates}
        if setting in plan.asked or any(run.state != "missing" for runs in tried.values() for run in runs):
            seen += [run for runs in tried.values() for run in runs]
        accuracy = {rate: _mean(run.final.accuracy for run in runs if run.final) for rate, runs in tried.items()}
        found = {rate: value for rate, value in accuracy.items() if value is not None}
        best = max(found, key=found.__getitem__, default=plan.config.rates[0])
        runs = tried[best]
        rows.append(
            {
                **_shared(plan, candidate),
                "optimizer": plan.config.optimizers[0],
                "rate": best if found else None,
                "rate_at_edge": len(found) > 1 and best in (min(found), max(found)),
                "grid": {plan.config.optimizers[0]: {f"{rate:g}": found.get(rate, tried[rate][0].state) for rate in tried}},
                "runs": [_run(run, seed, None) for seed, run in enumerate(runs)],
                "state_bytes": next((run.outcome.state_bytes for run in runs if run.outcome.state_bytes), None),
                "step_seconds": _mean(run.options["tokens_per_batch"] / run.speed for run in runs if run.speed),
                "decode_seconds": _mean(run.outcome.decode_seconds for run in runs if run.outcome.decode_seconds),
            }
        )
    return rows


def _mean(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.fmean(there) if there else None


def _times(plan: Plan, setting: Setting, seen: list[Run]) -> list[SystemRow]:
    """The time of a step of all arms at a context."""
    run = read_run(plan.latency_job(setting))
    seen.append(run)
    measured = {entry.subject: entry for entry in run.outcome.entries}
    rows: list[SystemRow] = []
    for candidate in plan.candidates_of(setting):
        found = measured.get(candidate.options["preset"])
        rows.append(
            {
                **_shared(plan, candidate),
                "problem": None if found is None else found.problem,
                "microseconds_per_token": None if found is None else found.microseconds_per_token,
                "milliseconds": None if found is None else found.milliseconds,
                "precision": None if found is None else found.dtype,
            }
        )
    base = baseline_row(rows, plan.experiment.baseline)
    for row in rows:
        row["relative"] = _ratio(row["milliseconds"], base["milliseconds"] if base else None)
        row["paper_relative"] = _ratio(row["paper"].get("latency_ms"), base["paper"].get("latency_ms") if base else None)
    return rows
