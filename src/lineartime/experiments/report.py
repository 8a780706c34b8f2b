"""The report of an experiment, complete or not: report.json, report.md and pictures."""

import json
import shlex
import statistics
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from lineartime.errors import LineartimeError
from lineartime.experiments import catalogue
from lineartime.experiments.catalogue import MAX_TRIAL_RATIO, MIN_TRIAL_STEPS, Setting
from lineartime.experiments.collect import (
    Metric,
    Report,
    SystemRow,
    baseline_row,
    collect,
    metric_of_report,
    metric_of_test,
    paper_cost,
    paper_tables,
    settings_with_results,
    steps_to,
    values_of_row,
)
from lineartime.experiments.config import ReproduceConfig
from lineartime.experiments.plan import PLAN_FILE, TOLERANCE, Plan, plan_options, with_defaults
from lineartime.files import write_file
from lineartime.models.systems import imported_names
from lineartime.plots import Panel, draw_panels, label_axes, legend_below, looks_of, new_panels, save_figure
from lineartime.units import NOT_THERE, cell, column_table, size, three_digits

SOURCE = "Transformer Quality in Linear Time (Hua, Dai, Liu and Le), arXiv 2202.10447"
JSON_FILE, MARKDOWN_FILE = "report.json", "report.md"
LEGEND = (
    "- Of two or three seeds, all values are shown; of more, the mean ± the standard deviation, and their number.\n"
    "- Losses per {unit} are on text that was not trained on: *held-out* text, on which the curves and the tuned rates are "
    "measured, and the *test* split, measured once at the end.\n"
    "- *loss against the baseline*: the held-out loss over that of {base}, less one; for the paper, the same of the logarithms "
    "of its perplexities. It compares across tokenizers and sizes better than losses do.\n"
    "- *speed-up*, as the paper defines it: the time in which {base} reaches its final quality, over the time in which this "
    "system reaches it; of the same seed, and of training alone. A learning rate is scheduled for the whole run, so a shorter "
    "run could reach that quality sooner."
)
CURVES = (
    "Loss on held-out text by the time of training, without evaluations and compilation, at the speed that was measured alone. "
    "Dotted: the final quality of {base}, which the speed-up refers to. Thin lines are further seeds."
)
CONTEXTS = "Final quality by the length of the context, here and in the paper."
LENGTHS = "Accuracy by the length of a text, of models that were trained at that length."
STATES = "Accuracy by the bytes of the state of one stream, at the longest text of each task."
TIMES = "Time of a token by the length of the context, here and in the paper."
LATENCY = (
    "All systems take turns in each measurement, with the same tokens in a step. A step is forward and backward, without the "
    "optimiser. The paper's times are of whole steps on other machines, so only their ratios compare."
)
MEMORY = (
    "All runs of a task and a seed train on the same texts, {batch:,} tokens in a step, and each text is read once. *accuracy* "
    "is the share of right answers in texts that are the same for all; of several rates, the best one of a system is shown. "
    "*steps to 95%*, where a system got there, are those of the first evaluation with so many right answers. *state* is of one "
    "stream after a text, in float32. Times are of this machine, whatever else it did; a step is whole, with the optimiser. On "
    "a CPU, one function in C++ decodes a token of a stack of FLASH, and operations of PyTorch those of all others."
)
PAPER_SETUP = (
    "The paper's configuration, the same for all systems: its texts, tokens in a step, steps and learning rate, which is not "
    "tuned here. All runs of a setting read the same text in the same order."
)
ENOUGH = 0.95
"""The accuracy at which a task counts as learnt."""
APPROXIMATION = (
    "The difference of the test losses, seed by seed, after the same time of training; the paper's after the same steps."
)


