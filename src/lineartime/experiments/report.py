"""The report of an experiment, complete or not: report.json, report.md and pictures."""

import json
import shlex
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

from lineartime.errors import LineartimeError
from lineartime.experiments.collect import baseline_row, collect, metric_of_test, values_of_row, within_tolerance
from lineartime.experiments.config import ReproduceConfig
from lineartime.experiments.folder import PLAN_FILE, check_options, plan_options
from lineartime.experiments.paper import DESCRIPTIONS, paper_cost
from lineartime.experiments.pictures import draw_pictures
from lineartime.experiments.plan import Plan
from lineartime.experiments.report_data import LatencyReport, LatencyRow, QualityReport, Report, RunData, SystemRow, TestMetric
from lineartime.experiments.report_texts import APPROXIMATION, LATENCY, OTHER_CHUNKS, legend
from lineartime.experiments.tables import NOT_THERE, settings_with_results, table
from lineartime.experiments.treatment import equal_treatment, parameters_apart
from lineartime.files import write_file
from lineartime.markdown import three_digits
from lineartime.models.registering import imported_names

JSON_FILE, MARKDOWN_FILE = "report.json", "report.md"


def write_report(plan: Plan) -> tuple[Path, Report, list[str]]:
    """Write the report of the existing results. Return its file, its data, and a sentence for each missing picture.

    Raises:
        LineartimeError: if the folder has no runs, or runs of other options, or cannot be written.
    """
    if not (plan.folder / PLAN_FILE).exists():
        raise LineartimeError(
            f"{plan.folder} has no runs of {plan.config.name} at the scale {plan.config.scale}: run it first."
        )
    check_options(plan)
    report = collect(plan)
    write_file(plan.folder / JSON_FILE, json.dumps(report, indent=1) + "\n")
    file, notes = render(plan, report)
    return file, report, notes


def render(plan: Plan, report: Report) -> tuple[Path, list[str]]:
    """Write the text and the pictures of a report from its data. Return the file, and a sentence for each missing picture.

    Raises:
        LineartimeError: if the folder of the experiment cannot be written.
    """
    notes: list[str] = []
    try:
        pictures = draw_pictures(plan, report)
    except LineartimeError as error:
        pictures, notes = [], [f"no pictures: {error}"]
    file = plan.folder / MARKDOWN_FILE
    return write_file(file, "\n\n".join(_blocks(plan, report, pictures)) + "\n"), notes


def _blocks(plan: Plan, report: Report, pictures: Sequence[tuple[Path, str]]) -> Iterator[str]:
    yield f"# {report['title']}"
    yield report["question"]
    yield _facts(plan, report)
    if not report["complete"]:
        yield _incomplete(report)
    for picture, caption in pictures:
        yield f"![{caption}]({picture.name})\n\n{caption}"
    if plan.experiment.kind == "quality":
        results = cast("QualityReport", report)
        yield from _quality_tables(plan, results)
        yield from equal_treatment(plan, results)
    else:
        yield from _latency_tables(cast("LatencyReport", report))
        yield LATENCY
        yield parameters_apart(report)
    tables = [f"{DESCRIPTIONS[name]}" for name in plan.experiment.paper_tables]
    where = f" ({'; '.join(tables)})" if tables else ""
    yield f"The paper: {report['paper']}{where}."


def _facts(plan: Plan, report: Report) -> str:
    lines = [
        f"- experiment `{report['experiment']}`, scale `{report['scale']}`: {plan.scale.description}",
        f"- command: `{_command(plan, report['options'])}`",
    ]
    if report["started"]:
        lines.append(f"- runs started from {report['started'][0]} to {report['started'][1]}")
    lines += [f"- machine: {machine}" for machine in report["machines"]]
    if precisions := report.get("precisions"):  # reports of earlier versions do not hold them
        lines.append(f"- precision of matrix products: {' and '.join(precisions)}")
    labels = (
        {setting["label"] for setting in settings_with_results(cast("QualityReport", report))}
        if plan.experiment.kind == "quality"
        else report["texts"].keys()
    )
    lines += [f"- text of {label}: {text}" for label, text in report["texts"].items() if label in labels]
    if plan.config.scale == "trial":
        lines.append("- **a trial**: toy models trained for seconds, to see that everything works; the numbers mean nothing")
    return "\n".join(lines)


def _command(plan: Plan, options: dict[str, Any]) -> str:
    """The command that makes these runs, with file names of texts in place of paths. It may have run in several parts."""
    usual = plan_options(replace(plan, config=ReproduceConfig(plan.config.name, plan.config.scale)))
    words = ["lineartime", "reproduce", plan.config.name, "--scale", plan.config.scale]
    for name, value in options.items():
        if value is not None and json.dumps(value) != json.dumps(usual[name]):
            values = value if isinstance(value, (list, tuple)) else [value]
            words += [f"--{name}", *(f"{each:g}" if isinstance(each, float) else str(each) for each in values)]
    return shlex.join([*words, *(word for name in imported_names() for word in ("--import", Path(name).name))])


