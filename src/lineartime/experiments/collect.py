"""Collect the results of an experiment from the folders of its runs as plain data: the content of report.json."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from lineartime.experiments import catalogue
from lineartime.experiments.config import TEXT_OPTIONS
from lineartime.experiments.definitions import Job, Setting
from lineartime.experiments.folder import plan_options
from lineartime.experiments.paper import SOURCE, paper_loss, paper_numbers
from lineartime.experiments.plan import Contender, Plan
from lineartime.experiments.report_data import Report, RunData, SettingRows, SystemRow, baseline_row
from lineartime.experiments.results import Run, Tuning, best_tuning, read_run, read_speed, read_tuning, seconds_to
from lineartime.host import threads_in_words
from lineartime.runs.record import texts_of
from lineartime.training.config import TrainConfig


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
    missing = [f"{run.job.name}{marks[run.state]}" for run in runs if run.state in marks]
    problems = [run.problem for run in runs if run.problem]
    processes = [process for run in runs for process in _processes(run)]
    times = [time for _, time in processes if time]
    return {
        "experiment": plan.config.name,
        "title": plan.experiment.title,
        "question": plan.experiment.question,
        "scale": plan.config.scale,
        "options": plan_options(plan.config) | given | _tasks(plan),
        "complete": not missing and not problems,
        "missing": missing,
        "problems": problems,
        "paper": SOURCE,
        "baseline": plan.experiment.baseline,
        "machines": list(dict.fromkeys(machine for machine, _ in processes)),
        "precisions": sorted({precision for run in runs for precision in _precisions(run)}),
        "started": [min(times), max(times)] if times else [],
        "texts": {each.label: _text(plan, each) for each in plan.settings if each.reads_text and kind != "latency"},
        "tests": [test.name for test in plan.experiment.tests],
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


def _text(plan: Plan, setting: Setting) -> str:
    return ", ".join(_names(texts_of(plan.contenders_of(setting)[-1].options)))


def _processes(run: Run) -> Iterator[tuple[str, str | None]]:
    """The machine and the start of each process of a run."""
    if machine := run.outcome.machine:  # of latency
        where = machine.get("gpu") or f"{machine.get('cpu')}, {threads_in_words(machine.get('threads'))}"
        yield f"{where}; torch {machine.get('torch')}, Python {machine.get('python')}", run.outcome.time
    for each in run.record.processes:
        where = ", ".join(each.machine.gpus) or f"{each.machine.processor}, {threads_in_words(each.machine.threads)}"
        yield f"{where}; torch {each.versions.get('torch')}, Python {each.versions.get('python')}", each.time


def _precisions(run: Run) -> set[str]:
    """The precisions of matrix products in a run."""
    trained = {str(run.options["precision"])} if "precision" in run.options else set()
    return trained | {entry.dtype for entry in run.outcome.entries}


def _qualities(plan: Plan, setting: Setting, seen: list[Run]) -> list[SystemRow]:
    """A row for each arm, or for each arm and optimiser. The runs that are read join those that were `seen`."""
    rows: list[SystemRow] = []
    for contender in plan.contenders_of(setting):
        tunings = [read_tuning(plan, contender, optimizer) for optimizer in plan.config.optimizers if plan.tunes]
        seen += [run for tuning in tunings for run in tuning.runs.values()]
        shown = tunings if plan.experiment.each_optimizer else [best_tuning(tunings)]
        rows += [_row(plan, contender, tunings, each, seen) for each in shown]
    add_relative_losses(plan, rows)
    return rows


def _shared(plan: Plan, contender: Contender) -> SystemRow:
    """What a row says of an arm before anything has run."""
    experiment = plan.experiment
    return {
        "name": contender.arm.name,
        "arm": contender.arm.name,
        "parameters": contender.parameters,
        "parameters_over_first": contender.parameters / plan.contenders_of(contender.setting)[0].parameters - 1,
        "paper": paper_numbers(experiment.paper_tables, contender.arm.paper_row, contender.setting, experiment.task),
    }


def _row(plan: Plan, contender: Contender, tunings: list[Tuning], chosen: Tuning | None, seen: list[Run]) -> SystemRow:
    """An arm in a setting: its grid, its choice and its runs."""
    optimizer, best = ("adamw", None) if chosen is None else (chosen.optimizer, chosen.best)
    runs = list(_runs(plan, contender, partial(plan.final_job, contender, optimizer)))
    trained = next((run.options for run in runs if run.options), {})  # with what trials chose then
    rate = trained.get("learning_rate", best)
    if trained and plan.tunes:
        optimizer = _optimizer_of(plan, trained, optimizer)
    if chosen is not None and best is not None and (optimizer, rate) != (chosen.optimizer, best):
        choice = f"trained with {optimizer} {rate:g}, but the trials choose {chosen.optimizer} {best:g} now"
        problem = f"{choice}: delete its folder, and run again."
        runs = [replace(run, problem=run.problem or f"{run.job.name} {problem}") if run.options else run for run in runs]
    seen += runs
    speed = read_speed(plan, contender, optimizer) if plan.tunes else None
    grids = {tuning.optimizer: tuning.runs for tuning in tunings}
    rates = list(grids.get(optimizer, ()))
    shared = _shared(plan, contender)
    if plan.experiment.each_optimizer and len(plan.config.optimizers) > 1:
        shared["name"] += f", {optimizer}"
    return {
        **shared,
        "system": contender.arm.system,
        "override": list(contender.options["override"]),
        "optimizer": optimizer if chosen is not None or not plan.tunes else None,
        "rate": rate,
        "rate_at_edge": len(rates) > 1 and rate in (min(rates), max(rates)),
        "grid": {name: {f"{each:g}": _cell(run) for each, run in tried.items()} for name, tried in grids.items()},
        "trial_steps": {
            name: next((run.options["steps"] for run in tried.values() if run.options), None) for name, tried in grids.items()
        },
        "tokens_per_second": speed,
        "runs": [_run(run, seed, speed) for seed, run in enumerate(runs)],
        "chunk_size": next(filter(None, (mixer.options.get("chunk_size") for mixer in contender.model.mixers)), None),
        "paper_loss": paper_loss(shared["paper"]),
    }


def _runs(plan: Plan, contender: Contender, job_of: Callable[[int], Job]) -> Iterator[Run]:
    """The run of each seed of the experiment, and of further ones, which `seeds` has asked for, that have begun."""
    for seed in count():
        job = job_of(seed)
        if seed >= plan.seeds(contender.arm) and not job.folder.exists():
            return
        yield read_run(job)


def _optimizer_of(plan: Plan, trained: Mapping[str, Any], likely: str) -> str:
    """The optimiser with whose options a run was trained; the `likely` one if that is one of several, or if there is none."""
    optimizers = {name: catalogue.OPTIMIZERS[name].options for name in plan.config.optimizers}
    usual = {option: getattr(TrainConfig, option) for options in optimizers.values() for option in options}
    found = [name for name, own in optimizers.items() if all(trained[each] == own.get(each, usual[each]) for each in usual)]
    return found[0] if found and likely not in found else likely


def _cell(run: Run) -> float | str:
    """The result of a trial: its loss on held-out text in nats per token, or the state of its run."""
    return run.final.loss if run.final is not None else run.state


def _run(run: Run, seed: int, speed: float | None) -> RunData:
    """The data of a run. Its seconds follow from the speed that was measured alone, if there is one."""
    final = run.final
    tokens_per_step: int = run.options.get("tokens_per_batch") or 0
    points = [point._replace(seconds=point.step * tokens_per_step / speed) if speed else point for point in run.points]
    return {
        "seed": seed,
        "folder": run.job.folder.name,
        "state": run.state,
        "steps": run.options.get("steps"),
        "tokens": None if final is None else final.step * tokens_per_step,
        "planned_seconds": run.job.seconds,
        "seconds": None if final is None else points[-1].seconds,
        "taken_seconds": None if final is None else final.seconds,
        "loss": None if final is None else final.loss,
        "bits_per_byte": None if final is None else final.bits_per_byte,
        "curve": points,
        "tests": [{name: value for name, value in asdict(test).items() if name != "text"} for test in run.outcome.tests],
    }


def add_relative_losses(plan: Plan, rows: list[SystemRow]) -> None:
    """Add to each row its loss relative to the baseline's, and for each seed its speed-up."""
    base = baseline_row(rows, plan.experiment.baseline)
    for row in rows:
        pairs = list(zip(row["runs"], base["runs"] if base else [], strict=False))  # seed by seed
        both = [(run["loss"], other["loss"]) for run, other in pairs if run["loss"] is not None and other["loss"] is not None]
        row["relative_loss"] = sum(loss for loss, _ in both) / sum(other for _, other in both) - 1 if both else None
        over_paper = _ratio(row["paper_loss"], base["paper_loss"] if base else None)
        row["paper_relative_loss"] = None if over_paper is None else over_paper - 1
        row["speedups"] = [_speedup(run, other) for run, other in pairs]


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def _speedup(run: RunData, baseline: RunData) -> float | None:
    """The time in which the baseline reaches its final quality, divided by the run's; None if the run does not reach it."""
    quality = baseline["loss"]
    if quality is None:
        return None
    needed, of_baseline = (seconds_to(each["curve"], quality) for each in (run, baseline))
    return None if needed is None or of_baseline is None else of_baseline / needed


