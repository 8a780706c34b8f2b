"""The report of an experiment, complete or not, with the paper's numbers: report.json, and from it report.md and pictures."""

import json
import math
import shlex
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import count, pairwise, takewhile
from pathlib import Path
from typing import Any

from lineartime.choices import Task
from lineartime.errors import LineartimeError
from lineartime.experiments.catalogue import MIN_TRIAL_STEPS, Setting
from lineartime.experiments.config import TEXT_OPTIONS, ReproduceConfig
from lineartime.experiments.plan import PLAN_FILE, TOLERANCE, Candidate, Plan, plan_options, with_defaults
from lineartime.experiments.runner import Run, all_jobs, best_trial, read_run, read_speed, read_trials
from lineartime.files import write_file
from lineartime.models.systems import imported_names
from lineartime.plots import Curve, Panel, curves_of, draw_panels, looks_of, save_figure
from lineartime.runs.record import texts_of
from lineartime.units import NOT_THERE, cell, column_table, size

Row = dict[str, Any]
"""What report.json says of an arm in a setting; `_row` and `_compare` list its fields."""
Metric = Callable[[dict[str, Any]], float | None]
"""A number of a run in a row, if it has it."""

SOURCE = "Transformer Quality in Linear Time (Hua, Dai, Liu and Le), arXiv 2202.10447"
JSON_FILE, MARKDOWN_FILE = "report.json", "report.md"
NOTE = (
    "*Held-out* text chooses rates, and is not trained on; the *test* split is measured once, at the end. The baseline is "
    "{base}. \\* marks a best rate at an end of the grid. docs/experiments.md of lineartime says more about the columns."
)
ENOUGH = 0.95
"""The accuracy at which a task counts as learnt."""


def write_report(plan: Plan) -> tuple[Path, dict[str, Any]]:
    """Write the report of the existing results; return its file and its data.

    Raises LineartimeError if the folder has no runs or cannot be written.
    """
    if not (plan.folder / PLAN_FILE).exists():
        raise LineartimeError(
            f"{plan.folder} has no runs of {plan.config.name} at the scale {plan.config.scale}: run it first."
        )
    report = collect(plan)
    write_file(plan.folder / JSON_FILE, json.dumps(report, indent=1) + "\n")
    return render(plan, report), report


def collect(plan: Plan) -> dict[str, Any]:
    """The content of report.json: the results of all runs of an experiment, with the paper's numbers."""
    runs: list[Run] = []  # those that the rows read
    settings = []
    for setting, candidates in plan.candidates.items():
        rows = [row for each in candidates if (row := _row(plan, each, runs))]
        base = next((row for row in rows if row["name"] == plan.experiment.baseline), None)
        for row in rows if not setting.task else ():
            _compare(row, base)
        if rows:
            text = [] if setting.task else _names(texts_of(candidates[-1].options))
            named = {**vars(setting), "label": setting.label, "name": str(setting)}
            settings.append({**named, "files": text, "rows": rows})
    marks = {"missing": "", "interrupted": " (interrupted)"}
    asked = [(job, read_run(job.folder).state) for job in all_jobs(plan) if job.kind != "speed"]
    missing = [job.name + marks[state] for job, state in asked if state in marks]
    failed = {run.folder: run for run in runs if run.state == "failed"}
    problems = [f"{folder.relative_to(plan.folder)} failed: {run.outcome['error']}" for folder, run in failed.items()]
    processes = [process for run in runs for process in run.record.processes]
    times = sorted(process.time for process in processes)
    return {
        "experiment": plan.config.name,
        "scale": plan.config.scale,
        # What its runs depend on, by the names of `reproduce`.
        "options": plan_options(plan.config) | {name: _names(getattr(plan.config, name)) for name in TEXT_OPTIONS},
        "complete": not missing and not problems,
        "missing": missing,  # runs that were asked for
        "problems": problems,  # a sentence for each run that failed
        "machines": list(dict.fromkeys(map(str, processes))),
        "precisions": sorted({str(run.record.options["precision"]) for run in runs if "precision" in run.record.options}),
        "started": [times[0], times[-1]] if times else [],  # when the first and the last run began
        "settings": settings,
    }


def _names(paths: Iterable[str]) -> list[str]:
    """Names of files, because folders mean nothing on other machines."""
    return [Path(path).name for path in paths]