def write_report(plan: Plan) -> tuple[Path, Report, list[str]]:
    """Write the report of the existing results. Return its file, its data, and a sentence for each missing picture.

    Raises LineartimeError if the folder has no runs or cannot be written.
    """
    if not (plan.folder / PLAN_FILE).exists():
        raise LineartimeError(
            f"{plan.folder} has no runs of {plan.config.name} at the scale {plan.config.scale}: run it first."
        )
    report = collect(plan)
    write_file(plan.folder / JSON_FILE, json.dumps(report, indent=1) + "\n")
    file, notes = render(plan, report)
    return file, report, notes


def render(plan: Plan, report: Report) -> tuple[Path, list[str]]:
    """Write the text and the pictures of a report from its data. Return the file, and a sentence for each missing picture."""
    notes: list[str] = []
    try:
        pictures = draw_pictures(plan, report)
    except LineartimeError as error:
        pictures, notes = [], [f"no pictures: {error}"]
    file = plan.folder / MARKDOWN_FILE
    return write_file(file, "\n\n".join(_blocks(plan, report, pictures)) + "\n"), notes


def _blocks(plan: Plan, report: Report, pictures: Sequence[tuple[Path, str]]) -> Iterator[str]:
    yield f"# {plan.experiment.title}"
    yield plan.experiment.question
    yield _facts(plan, report)
    if not report["complete"]:
        yield _incomplete(report)
    for picture, caption in pictures:
        yield f"![{caption}]({picture.name})\n\n{caption}"
    if plan.experiment.kind == "memory":
        yield from memory_tables(report)
        yield MEMORY.format(batch=plan.scale.tokens_per_batch)
        yield parameters_apart(report)
        return
    if plan.experiment.kind == "quality":
        yield from quality_tables(plan, report)
        yield LEGEND.format(base=plan.experiment.baseline, unit="masked token" if plan.experiment.task == "mlm" else "byte")
        yield from positions_tables(report)
        yield from tests_tables(plan, report)
        yield from pairs_table(plan, report)
        yield "## Setup"
        yield setup(plan, report) if plan.tunes else PAPER_SETUP
        yield from rate_tables(report)
    else:
        yield from latency_tables(plan, report)
        yield LATENCY
        yield parameters_apart(report)
    tables = "; ".join(paper_tables()[name]["description"] for name in plan.experiment.paper_tables)
    yield f"The paper: {SOURCE}{f' ({tables})' if tables else ''}."


def _facts(plan: Plan, report: Report) -> str:
    lines = [
        f"- experiment `{report['experiment']}`, scale `{report['scale']}`: {plan.scale.description}",
        f"- command: `{_command(plan, report['options'])}`",
    ]
    if report["started"]:
        lines.append(f"- runs started from {report['started'][0]} to {report['started'][1]}")
    lines += [f"- machine: {machine}" for machine in report["machines"]]
    if report["precisions"]:
        lines.append(f"- precision of matrix products: {' and '.join(report['precisions'])}")
    labels = {setting["label"] for setting in settings_with_results(report)}
    lines += [f"- text of {label}: {text}" for label, text in report["texts"].items() if label in labels]
    if plan.config.scale == "trial":
        lines.append("- **a trial**: toy models trained for seconds, to see that everything works; the numbers mean nothing")
    return "\n".join(lines)


def _command(plan: Plan, options: dict[str, Any]) -> str:
    """The command that makes these runs, with file names of texts in place of paths. It may have run in several parts."""
    usual: dict[str, Any] = plan_options(with_defaults(ReproduceConfig(plan.config.name, plan.config.scale)))
    words = ["lineartime", "reproduce", plan.config.name, "--scale", plan.config.scale]
    for name, value in options.items():
        if value is not None and json.dumps(value) != json.dumps(usual.get(name)):
            values = value if isinstance(value, (list, tuple)) else [value]
            words += [f"--{name}", *(f"{each:g}" if isinstance(each, float) else str(each) for each in values)]
    return shlex.join([*words, *(word for name in imported_names() for word in ("--import", Path(name).name))])