def _incomplete(report: Report) -> str:
    lines = ["**Not complete.**"]
    if report["missing"]:
        shown = ", ".join(f"`{name}`" for name in report["missing"][:8])
        more = f", and {len(report['missing']) - 8} more (see {JSON_FILE})" if len(report["missing"]) > 8 else ""
        lines.append(f"Missing runs: {shown}{more}.")
    lines += [f"{problem.rstrip('.')}." for problem in report["problems"]]
    if report["missing"]:
        lines.append("Settings and systems of which nothing has run are left out of the tables of quality.")
    return "\n\n".join(lines)


# Tables of quality ---------------------------------------------------------------------------------------------------


def _quality_tables(plan: Plan, report: QualityReport) -> Iterator[str]:
    masked, words = plan.experiment.task == "mlm", plan.experiment.words
    metric: TestMetric = "loss" if masked else "bits_per_byte"
    for setting in settings_with_results(report):
        yield f"## {setting['name'][0].upper()}{setting['name'][1:]}"
        rows = setting["rows"]
        columns: dict[str, list[str]] = {"system": [row["name"] for row in rows]}
        columns["parameters"] = [_parameters_of(row) for row in rows]
        columns["optimiser, rate"] = [_rate(row) for row in rows]
        columns["steps"] = [_each(row, itemgetter("steps"), ",.0f") for row in rows]
        columns["tokens/s"] = [
            NOT_THERE if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f}" for row in rows
        ]
        columns["training (s)"] = [_each(row, itemgetter("seconds"), ",.0f") for row in rows]
        columns["held-out nats" if masked else "held-out bits/byte"] = [_each(row, itemgetter(metric), ".4f") for row in rows]
        name = "test nats per masked token" if masked else "**test bits/byte**"
        columns[name] = [_values(values_of_row(row, metric_of_test("", metric))) for row in rows]
        if words:
            columns["test perplexity per word"] = [
                _values(values_of_row(row, metric_of_test("", "word_perplexity")), ",.4g") for row in rows
            ]
        columns["paper: perplexity"] = [_paper(row, "pplx", ".4g") for row in rows]
        columns["loss against the baseline"] = [_percent(row["relative_loss"]) for row in rows]
        columns["paper: loss against it"] = [_percent(row["paper_relative_loss"]) for row in rows]
        base = baseline_row(rows, report["baseline"])
        columns["speed-up"] = [_speedups(row, base) for row in rows]
        columns["paper: speed-up"] = [_paper(row, "speedup", ".3g") for row in rows]
        yield table(columns)
        if any(row["rate_at_edge"] for row in rows):
            yield "\\* The best rate is at an end of the grid: a rate beyond it may be better."
    yield legend(plan)
    yield from _positions_table(report)
    if len(plan.experiment.tests) > 1:
        yield from _tests_table(report, metric)
    if plan.experiment.pairs:
        yield from _pairs_table(plan, report, metric)


def _positions_table(report: QualityReport) -> Iterator[str]:
    """The test losses of the first seed by the position of a token in its context."""
    for setting in settings_with_results(report):
        measured = {row["name"]: _by_position(row) for row in setting["rows"]}
        found = {name: losses for name, losses in measured.items() if losses}
        if found:
            columns = {"system": list(found)}
            for first, (last, _) in next(iter(found.values())).items():
                columns[f"{first:,.0f} to {last:,.0f}"] = [f"{losses[first][1]:.3f}" for losses in found.values()]
            yield f"Test loss by the place of a token in its context: {setting['name']} (nats, first seed)"
            yield table(columns)


def _by_position(row: SystemRow) -> dict[float, tuple[float, float]]:
    """The last place and the loss by the first place of each part of the context, from the fourth token on.

    Empty if the first run is not finished. Earlier versions ended the last part one token earlier.
    """
    parts: list[list[float]] = next((test["by_position"] for test in row["runs"][0]["tests"] if test["name"] == ""), [])
    return {first: (last, loss) for first, last, loss in parts if 4 <= first < last}


def _tests_table(report: QualityReport, metric: TestMetric) -> Iterator[str]:
    """Measurements that differ from training: columns are the tests."""
    unit = "bits per byte" if metric == "bits_per_byte" else "nats"
    for setting in settings_with_results(report):
        columns: dict[str, list[str]] = {"system": [row["name"] for row in setting["rows"]]}
        for name in report["tests"]:
            value = metric_of_test(name, metric)
            columns[name or "as trained"] = [_values(values_of_row(row, value)) for row in setting["rows"]]
        yield f"## Tests that differ from training: {setting['name']} ({unit} of the test split)"
        yield table(columns)
    if any(name.startswith("tested with") for name in report["tests"]):
        yield OTHER_CHUNKS


