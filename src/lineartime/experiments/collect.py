"""The results of an experiment as plain data: what report.json holds, and what the tables and pictures show."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

from lineartime.experiments import catalogue
from lineartime.experiments.config import TEXT_OPTIONS
from lineartime.experiments.definitions import Setting
from lineartime.experiments.folder import plan_options
from lineartime.experiments.models import TOLERANCE
from lineartime.experiments.outcome import Measurement
from lineartime.experiments.paper import SOURCE, paper_loss, paper_numbers
from lineartime.experiments.plan import Entry, Plan
from lineartime.experiments.report_data import (
    AnyReport,
    AnyRow,
    LatencyReport,
    LatencyRow,
    LatencySetting,
    QualityReport,
    QualitySetting,
    Report,
    RunData,
    SystemRow,
    TestData,
    TestMetric,
)
from lineartime.experiments.results import Point, Run, Tuning, best_tuning, read_run, read_speed, read_tuning, seconds_to
from lineartime.files import RECORD_FILE
from lineartime.host import threads_in_words
from lineartime.runs.record import Machine, read_record, texts_of
from lineartime.training.config import TrainConfig


def collect(plan: Plan) -> Report:
    """Collect the results of all runs of an experiment, with the paper's numbers."""
    state = _State()
    if plan.experiment.kind == "latency":
        times = [_latency(plan, setting, state) for setting in plan.settings]
        return LatencyReport(**_about(plan, state), settings=times)
    results = [_setting(plan, setting, state) for setting in plan.settings]
    return QualityReport(**_about(plan, state), settings=results)


def _about(plan: Plan, state: "_State") -> AnyReport:
    """What a report says of an experiment, apart from its results."""
    return {
        "experiment": plan.config.name,
        "title": plan.experiment.title,
        "question": plan.experiment.question,
        "scale": plan.config.scale,
        "options": {**plan_options(plan), **{name: _names(getattr(plan.config, name)) for name in TEXT_OPTIONS}},
        "complete": not state.missing and not state.problems,
        "missing": state.missing,
        "problems": state.problems,
        "paper": SOURCE,
        "baseline": plan.experiment.baseline,
        "machines": state.machines,
        "precisions": sorted(state.precisions),
        "started": [min(state.times), max(state.times)] if state.times else [],
        "texts": state.texts,
        "tests": [test.name for test in plan.experiment.tests],
    }