def _incomplete(report: Report) -> str:
    lines = ["**Not complete.** Settings and systems of which nothing has run are left out of the tables of quality."]
    if missing := [f"`{name}`" for name in report["missing"]]:
        more = f", and {len(missing) - 8} more (see {JSON_FILE})" if len(missing) > 8 else ""
        lines.append(f"Missing runs: {', '.join(missing[:8])}{more}.")
    return "\n\n".join([*lines, *(f"{problem.rstrip('.')}." for problem in report["problems"])])


def setup(plan: Plan, report: Report) -> str:
    """What was the same for all systems, and what was not."""
    ratios = {catalogue.OPTIMIZERS[name].options.get("adamw_ratio") for name in plan.config.optimizers} - {None}
    muon = "".join(f" With Muon, AdamW trains embeddings and vectors at {ratio:g} times its rate." for ratio in ratios)
    config, scale = plan.config, plan.scale
    compiled = "compiled" if config.compile == "on" else "not compiled"
    return "\n".join(
        [
            "- **Data.** All runs of a setting and a seed read the same windows of the same text in the same order.",
            f"- **Batches.** {scale.tokens_per_batch:,} tokens in a step; a longer context is a step of one sequence.",
            f"- **Optimisers.** The same for all: {', '.join(config.optimizers)}, each with a warm-up of a tenth of the steps, "
            f"a linear fall to zero, and the same weight decay and clipping.{muon}",
            f"- **Learning rates.** Each system's is tuned over the same grid, {config.tuning:g} s of training each, or up to "
            f"{MAX_TRIAL_RATIO} times as long until a trial has {MIN_TRIAL_STEPS} steps.{_short_trials(plan, report)} The loss "
            "on held-out text chooses rate and optimiser. The tables below show every trial.",
            f"- **Time.** Each run trains for {config.budget:g} s, without evaluations and compilation ({compiled}). Its "
            "steps, *training (s)* and the curves follow from the speed of a system (*tokens/s*), the median of "
            f"{scale.speed_rounds} runs of {scale.speed_steps} steps. Speeds are measured first, in turn.",
            f"- **Parameters.** {parameters_apart(report)}",
            "- **Not equalised.** Each system has the initialisation, the norm and the other options of its preset. On a CPU "
            "with a C++ compiler, gated units and mhsa-relu2 compute parts of their tiles in functions in C++.",
        ]
    )


def _short_trials(plan: Plan, report: Report) -> str:
    """A sentence about systems whose trials are too short to choose by."""
    rows = [(setting["name"], row) for setting in settings_with_results(report) for row in setting["rows"]]
    steps = {f"{row['name']} ({name})": row["trial_steps"].get(row["optimizer"]) for name, row in rows if row["optimizer"]}
    short = [f"{name}: {count}" for name, count in steps.items() if count is not None and count < MIN_TRIAL_STEPS]
    return f" **Fewer may choose a rate by chance**: {', '.join(short)}." if short and plan.config.scale != "trial" else ""


def parameters_apart(report: Report) -> str:
    """A sentence about how far the numbers of parameters are apart, of systems that have a run."""
    rows = [row for setting in settings_with_results(report) for row in setting["rows"]]
    apart = sorted({(row["name"], row["parameters_over_first"]) for row in rows})
    far = [f"{name} ({over:+.2%})" for name, over in apart if abs(over) > TOLERANCE]
    if not far:
        largest = max((abs(over) for _, over in apart), default=0.0)
        return f"Checked: all are within 3 % of the first system's (the largest difference is {largest:.1%})."
    why = "as published" if report["scale"] == "paper" else "because a width is a whole number of features for each head"
    return f"**Not within 3 %** of the first system's, {why}: {', '.join(far)}."