def _pairs_table(plan: Plan, report: QualityReport, metric: TestMetric) -> Iterator[str]:
    """What an approximation costs, for each seed that both models have."""
    unit = "bits/byte" if metric == "bits_per_byte" else "nats"
    columns: dict[str, list[str]] = {"context": [], "from -> to": [], unit: [], "loss": [], "paper: perplexity": []}
    for setting, place in zip(report["settings"], plan.settings, strict=True):
        rows = {row["arm"]: row for row in setting["rows"]}
        for name, (exact, approximate) in plan.experiment.pairs.items():
            if exact not in rows or approximate not in rows:
                continue
            value = metric_of_test("", metric)
            runs = zip(rows[exact]["runs"], rows[approximate]["runs"], strict=False)
            both = [(value(first), value(second)) for first, second in runs]
            seeds = [(wanted, found) for wanted, found in both if wanted is not None and found is not None]
            if not seeds:
                continue
            cost = paper_cost(name, place, plan.experiment.task)
            columns["context"].append(setting["name"])
            columns["from -> to"].append(name)
            columns[unit].append(_values([found - wanted for wanted, found in seeds], "+.4f"))
            columns["loss"].append(_values([100 * (found / wanted - 1) for wanted, found in seeds], "+.2f", " %"))
            columns["paper: perplexity"].append(NOT_THERE if cost is None else f"{cost:+.2f}")
    if columns["context"]:
        yield "## What the approximation costs"
        yield table(columns, text=2)
        yield APPROXIMATION


# Tables of latency ----------------------------------------------------------------------------------------------------


def _latency_tables(report: LatencyReport) -> Iterator[str]:
    precisions = {row["precision"] for setting in report["settings"] for row in setting["rows"] if row["precision"]}
    columns_of: tuple[tuple[str, Callable[[LatencyRow], float | None], Callable[[float], str]], ...] = (
        (
            f"Microseconds for a token, forward and backward, in {' and '.join(sorted(precisions))}",
            itemgetter("microseconds_per_token"),
            three_digits,
        ),
        (f"The time of a step over that of {report['baseline']}", itemgetter("relative"), "{:.2f}".format),
        ("The paper: the same ratio, on 64 TPU-v4 cores", itemgetter("paper_relative"), "{:.2f}".format),
    )
    for title, value, form in columns_of:
        if all(value(row) is None for setting in report["settings"] for row in setting["rows"]):
            continue
        names = [row["name"] for row in report["settings"][0]["rows"]]
        columns: dict[str, list[str]] = {"system": names}
        for setting in report["settings"]:
            columns[f"{setting['context']:,}"] = [
                (row["problem"] or NOT_THERE) if (found := value(row)) is None else form(found) for row in setting["rows"]
            ]
        yield f"## {title}"
        yield table(columns)


# Cells ----------------------------------------------------------------------------------------------------------------


def _values(values: Sequence[float], form: str = ".4f", unit: str = "") -> str:
    """The values of all seeds, or of more than three, their mean and standard deviation."""
    if len(values) > 3:
        mean, deviation = format(statistics.fmean(values), form), format(statistics.stdev(values), form.replace("+", ""))
        spread = f" ± {deviation}" if len(set(values)) > 1 else ""
        return f"{mean}{spread}{unit} ({len(values)})"
    return " / ".join(f"{value:{form}}{unit}" for value in values) or NOT_THERE


def _each(row: SystemRow, metric: Callable[[RunData], float | None], form: str) -> str:
    return _values(values_of_row(row, metric), form)


def _parameters_of(row: SystemRow) -> str:
    mark = "" if within_tolerance(row) else " (!)"
    millions = row["parameters"] / 1e6
    count = f"{millions:.2f} M" if millions < 100 else f"{millions:.0f} M"
    return f"{count}, {row['parameters_over_first']:+.1%}{mark}" if row["parameters_over_first"] else count


def _rate(row: SystemRow) -> str:
    if row["rate"] is None:
        return NOT_THERE
    return f"{row['optimizer'] or ''} {row['rate']:g}{'*' if row['rate_at_edge'] else ''}".strip()


def _paper(row: SystemRow, name: str, form: str) -> str:
    return NOT_THERE if row["paper"].get(name) is None else format(row["paper"][name], form)


def _percent(value: float | None) -> str:
    return NOT_THERE if value is None else f"{100 * value:+.2f} %"


def _speedups(row: SystemRow, base: SystemRow | None) -> str:
    """The speed-ups of the seeds that this row and the baseline's have."""
    both = zip(row["runs"], row["speedups"], base["runs"] if base else [], strict=False)
    speedups = [speedup for run, speedup, other in both if run["loss"] is not None and other["loss"] is not None]
    known = [speedup for speedup in speedups if speedup is not None]
    if len(known) == len(speedups):
        return _values(known, ".2f")
    return " / ".join("not reached" if speedup is None else f"{speedup:.2f}" for speedup in speedups)