class _State:
    """Missing runs, problems, machines and precisions, collected while runs are read."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.problems: list[str] = []
        self.machines: list[str] = []
        self.precisions: set[str] = set()
        self.times: list[str] = []
        self.texts: dict[str, str] = {}

    def note(self, plan: Plan, run: Run) -> None:
        """Note a run that is not finished, or the machine and the precision of a finished one."""
        name = run.job.folder.relative_to(plan.folder).as_posix()
        if run.state == "missing":
            self.missing.append(name)
        elif run.state == "interrupted":
            self.missing.append(f"{name} (interrupted)")
        elif run.state == "damaged":
            self.problems.append(run.problem)
        elif run.state == "failed":
            self.problems.append(f"{name} failed: {run.problem}")
        self.precisions |= _precisions(run)
        for words, time in _machines(run):
            if words not in self.machines:
                self.machines.append(words)
            self.times = [*self.times, time] if time else self.times


def _machines(run: Run) -> list[tuple[str, str | None]]:
    """The machine and the start of each process of a run."""
    if run.job.kind == "latency":
        found = run.outcome.machine
        where = found.get("gpu") or f"{found.get('cpu')}, {threads_in_words(found.get('threads'))}"
        return [(_described(where, found), run.outcome.time)] if found else []
    if run.state == "damaged" or not (run.job.folder / RECORD_FILE).exists():
        return []
    processes = read_record(run.job.folder).processes
    return [(_described(_where(process.machine), process.versions), process.time) for process in processes]


def _precisions(run: Run) -> set[str]:
    """The precisions of matrix products in a run."""
    if run.job.kind == "latency":
        return {entry.dtype for entry in run.outcome.entries}
    return {str(run.options["precision"])} if "precision" in run.options else set()


def _where(machine: Machine) -> str:
    return ", ".join(machine.gpus) or f"{machine.processor}, {threads_in_words(machine.threads)}"


def _described(where: object, versions: Mapping[str, object]) -> str:
    return f"{where}; torch {versions.get('torch')}, Python {versions.get('python')}"


def _setting(plan: Plan, setting: Setting, state: _State) -> QualitySetting:
    """One setting: a row for each arm, or for each arm and optimiser."""
    rows: list[SystemRow] = []
    for entry in plan.entries_of(setting):
        tunings = [read_tuning(plan, entry, optimizer) for optimizer in plan.optimizers] if plan.tunes else []
        for tuning in tunings:
            for run in tuning.runs.values():
                state.note(plan, run)
        chosen = best_tuning(tunings)
        shown: list[Tuning | None] = [*tunings] if plan.experiment.each_optimizer else [chosen]
        rows += [_row(plan, entry, tunings, each, state) for each in shown]
        state.texts[setting.label] = _text(entry.options)
    add_relative_losses(plan, rows)
    return {"label": setting.label, "name": str(setting), "text": setting.text, "context": setting.context, "rows": rows}


def _names(paths: Iterable[str]) -> list[str]:
    return [Path(path).name for path in paths]


def _text(options: Mapping[str, Any]) -> str:
    """The file names of the texts of a run, because folders mean nothing on other machines."""
    return ", ".join(_names(texts_of(options)))


def _test(measured: Measurement) -> TestData:
    """A test without the path of its text, whose name is in `texts`."""
    return cast("TestData", {name: value for name, value in asdict(measured).items() if name != "text"})


def _runs(plan: Plan, entry: Entry, optimizer: str) -> Iterator[Run]:
    """The run of each seed of the experiment, and of further ones, which `seeds` has asked for, that have begun."""
    for seed in count():
        job = plan.final_job(entry, optimizer, seed)
        if seed >= plan.seeds(entry.arm) and not job.folder.exists():
            return
        yield read_run(job)


def _row(plan: Plan, entry: Entry, tunings: list[Tuning], chosen: Tuning | None, state: _State) -> SystemRow:
    """An arm in a setting: its grid, its choice and its runs."""
    optimizer = "adamw" if chosen is None else chosen.optimizer
    runs = list(_runs(plan, entry, optimizer))
    for run in runs:
        state.note(plan, run)
    trained = next((run.options for run in runs if run.options), {})  # with what trials chose then
    if trained and plan.tunes:
        optimizer = _optimizer_of(plan, trained, optimizer)
    target = plan.entries_of(entry.setting)[0].parameters
    several = plan.experiment.each_optimizer and len(plan.optimizers) > 1
    rate = trained.get("learning_rate", None if chosen is None else chosen.best)
    speed = read_speed(plan, entry, optimizer) if plan.tunes else None
    if chosen is not None and (optimizer, rate) != (chosen.optimizer, chosen.best):
        state.problems.append(_other_choice(plan, runs, f"{optimizer} {rate:g}", f"{chosen.optimizer} {chosen.best:g}"))
    return {
        "name": f"{entry.arm.name}, {optimizer}" if several else entry.arm.name,
        "arm": entry.arm.name,
        "system": entry.arm.system,
        "override": list(entry.options["override"]),
        "parameters": entry.parameters,
        "parameters_over_first": entry.parameters / target - 1,
        "optimizer": optimizer if chosen is not None or not plan.tunes else None,
        "rate": rate,
        "rate_at_edge": any(
            len(tuning.runs) > 1 and rate in (min(tuning.runs), max(tuning.runs))
            for tuning in tunings
            if tuning.optimizer == optimizer
        ),
        "grid": {tuning.optimizer: {f"{each:g}": _cell(run) for each, run in tuning.runs.items()} for tuning in tunings},
        "trial_steps": {tuning.optimizer: _steps_of(tuning) for tuning in tunings},
        "tokens_per_second": speed,
        "runs": [_run(run, seed, speed) for seed, run in enumerate(runs)],
        "chunk_size": entry.model.mixer.options.get("chunk_size"),
        "paper": paper_numbers(plan.experiment.paper_tables, entry.arm.paper_row, entry.setting, plan.experiment.task),
        "paper_loss": paper_loss(plan.experiment.paper_tables, entry.arm.paper_row, entry.setting, plan.experiment.task),
    }


def _optimizer_of(plan: Plan, trained: Mapping[str, Any], likely: str) -> str:
    """The optimiser with whose options a run was trained; the `likely` one if that is one of several, or if there is none."""
    optimizers = {name: catalogue.OPTIMIZERS[name].options for name in plan.optimizers}
    usual = {option: getattr(TrainConfig, option) for options in optimizers.values() for option in options}
    found = [name for name, own in optimizers.items() if all(trained[each] == own.get(each, usual[each]) for each in usual)]
    return found[0] if found and likely not in found else likely


def _other_choice(plan: Plan, runs: Sequence[Run], trained: str, chosen: str) -> str:
    """A sentence for runs that were trained before a trial was repeated."""
    folders = ", ".join(run.job.folder.relative_to(plan.folder).as_posix() for run in runs if run.options)
    return f"{folders} trained with {trained}, but the trials choose {chosen} now: delete these folders, and run again."


def _steps_of(tuning: Tuning) -> int | None:
    """The steps of the trials of an optimiser; None before the first."""
    return next((run.options["steps"] for run in tuning.runs.values() if run.options), None)


def _cell(run: Run) -> float | str:
    """The result of a trial: its loss on held-out text in nats per token, or the state of its run."""
    return run.final.loss if run.final is not None else run.state


def _run(run: Run, seed: int, speed: float | None) -> RunData:
    """The data of a run. Its seconds follow from the speed that was measured alone, if there is one."""
    final = run.final
    tokens_per_batch: int = run.options.get("tokens_per_batch") or 0
    points = [replace(point, seconds=point.step * tokens_per_batch / speed) if speed else point for point in run.points]
    return {
        "seed": seed,
        "folder": run.job.folder.name,
        "state": run.state,
        "steps": run.options.get("steps"),
        "tokens": None if final is None else final.step * tokens_per_batch,
        "planned_seconds": run.job.seconds,
        "seconds": None if final is None else points[-1].seconds,
        "taken_seconds": None if final is None else run.seconds,
        "loss": None if final is None else final.loss,
        "bits_per_byte": None if final is None else final.bits_per_byte,
        "curve": [[point.step, point.seconds, point.loss, point.bits_per_byte] for point in points],
        "tests": [_test(test) for test in run.tests],
    }


def baseline_row(rows: Iterable[SystemRow], baseline: str | None) -> SystemRow | None:
    """The row of the baseline, and of several, with an optimiser each, that with the lowest loss; None if there is none."""
    bases = [row for row in rows if row["arm"] == baseline]
    return min(bases, key=lambda row: _mean_loss(row) or float("inf"), default=None)


def add_relative_losses(plan: Plan, rows: list[SystemRow]) -> None:
    """Add to each row its loss relative to the baseline's, and for each seed its speed-up."""
    base = baseline_row(rows, plan.experiment.baseline)
    for row in rows:
        row["relative_loss"] = _relative_loss(row, base)
        row["paper_relative_loss"] = _over(row["paper_loss"], base["paper_loss"] if base else None)
        others = base["runs"] if base else []
        row["speedups"] = [_speedup(run, other) for run, other in zip(row["runs"], others, strict=False)]  # seed by seed