def quality_tables(plan: Plan, report: Report) -> Iterator[str]:
    """A table for each setting with results, with its heading and note."""
    masked, (metric, _) = plan.experiment.task == "mlm", metric_of_report(plan)
    for setting in settings_with_results(report):
        rows = setting["rows"]
        columns = {
            "system": [row["name"] for row in rows],
            "parameters": [_parameters(row) for row in rows],
            "optimiser, rate": [_rate(row) for row in rows],
            "steps": _column(rows, itemgetter("steps"), ",.0f"),
            "tokens/s": [cell(row["tokens_per_second"], ",.0f") for row in rows],
            "training (s)": _column(rows, itemgetter("seconds"), ",.0f"),
            "held-out nats" if masked else "held-out bits/byte": _column(rows, itemgetter(metric)),
            "test nats per masked token" if masked else "**test bits/byte**": _column(rows, metric_of_test("", metric)),
        }
        if plan.experiment.words:
            columns["test perplexity per word"] = _column(rows, metric_of_test("", "word_perplexity"), ",.4g")
        columns |= {
            "paper: perplexity": [cell(row["paper"].get("pplx"), ".4g") for row in rows],
            "loss against the baseline": [cell(row["relative_loss"], "+.2f", 100, " %") for row in rows],
            "paper: loss against it": [cell(row["paper_relative_loss"], "+.2f", 100, " %") for row in rows],
            "speed-up": [_speedups(row["speedups"]) for row in rows],
            "paper: speed-up": [cell(row["paper"].get("speedup"), ".3g") for row in rows],
        }
        yield f"## {setting['name'][0].upper()}{setting['name'][1:]}"
        yield column_table(columns)
        if any(row["rate_at_edge"] for row in rows):
            yield "\\* The best rate is at an end of the grid: a rate beyond it may be better."


def positions_tables(report: Report) -> Iterator[str]:
    """The test losses of the first seed by the position of a token in its context, from the fourth on."""
    for setting in settings_with_results(report):
        found = {}
        for row in setting["rows"]:
            parts: list[list[float]] = next((test["by_position"] for test in row["runs"][0]["tests"] if test["name"] == ""), [])
            if losses := {first: (last, loss) for first, last, loss in parts if 4 <= first < last}:
                found[row["name"]] = losses
        if found:
            columns = {"system": list(found)}
            for first, (last, _) in next(iter(found.values())).items():
                columns[f"{first:,.0f} to {last:,.0f}"] = [f"{losses[first][1]:.3f}" for losses in found.values()]
            yield f"Test loss by the place of a token in its context: {setting['name']} (nats, first seed)"
            yield column_table(columns)


def tests_tables(plan: Plan, report: Report) -> Iterator[str]:
    """Measurements that differ from training: columns are the tests."""
    metric, _ = metric_of_report(plan)
    unit = "bits per byte" if metric == "bits_per_byte" else "nats"
    for setting in settings_with_results(report) if len(plan.experiment.tests) > 1 else ():
        columns: dict[str, list[str]] = {"system": [row["name"] for row in setting["rows"]]}
        for test in plan.experiment.tests:
            columns[test.name or "as trained"] = _column(setting["rows"], metric_of_test(test.name, metric))
        yield f"## Tests that differ from training: {setting['name']} ({unit} of the test split)"
        yield column_table(columns)


def pairs_table(plan: Plan, report: Report) -> Iterator[str]:
    """What an approximation costs, for each seed that both models have."""
    metric, _ = metric_of_report(plan)
    value = metric_of_test("", metric)
    unit = "bits/byte" if metric == "bits_per_byte" else "nats"
    names = ("context", "from -> to", unit, "loss", "paper: perplexity")
    lines: list[tuple[str, ...]] = []
    for setting, place in zip(report["settings"], plan.settings, strict=True) if plan.experiment.pairs else ():
        rows = {row["name"]: row for row in setting["rows"]}
        for name, (exact, approximate) in plan.experiment.pairs.items():
            runs = [rows[arm]["runs"] if arm in rows else [] for arm in (exact, approximate)]
            both = [(value(first), value(second)) for first, second in zip(*runs, strict=False)]
            seeds = [(wanted, found) for wanted, found in both if wanted is not None and found is not None]
            if seeds:
                more = _values([found - wanted for wanted, found in seeds], "+.4f")
                loss = _values([100 * (found / wanted - 1) for wanted, found in seeds], "+.2f", " %")
                paper = cell(paper_cost(plan.experiment.paper_tables, name, place), "+.2f")
                lines.append((setting["name"], name, more, loss, paper))
    if lines:
        yield "## What the approximation costs"
        yield column_table(dict(zip(names, map(list, zip(*lines, strict=True)), strict=True)), left=2)
        yield APPROXIMATION