def _row(plan: Plan, candidate: Candidate, seen: list[Run]) -> Row | None:
    """An arm in a setting, with its trials, its choice and its runs; None if nothing has run."""
    arm, setting, experiment = candidate.arm, candidate.setting, plan.experiment
    seeds = takewhile(Path.exists, (candidate.folder / f"seed-{seed}" for seed in count()))
    trials, runs = read_trials(plan, candidate), [read_run(folder) for folder in seeds]
    seen += [*trials.values(), *runs]
    if all(run.state == "missing" for run in (*trials.values(), *runs)):
        return None
    best = best_trial(trials)
    optimizer, rate = best or (None, None)
    speed = read_speed(plan, candidate, best[0]) if best else None
    grid = plan.rates[best[0]] if best else ()
    tried = {name: {rate: run for (own, rate), run in trials.items() if own == name} for name in plan.rates}
    return {
        "name": arm.name,
        "override": list(candidate.options["override"]),  # what differs from the preset of the size tiny
        "parameters": candidate.parameters,
        "parameters_over_first": candidate.parameters / plan.candidates[setting][0].parameters - 1,
        "paper": paper_numbers(experiment.paper_tables, arm.name, setting, experiment.task),
        "optimizer": optimizer,
        "rate": rate,
        "rate_at_edge": len(grid) > 1 and rate in (min(grid), max(grid)),
        "grid": {  # by optimiser and rate: the trial's loss in nats per token, or its state
            name: {f"{each:g}": run.final.get("validation_loss", run.state) for each, run in of_rates.items()}
            for name, of_rates in tried.items()
        },
        "trial_steps": {
            name: next((run.record.options["steps"] for run in of_rates.values() if run.record.options), None)
            for name, of_rates in tried.items()
        },
        "tokens_per_second": speed or _mean(run.speed for run in runs),  # that was measured alone, if it was
        "state_bytes": next((run.outcome.get("state_bytes") for run in runs if run.final), None),  # of a stream after a text
        "runs": [_run(run, speed) for run in runs],
    }