def _relative_loss(row: SystemRow, base: SystemRow | None) -> float | None:
    """The relative difference of a row's mean loss from the baseline's, over the seeds that both have."""
    pairs = [(run["loss"], other["loss"]) for run, other in zip(row["runs"], base["runs"] if base else [], strict=False)]
    both = [(loss, other) for loss, other in pairs if loss is not None and other is not None]
    return _over(sum(loss for loss, _ in both), sum(other for _, other in both)) if both else None


def _over(value: float | None, base: float | None) -> float | None:
    """The relative difference of a value from the baseline's."""
    return None if value is None or not base else value / base - 1


def _speedup(run: RunData, baseline: RunData) -> float | None:
    """The time in which the baseline reaches its final quality, divided by the run's; None if the run does not reach it."""
    quality = baseline["loss"]
    if quality is None:
        return None
    needed, of_baseline = (seconds_to([Point(*point) for point in each["curve"]], quality) for each in (run, baseline))
    return None if needed is None or of_baseline is None else of_baseline / needed


def _mean_loss(row: SystemRow) -> float | None:
    losses = values_of_row(row, itemgetter("loss"))
    return statistics.fmean(losses) if losses else None


def values_of_row(row: SystemRow, metric: Callable[[RunData], float | None]) -> list[float]:
    """The values of a metric over the seeds of a row that have one."""
    return [value for run in row["runs"] if (value := metric(run)) is not None]


def metric_of_test(name: str, metric: TestMetric) -> Callable[[RunData], float | None]:
    """A metric of a run: a number of one of its tests."""

    def value(run: RunData) -> float | None:
        return next((test[metric] for test in run["tests"] if test["name"] == name), None)

    return value


def _latency(plan: Plan, setting: Setting, state: _State) -> LatencySetting:
    """The time of a step of all arms at a context."""
    run = read_run(plan.latency_job(setting))
    state.note(plan, run)
    measured = {entry.subject: entry for entry in run.outcome.entries}
    entries = plan.entries_of(setting)
    rows: list[LatencyRow] = []
    for entry in entries:
        found = measured.get(entry.options["preset"])
        seconds = None if found is None else found.median_seconds
        rows.append(
            {
                "name": entry.arm.name,
                "arm": entry.arm.name,
                "parameters": entry.parameters,
                "parameters_over_first": entry.parameters / entries[0].parameters - 1,
                "problem": None if found is None else found.problem,
                "microseconds_per_token": None if found is None or seconds is None else 1e6 * seconds / found.tokens,
                "milliseconds": None if seconds is None else 1e3 * seconds,
                "precision": None if found is None else found.dtype,
                "paper": paper_numbers(plan.experiment.paper_tables, entry.arm.paper_row, setting),
            }
        )
    base = next((row for row in rows if row["arm"] == plan.experiment.baseline), None)
    for row in rows:
        row["relative"] = _ratio(row["milliseconds"], base["milliseconds"] if base else None)
        row["paper_relative"] = _ratio(row["paper"].get("latency_ms"), base["paper"].get("latency_ms") if base else None)
    return {"label": setting.label, "name": str(setting), "context": setting.context, "rows": rows}


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def within_tolerance(row: AnyRow) -> bool:
    """Whether the parameters of a row are within 3 % of the first one's."""
    return abs(row["parameters_over_first"]) <= TOLERANCE