def memory_tables(report: Report) -> Iterator[str]:
    """A table for each task and length with results: accuracy, also where it differs from training, and what it costs."""
    for setting in settings_with_results(report):
        rows = setting["rows"]
        columns = {
            "system": [row["name"] for row in rows],
            "parameters": [_parameters(row) for row in rows],
            "rate": [_rate(row) for row in rows],
            "**accuracy**": _column(rows, metric_of_test("", "accuracy"), ".1%"),
        }
        tests = [test for row in rows for run in row["runs"] for test in run["tests"] if test["name"]]
        for name in dict.fromkeys(test["name"] for test in tests if test["depth"] is None):
            columns[name] = _column(rows, metric_of_test(name, "accuracy"), ".1%")
        columns |= {
            f"steps to {ENOUGH:.0%}": _column(rows, lambda run: steps_to(run, ENOUGH), ",.0f"),
            "state": [cell(row["state_bytes"], size) for row in rows],
            "ms per step": [cell(row["step_seconds"], three_digits, 1e3) for row in rows],
            "µs per decoded token": [cell(row["decode_seconds"], three_digits, 1e6) for row in rows],
        }
        yield f"## {setting['name'][0].upper()}{setting['name'][1:]}"
        yield column_table(columns)
        for length in dict.fromkeys(test["context_length"] for test in tests if test["depth"] is not None):
            yield f"Accuracy by the share of a text of {length:,} tokens that is before the needle"
            depths = {test["name"]: test["depth"] for test in tests if test["context_length"] == length}
            by_depth = {f"{depth:.0%}": name for name, depth in depths.items() if depth is not None}
            found = {depth: _column(rows, metric_of_test(name, "accuracy"), ".1%") for depth, name in by_depth.items()}
            yield column_table({"system": columns["system"], **found})


def latency_tables(plan: Plan, report: Report) -> Iterator[str]:
    """The times of steps, and their ratios here and in the paper: columns are the contexts."""
    precisions = {row["precision"] for setting in report["settings"] for row in setting["rows"] if row["precision"]}
    micros = f"Microseconds for a token, forward and backward, in {' and '.join(sorted(precisions))}"
    columns_of: tuple[tuple[str, Callable[[SystemRow], float | None], Callable[[float], str]], ...] = (
        (micros, itemgetter("microseconds_per_token"), three_digits),
        (f"The time of a step over that of {plan.experiment.baseline}", itemgetter("relative"), "{:.2f}".format),
        ("The paper: the same ratio, on 64 TPU-v4 cores", itemgetter("paper_relative"), "{:.2f}".format),
    )
    for title, value, form in columns_of:
        if all(value(row) is None for setting in report["settings"] for row in setting["rows"]):
            continue
        columns: dict[str, list[str]] = {"system": [row["name"] for row in report["settings"][0]["rows"]]}
        for setting in report["settings"]:
            columns[f"{setting['context']:,}"] = [
                (row["problem"] or NOT_THERE) if (found := value(row)) is None else form(found) for row in setting["rows"]
            ]
        yield f"## {title}"
        yield column_table(columns)


def rate_tables(report: Report) -> Iterator[str]:
    """Every trial of a learning rate: a table for each setting and optimiser."""
    for setting in settings_with_results(report):
        rows = setting["rows"]
        for optimizer, grid in rows[0]["grid"].items():
            columns: dict[str, list[str]] = {"system": [row["name"] for row in rows]}
            columns["steps"] = [f"{row['trial_steps'].get(optimizer) or NOT_THERE}" for row in rows]
            for rate in grid:
                columns[rate] = [_tried(row, optimizer, rate) for row in rows]
            what = "nats per token on held-out text; bold: the choice; \\*: the best of an optimiser, at an end of the grid"
            yield f"Rates tried with {optimizer}: {setting['name']} ({what})"
            yield column_table(columns)