def _memories(plan: Plan, setting: Setting, seen: list[Run]) -> list[SystemRow]:
    """A row for each arm: the runs of the rate with the best mean accuracy on held-out texts."""
    rows: list[SystemRow] = []
    for contender in plan.contenders_of(setting):
        tried = {rate: list(_runs(plan, contender, partial(plan.memory_job, contender, rate))) for rate in plan.config.rates}
        if setting in plan.asked or any(run.state != "missing" for runs in tried.values() for run in runs):
            seen += [run for runs in tried.values() for run in runs]
        accuracy = {rate: _mean(run.final.accuracy for run in runs if run.final) for rate, runs in tried.items()}
        found = {rate: value for rate, value in accuracy.items() if value is not None}
        best = max(found, key=found.__getitem__, default=plan.config.rates[0])
        runs = tried[best]
        rows.append(
            {
                **_shared(plan, contender),
                "system": contender.arm.system,
                "override": list(contender.options["override"]),
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
    for contender in plan.contenders_of(setting):
        found = measured.get(contender.options["preset"])
        seconds = None if found is None else found.median_seconds
        rows.append(
            {
                **_shared(plan, contender),
                "problem": None if found is None else found.problem,
                "microseconds_per_token": None if found is None else found.microseconds_per_token,
                "milliseconds": None if seconds is None else 1e3 * seconds,
                "precision": None if found is None else found.dtype,
            }
        )
    base = next((row for row in rows if row["arm"] == plan.experiment.baseline), None)
    for row in rows:
        row["relative"] = _ratio(row["milliseconds"], base["milliseconds"] if base else None)
        row["paper_relative"] = _ratio(row["paper"].get("latency_ms"), base["paper"].get("latency_ms") if base else None)
    return rows