def _run(run: Run, speed: float | None) -> dict[str, Any]:
    """The run of one seed. Its seconds follow from the speed that was measured alone, or else from its own."""
    options, final = run.record.options, run.final
    per_step = options.get("tokens_per_batch", 0) / (speed or run.speed or math.nan)
    enough = (line["step"] for line in run.evaluations if line.get("validation_accuracy", 0) >= ENOUGH)
    return {
        "seed": options.get("seed"),
        "state": run.state,
        "steps": options.get("steps"),
        "loss": final.get("validation_loss"),  # nats per token on held-out text, at the end
        "bits_per_byte": final.get("validation_bits_per_byte"),  # None for masked tokens
        "accuracy": final.get("validation_accuracy"),  # of a task
        "steps_to_enough": next(enough, None),
        "curve": [  # step, seconds of training, loss and bits per byte
            [line["step"], line["step"] * per_step, line["validation_loss"], line.get("validation_bits_per_byte")]
            for line in run.evaluations
        ],
        "tests": run.outcome.get("tests", []),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.fmean(there) if there else None


def _compare(row: Row, base: Row | None) -> None:
    """Add what a row is relative to the baseline: time of a token, losses, and for each seed of both the speed-up."""
    pplx, base_pplx = (each["paper"].get("pplx") if each else None for each in (row, base))
    row["paper_relative_loss"] = math.log(pplx) / math.log(base_pplx) - 1 if pplx and base_pplx else None
    row["relative_time"] = _ratio(base["tokens_per_second"] if base else None, row["tokens_per_second"])
    row["paper_relative_time"] = _ratio(*(each["paper"].get("latency_ms") if each else None for each in (row, base)))
    pairs = [(run, other) for run, other in zip(row["runs"], base["runs"] if base else [], strict=False)]
    both = [(run, other) for run, other in pairs if run["loss"] is not None and other["loss"] is not None]
    losses = [sum(each[place]["loss"] for each in both) for place in (0, 1)]
    row["relative_loss"] = losses[0] / losses[1] - 1 if both else None
    reached = [[seconds_to(run["curve"], other["loss"]) for run in (other, own)] for own, other in both]
    row["speedups"] = [_ratio(of_base, own) for of_base, own in reached]


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def seconds_to(curve: Sequence[Sequence[Any]], loss: float) -> float | None:
    """The seconds of training after which a loss is reached, interpolated between evaluations; None if it never is."""
    if curve and curve[0][2] <= loss:
        return float(curve[0][1])
    for (_, early, higher, *_), (_, late, lower, *_) in pairwise(curve):
        if lower <= loss:
            return float(early + (higher - loss) / (higher - lower) * (late - early))
    return None


@cache
def paper_tables() -> dict[str, Any]:
    """The tables of the paper by name, each for one kind of text or for any; the rows have the names of arms.

    A row has values by context: "pplx", the perplexity, "latency_ms" of a step on 64 TPU-v4 cores, and "speedup", the time to
    the final quality of the baseline, null where that is not reached or not legible. Rows of ablations have a perplexity by
    task.
    """
    tables: dict[str, Any] = json.loads((files(__package__) / "paper_tables.json").read_text(encoding="utf-8"))
    return tables


def paper_numbers(tables: Sequence[str], row: str, setting: Setting, task: Task = "clm") -> dict[str, float]:
    """What the first of some tables that has a row reports of it in a setting: "pplx", "latency_ms", "speedup"."""
    for table in (paper_tables()[name] for name in tables):
        if table.get("text", setting.text) == setting.text and (values := table["rows"].get(row)) is not None:
            if "context" not in table:
                return {"pplx": values[task]}
            found = {name: dict(zip(table["context"], column, strict=True)) for name, column in values.items()}
            return {name: column[setting.context] for name, column in found.items() if column.get(setting.context) is not None}
    return {}


def render(plan: Plan, report: Mapping[str, Any]) -> Path:
    """Write the pictures and the text of a report from its data. Return its file."""
    experiment = plan.experiment
    try:
        pictures = list(_draw(plan, report))
    except LineartimeError as error:
        pictures = [f"No pictures: {error}"]
    blocks = [f"# {experiment.question}", _facts(plan, report)]
    if not report["complete"]:
        blocks.append(_incomplete(report))
    note = NOTE.format(base=experiment.baseline)
    blocks += [*pictures, note, *_tables(plan, report), *_trials(report), _parameters_apart(report)]
    if described := [paper_tables()[name]["description"] for name in experiment.paper_tables]:
        blocks.append(f"The paper: {SOURCE} ({'; '.join(described)}).")
    return write_file(plan.folder / MARKDOWN_FILE, "\n\n".join(blocks) + "\n")


def _facts(plan: Plan, report: Mapping[str, Any]) -> str:
    lines = [
        f"- experiment `{report['experiment']}`, scale `{report['scale']}`: {plan.scale.description}",
        f"- command: `{_command(plan, report['options'])}`",
    ]
    if report["started"]:
        lines.append(f"- runs started from {report['started'][0]} to {report['started'][1]}")
    lines += [f"- machine: {machine}" for machine in report["machines"]]
    if plan.config.budget:
        lines.append(
            f"- seconds of training: {plan.config.budget:g} a run, and {plan.config.tuning:g} or more a trial of a rate"
        )
    if report["precisions"]:
        lines.append(f"- precision of matrix products: {' and '.join(report['precisions'])}")
    lines += [f"- text of {each['label']}: {', '.join(each['files'])}" for each in report["settings"] if each["files"]]
    return "\n".join(lines)


def _command(plan: Plan, options: Mapping[str, Any]) -> str:
    """The command that makes these runs, with file names of texts in place of paths. It may have run in several parts."""
    usual = plan_options(with_defaults(ReproduceConfig(plan.config.name, plan.config.scale)))
    words = ["lineartime", "reproduce", plan.config.name, "--scale", plan.config.scale]
    for name, value in options.items():
        if value is not None and json.dumps(value) != json.dumps(usual.get(name)):
            values = value if isinstance(value, (list, tuple)) else [value]
            words += [f"--{name}", *(f"{each:g}" if isinstance(each, float) else str(each) for each in values)]
    return shlex.join([*words, *(word for name in imported_names() for word in ("--import", Path(name).name))])


def _incomplete(report: Mapping[str, Any]) -> str:
    lines = ["**Not complete.** Systems of which nothing has run are left out."]
    if missing := [f"`{name}`" for name in report["missing"]]:
        more = f", and {len(missing) - 8} more (see {JSON_FILE})" if len(missing) > 8 else ""
        lines.append(f"Missing runs: {', '.join(missing[:8])}{more}.")
    return "\n\n".join([*lines, *(f"{problem.rstrip('.')}." for problem in report["problems"])])


def _parameters_apart(report: Mapping[str, Any]) -> str:
    """A sentence about how far the numbers of parameters are apart."""
    apart = sorted({(row["name"], row["parameters_over_first"]) for setting in report["settings"] for row in setting["rows"]})
    far = [f"{name} ({over:+.2%})" for name, over in apart if abs(over) > TOLERANCE]
    found = f"are **not within 3 %** of the first system's: {', '.join(far)}" if far else "are within 3 % of the first system's"
    return f"Parameters {found}."


def _measure(plan: Plan) -> tuple[str, str, str]:
    """What the runs of an experiment are judged by: its name in a run, its unit, and its format."""
    if plan.experiment.remembers:
        return "accuracy", "accuracy", ".1%"
    return (
        ("loss", "nats per masked token", ".4f") if plan.experiment.task == "mlm" else ("bits_per_byte", "bits per byte", ".4f")
    )


def _tables(plan: Plan, report: Mapping[str, Any]) -> Iterator[str]:
    """A table for each setting, without the columns of which there are no numbers."""
    metric, unit, form = _measure(plan)
    for setting in report["settings"]:
        rows = setting["rows"]
        tests = dict.fromkeys(test["name"] for row in rows for run in row["runs"] for test in run["tests"])
        columns = {
            "system": [row["name"] for row in rows],
            "parameters": [cell(row["parameters"], ",.2f", 1e-6, " M") for row in rows],
            "optimiser, rate": [_rate(row) for row in rows],
            "steps": _column(rows, lambda run: run["steps"], ",.0f"),
            "tokens/s": [cell(row["tokens_per_second"], ",.0f") for row in rows],
            f"held-out {unit}": _column(rows, lambda run: run[metric], form),
            **{f"**test {unit}** {name}".rstrip(): _column(rows, _test(name, metric), form) for name in tests},
            "test perplexity per word": _column(rows, _test("", "word_perplexity"), ",.4g"),
            f"steps to {ENOUGH:.0%}": _column(rows, lambda run: run["steps_to_enough"], ",.0f"),
            "state": [cell(row["state_bytes"], size) for row in rows],
            "paper: perplexity": [cell(row["paper"].get("pplx"), ".4g") for row in rows],
            "loss against the baseline": [cell(row.get("relative_loss"), "+.2f", 100, " %") for row in rows],
            "paper: loss against it": [cell(row.get("paper_relative_loss"), "+.2f", 100, " %") for row in rows],
            "time against the baseline": [cell(row.get("relative_time"), ".2f") for row in rows],
            "paper: time against it": [cell(row.get("paper_relative_time"), ".2f") for row in rows],
            "speed-up": [_seeds(row.get("speedups", []), ".2f") for row in rows],
            "paper: speed-up": [cell(row["paper"].get("speedup"), ".3g") for row in rows],
        }
        yield f"## {setting['name'][0].upper()}{setting['name'][1:]}"
        yield column_table(columns)


def _trials(report: Mapping[str, Any]) -> Iterator[str]:
    """Every trial of a rate, unless there was no choice."""
    settings = [each for each in report["settings"] if any(row["trial_steps"].get(row["optimizer"]) for row in each["rows"])]
    chosen = {f"{row['name']} ({each['name']})": row for each in settings for row in each["rows"] if row["optimizer"]}
    steps = {name: row["trial_steps"][row["optimizer"]] for name, row in chosen.items()}
    if few := [f"{name}: {number}" for name, number in steps.items() if number and number < MIN_TRIAL_STEPS]:
        yield f"**Trials of fewer than {MIN_TRIAL_STEPS} steps may choose a rate by chance**: {', '.join(few)}."
    for setting in settings:
        rows = setting["rows"]
        columns = {"system": [row["name"] for row in rows]}
        for optimizer, grid in rows[0]["grid"].items():
            columns[f"{optimizer}: steps"] = [str(row["trial_steps"].get(optimizer) or NOT_THERE) for row in rows]
            columns |= {f"{optimizer} {rate}": [_tried(row, optimizer, rate) for row in rows] for rate in grid}
        yield f"Rates tried: {setting['name']} (nats per token on held-out text; bold: the choice)"
        yield column_table(columns)


def _tried(row: Row, optimizer: str, rate: str) -> str:
    loss = row["grid"][optimizer][rate]
    if not isinstance(loss, float):
        return str(loss)
    return f"**{loss:.4f}**" if _rate(row).rstrip("*") == f"{optimizer} {rate}" else f"{loss:.4f}"


def _test(name: str, metric: str) -> Metric:
    """A metric of a run: a number of one of its tests."""
    return lambda run: next((test.get(metric) for test in run["tests"] if test["name"] == name), None)


def _values(row: Row, metric: Metric) -> list[float]:
    """The values of a metric over the seeds of a row that have one."""
    return [value for run in row["runs"] if (value := metric(run)) is not None]


def _column(rows: Sequence[Row], metric: Metric, form: str = ".4f") -> list[str]:
    return [_seeds(_values(row, metric), form) for row in rows]


def _seeds(values: Sequence[float | None], form: str) -> str:
    """The values of all seeds, or of more than three, their mean and standard deviation."""
    known = [value for value in values if value is not None]
    if len(known) == len(values) > 3:
        return f"{statistics.fmean(known):{form}} ± {statistics.stdev(known):{form}} ({len(known)})"
    return " / ".join("not reached" if value is None else f"{value:{form}}" for value in values) or NOT_THERE


def _rate(row: Row) -> str:
    if row["rate"] is None:
        return NOT_THERE
    return f"{row['optimizer']} {row['rate']:g}{'*' if row['rate_at_edge'] else ''}"


Picture = tuple[str, list[Panel], str]
"""The name of a picture, its panels and its caption."""


def _draw(plan: Plan, report: Mapping[str, Any]) -> Iterator[str]:
    """Draw all pictures for which there are numbers, and yield each with its caption. LineartimeError without matplotlib."""
    names = [arm.name for arm in plan.experiment.arms]
    names += [row["name"] for setting in report["settings"] for row in setting["rows"]]
    pictures = _memory_pictures(report) if plan.experiment.remembers else _quality_pictures(plan, report)
    for name, panels, caption in pictures:
        if shown := [panel for panel in panels if panel.curves]:
            file = save_figure(draw_panels(shown, looks_of(names)), plan.folder / f"{name}.png", 130)
            yield f"![{caption}]({file.name})\n\n{caption}"


def _memory_pictures(report: Mapping[str, Any]) -> Iterator[Picture]:
    """Accuracy by the length of a text, a panel for each task; and by the bytes of state, at the longest text of each."""
    by_length: dict[str, list[tuple[str, float | None, float | None]]] = {}
    states: dict[str, Panel] = {}
    for found in sorted(report["settings"], key=lambda each: each["context"]):
        task = found["text"] + (f", {found['pairs']:,} to remember" if found["pairs"] else "")
        accuracies = {row["name"]: _mean(_values(row, _test("", "accuracy"))) for row in found["rows"]}
        by_length.setdefault(task, []).extend((name, found["context"], value) for name, value in accuracies.items())
        of_state = curves_of((row["name"], row["state_bytes"], accuracies[row["name"]]) for row in found["rows"])
        states[task] = Panel(found["name"], "bytes of state", "accuracy", of_state, "x", y_limits=(-0.05, 1.05))
    lengths = [
        Panel(task, "tokens of a text", "accuracy", curves_of(points), "x", y_limits=(-0.05, 1.05))
        for task, points in by_length.items()
    ]
    yield "lengths", lengths, "Accuracy by the length of a text, of models that were trained at that length."
    yield "states", [*states.values()], "Accuracy by the bytes of the state of one stream, at the longest text of each task."


def _quality_pictures(plan: Plan, report: Mapping[str, Any]) -> Iterator[Picture]:
    """Held-out loss by seconds of training: a panel for each setting."""
    place, unit = 2 if plan.experiment.task == "mlm" else 3, _measure(plan)[1]
    panels = []
    for setting in report["settings"]:
        panel, late = Panel(setting["name"], "seconds of training", unit), []
        for row in setting["rows"]:
            for run in (run for run in row["runs"] if run["curve"]):
                seconds, values = [point[1] for point in run["curve"]], [point[place] for point in run["curve"]]
                late += [value for second, value in zip(seconds, values, strict=True) if second >= seconds[-1] / 10]
                panel.curves.append(Curve(row["name"], seconds, values, thin=run["seed"] != 0))
                if row["name"] == plan.experiment.baseline and run["seed"] == 0:
                    panel.level = values[-1]
        if late:
            margin = 0.05 * (max(late) - min(late)) or 0.01
            panel.y_limits = (min(late) - margin, max(late) + margin)  # the first losses would flatten what is compared
        panels.append(panel)
    yield (
        "quality",
        panels,
        "Loss on held-out text by the time of training, without evaluations and compilation, at the speed that was measured "
        f"alone. Dotted: the final quality of {plan.experiment.baseline}, which the speed-up refers to. Thin lines are further "
        "seeds.",
    )