def _tried(row: SystemRow, optimizer: str, rate: str) -> str:
    grid = row["grid"][optimizer]
    loss = grid[rate]
    if not isinstance(loss, float):
        return str(loss)
    chosen = row["optimizer"] == optimizer and row["rate"] is not None and f"{row['rate']:g}" == rate
    best = loss == min(each for each in grid.values() if isinstance(each, float))
    at_end = best and len(grid) > 1 and rate in (min(grid, key=float), max(grid, key=float))
    return (f"**{loss:.4f}**" if chosen else f"{loss:.4f}") + ("\\*" if at_end else "")


def _column(rows: Sequence[SystemRow], metric: Metric, form: str = ".4f") -> list[str]:
    return [_values(values_of_row(row, metric), form) for row in rows]


def _values(values: Sequence[float], form: str, unit: str = "") -> str:
    """The values of all seeds, or of more than three, their mean and standard deviation."""
    if len(values) > 3:
        mean, deviation = format(statistics.fmean(values), form), format(statistics.stdev(values), form.replace("+", ""))
        spread = f" ± {deviation}" if len(set(values)) > 1 else ""
        return f"{mean}{spread}{unit} ({len(values)})"
    return " / ".join(f"{value:{form}}{unit}" for value in values) or NOT_THERE


def _parameters(row: SystemRow) -> str:
    mark = "" if abs(row["parameters_over_first"]) <= TOLERANCE else " (!)"
    millions = row["parameters"] / 1e6
    count = f"{millions:.2f} M" if millions < 100 else f"{millions:.0f} M"
    return f"{count}, {row['parameters_over_first']:+.1%}{mark}" if row["parameters_over_first"] else count


def _rate(row: SystemRow) -> str:
    if row["rate"] is None:
        return NOT_THERE
    return f"{row['optimizer'] or ''} {row['rate']:g}{'*' if row['rate_at_edge'] else ''}".strip()


def _speedups(speedups: Sequence[float | None]) -> str:
    known = [speedup for speedup in speedups if speedup is not None]
    if len(known) == len(speedups):
        return _values(known, ".2f")
    return " / ".join("not reached" if speedup is None else f"{speedup:.2f}" for speedup in speedups)


def draw_pictures(plan: Plan, report: Report) -> list[tuple[Path, str]]:
    """Draw all pictures for which there are numbers, and return each with its caption. LineartimeError without matplotlib."""

    def draw(panels: Sequence[Panel], x: str, log: bool = False) -> Any:
        return draw_panels(panels, x, _looks(plan, [name for panel in panels for name in panel.curves]), log=log)

    if plan.experiment.kind == "latency":
        figures = [("latency", draw(_latency(report), "tokens of context", log=True), TIMES)]
    elif plan.experiment.kind == "memory":
        figures = [
            ("lengths", draw(_accuracies(plan, report, lambda setting, row: setting.context), "tokens of a text"), LENGTHS),
            ("states", draw(_accuracies(plan, report, lambda _, row: row["state_bytes"], last=True), "bytes of state"), STATES),
        ]
        for axes in (axes for _, figure, _ in figures if figure is not None for axes in figure.axes):
            axes.set_ylim(-0.05, 1.05)
    else:
        figures = [
            ("quality", _curves(plan, report), CURVES.format(base=plan.experiment.baseline)),
            ("contexts", draw(_contexts(plan, report), "tokens of context"), CONTEXTS),
        ]
    drawn = []
    for name, figure, caption in figures:
        file = plan.folder / f"{name}.png"
        if figure is None:
            file.unlink(missing_ok=True)  # of an earlier report, perhaps
        else:
            drawn.append((save_figure(figure, file, 130), caption))
    return drawn


def _contexts(plan: Plan, report: Report) -> list[Panel]:
    """Final quality by context: a panel for each text with two contexts or more, and one of the paper."""
    metric, unit = metric_of_report(plan)
    panels = {setting["text"]: Panel(f"{setting['text']}, test split", unit) for setting in report["settings"]}
    paper = Panel("the paper", "perplexity")
    for setting in report["settings"]:
        for row in setting["rows"]:
            found = values_of_row(row, metric_of_test("", metric))
            panels[setting["text"]].add(row["name"], setting["context"], statistics.fmean(found) if found else None)
            paper.add(row["name"], setting["context"], row["paper"].get("pplx"))
    shown = [panel for panel in panels.values() if len(panel.places) > 1]
    return [*shown, paper] if shown and len(paper.places) > 1 else shown


def _accuracies(
    plan: Plan, report: Report, place: Callable[[Setting, SystemRow], float | None], last: bool = False
) -> list[Panel]:
    """Accuracy by a number of each row: a panel for each task, of all lengths or of the last one."""
    panels: dict[str, Panel] = {}
    for setting, found in sorted(zip(plan.settings, report["settings"], strict=True), key=lambda pair: pair[0].context):
        name = f"{setting.task}" + (f", {setting.pairs:,} to remember" if setting.pairs else "")
        panel = Panel(found["name"], "accuracy") if last else panels.get(name, Panel(name, "accuracy"))
        for row in found["rows"]:
            accuracies, x = values_of_row(row, metric_of_test("", "accuracy")), place(setting, row)
            if accuracies and x is not None:
                panel.add(row["name"], x, statistics.fmean(accuracies))
        if panel.curves:
            panels[name] = panel
    return [*panels.values()]


def _latency(report: Report) -> list[Panel]:
    """Microseconds a token by context, here and in the paper."""
    ours, paper = Panel("here", "µs per token"), Panel("the paper", "ms per step of 262,144 tokens")
    for setting in report["settings"]:
        for row in setting["rows"]:
            ours.add(row["name"], setting["context"], row["microseconds_per_token"])
            paper.add(row["name"], setting["context"], row["paper"].get("latency_ms"))
    return [panel for panel in (ours, paper) if panel.curves] if ours.curves else []


def _curves(plan: Plan, report: Report) -> Any:
    """Held-out loss by seconds of training, with a panel for each setting; None without any."""
    metric, unit = metric_of_report(plan)
    place = 3 if metric == "bits_per_byte" else 2
    settings = [each for each in report["settings"] if any(run["curve"] for row in each["rows"] for run in row["runs"])]
    if not settings:
        return None
    looks = _looks(plan, [row["name"] for setting in settings for row in setting["rows"]])
    figure, panels = new_panels(len(settings), len(looks))
    lines: dict[str, Any] = {}
    for axes, setting in zip(panels, settings, strict=True):
        late: list[float] = []
        base = baseline_row(setting["rows"], plan.experiment.baseline)
        for row, run in ((each, run) for each in setting["rows"] for run in each["runs"] if run["curve"]):
            seconds, values = [point[1] for point in run["curve"]], [point[place] for point in run["curve"]]
            look, first = looks[row["name"]], run["seed"] == 0
            (line,) = axes.plot(seconds, values, markersize=3 if first else 0, linewidth=1.4 if first else 0.7, **look)
            lines.setdefault(row["name"], line)
            late += [value for second, value in zip(seconds, values, strict=True) if second >= seconds[-1] / 10]
            if row is base and first:
                axes.axhline(values[-1], color=look["color"], linestyle=":", linewidth=1)
        margin = 0.05 * (max(late) - min(late)) or 0.01
        axes.set_ylim(min(late) - margin, max(late) + margin)  # the first losses would flatten what is compared
        axes.set(title=setting["name"], xlabel="seconds of training", ylabel=unit)
        label_axes(axes)
    legend_below(figure, lines, 3 * min(len(settings), 2))
    return figure


def _looks(plan: Plan, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """The looks of names, which are the same in all reports of an experiment."""
    looks = looks_of([*(arm.name for arm in plan.experiment.arms), *names])
    return {name: looks[name] for name in names}
