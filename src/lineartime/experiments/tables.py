"""The tables of a report."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

from lineartime.experiments.paper import paper_cost
from lineartime.experiments.plan import Plan
from lineartime.experiments.report_data import (
    Metric,
    Report,
    SystemRow,
    TestMetric,
    baseline_row,
    metric_of_test,
    settings_with_results,
    steps_to,
    values_of_row,
    within_tolerance,
)
from lineartime.markdown import NOT_THERE, cell, column_table, three_digits
from lineartime.units import size

OTHER_CHUNKS = (
    "With other chunks than in training, the relative bias keeps the distances that both sizes have, and is zero for those "
    "that training did not see. Beyond 512 tokens it has another form, which cannot be made from it: those cells are empty."
)
ENOUGH = 0.95
"""The accuracy at which a task counts as learnt."""
APPROXIMATION = (
    "The difference of the test losses, seed by seed, after the same time of training; the paper's after the same steps."
)


def metric_of_report(plan: Plan) -> tuple[TestMetric, str]:
    """The metric by which systems are compared on the test split, and its unit."""
    return ("loss", "nats per masked token") if plan.experiment.task == "mlm" else ("bits_per_byte", "bits per byte")


def quality_tables(plan: Plan, report: Report) -> Iterator[str]:
    """A table for each setting with results, with its heading and note."""
    masked, (metric, _) = plan.experiment.task == "mlm", metric_of_report(plan)
    for setting in settings_with_results(report):
        rows = setting["rows"]
        base = baseline_row(rows, report["baseline"])
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
            "speed-up": [_speedups(row, base) for row in rows],
            "paper: speed-up": [cell(row["paper"].get("speedup"), ".3g") for row in rows],
        }
        yield f"## {setting['name'][0].upper()}{setting['name'][1:]}"
        yield column_table(columns)
        if any(row["rate_at_edge"] for row in rows):
            yield "\\* The best rate is at an end of the grid: a rate beyond it may be better."


def positions_tables(report: Report) -> Iterator[str]:
    """The test losses of the first seed by the position of a token in its context."""
    for setting in settings_with_results(report):
        measured = {row["name"]: _by_position(row) for row in setting["rows"]}
        found = {name: losses for name, losses in measured.items() if losses}
        if found:
            columns = {"system": list(found)}
            for first, (last, _) in next(iter(found.values())).items():
                columns[f"{first:,.0f} to {last:,.0f}"] = [f"{losses[first][1]:.3f}" for losses in found.values()]
            yield f"Test loss by the place of a token in its context: {setting['name']} (nats, first seed)"
            yield column_table(columns)


def _by_position(row: SystemRow) -> dict[float, tuple[float, float]]:
    """The last place and the loss by the first place of each part of the context, from the fourth token on.

    Empty if the first run is not finished. Earlier versions ended the last part one token earlier.
    """
    parts: list[list[float]] = next((test["by_position"] for test in row["runs"][0]["tests"] if test["name"] == ""), [])
    return {first: (last, loss) for first, last, loss in parts if 4 <= first < last}


def tests_tables(plan: Plan, report: Report) -> Iterator[str]:
    """Measurements that differ from training: columns are the tests."""
    metric, _ = metric_of_report(plan)
    unit = "bits per byte" if metric == "bits_per_byte" else "nats"
    for setting in settings_with_results(report) if len(plan.experiment.tests) > 1 else ():
        columns: dict[str, list[str]] = {"system": [row["name"] for row in setting["rows"]]}
        for name in report["tests"]:
            columns[name or "as trained"] = _column(setting["rows"], metric_of_test(name, metric))
        yield f"## Tests that differ from training: {setting['name']} ({unit} of the test split)"
        yield column_table(columns)
    if any(name.startswith("tested with") for name in report["tests"]):
        yield OTHER_CHUNKS


def pairs_table(plan: Plan, report: Report) -> Iterator[str]:
    """What an approximation costs, for each seed that both models have."""
    metric, _ = metric_of_report(plan)
    value = metric_of_test("", metric)
    unit = "bits/byte" if metric == "bits_per_byte" else "nats"
    lines: list[dict[str, str]] = []
    for setting, place in zip(report["settings"], plan.settings, strict=True) if plan.experiment.pairs else ():
        rows = {row["arm"]: row for row in setting["rows"]}
        for name, (exact, approximate) in plan.experiment.pairs.items():
            runs = [rows[arm]["runs"] if arm in rows else [] for arm in (exact, approximate)]
            both = [(value(first), value(second)) for first, second in zip(*runs, strict=False)]
            seeds = [(wanted, found) for wanted, found in both if wanted is not None and found is not None]
            if seeds:
                lines.append(
                    {
                        "context": setting["name"],
                        "from -> to": name,
                        unit: _values([found - wanted for wanted, found in seeds], "+.4f"),
                        "loss": _values([100 * (found / wanted - 1) for wanted, found in seeds], "+.2f", " %"),
                        "paper: perplexity": cell(paper_cost(name, place, plan.experiment.task), "+.2f"),
                    }
                )
    if lines:
        yield "## What the approximation costs"
        yield column_table({name: [line[name] for line in lines] for name in lines[0]}, left=2)
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


def latency_tables(report: Report) -> Iterator[str]:
    """The times of steps, and their ratios here and in the paper: columns are the contexts."""
    precisions = {row["precision"] for setting in report["settings"] for row in setting["rows"] if row["precision"]}
    micros = f"Microseconds for a token, forward and backward, in {' and '.join(sorted(precisions))}"
    columns_of: tuple[tuple[str, Callable[[SystemRow], float | None], Callable[[float], str]], ...] = (
        (micros, itemgetter("microseconds_per_token"), three_digits),
        (f"The time of a step over that of {report['baseline']}", itemgetter("relative"), "{:.2f}".format),
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


def rate_tables(plan: Plan, report: Report) -> Iterator[str]:
    """Every trial of a learning rate: a table for each setting and optimiser."""
    for setting in settings_with_results(report):
        for optimizer in plan.config.optimizers:
            if rows := _by_arm(setting["rows"], optimizer):
                columns: dict[str, list[str]] = {"system": [row["arm"] for row in rows]}
                columns["steps"] = [f"{trial_steps(plan, row, optimizer) or NOT_THERE}" for row in rows]
                for rate in rows[0]["grid"][optimizer]:
                    columns[rate] = [_tried(row, optimizer, rate) for row in rows]
                what = "nats per token on held-out text; bold: the choice; \\*: the best of an optimiser, at an end of the grid"
                yield f"Rates tried with {optimizer}: {setting['name']} ({what})"
                yield column_table(columns)


def _by_arm(rows: Sequence[SystemRow], optimizer: str) -> list[SystemRow]:
    """A row for each arm that was tuned with an optimiser: the one that was trained with it, if there are several."""
    tuned = [row for row in rows if row["grid"].get(optimizer)]
    first = sorted(tuned, key=lambda row: row["optimizer"] == optimizer)  # stable; later ones replace earlier ones
    chosen = {row["arm"]: row for row in first}
    return [chosen[arm] for arm in dict.fromkeys(row["arm"] for row in tuned)]


def trial_steps(plan: Plan, row: SystemRow, optimizer: str) -> int | None:
    """The steps of a trial; those of older reports, which do not hold them, from the speed that was measured."""
    if "trial_steps" in row:
        return row["trial_steps"].get(optimizer)
    if row["optimizer"] != optimizer or not row["tokens_per_second"] or plan.config.tuning is None:
        return None
    return round(plan.config.tuning * row["tokens_per_second"] / plan.scale.tokens_per_batch)


def _tried(row: SystemRow, optimizer: str, rate: str) -> str:
    grid = row["grid"][optimizer]
    loss = grid[rate]
    if not isinstance(loss, float):
        return str(loss)
    chosen = row["optimizer"] == optimizer and row["rate"] is not None and f"{row['rate']:g}" == rate
    best = loss == min(each for each in grid.values() if isinstance(each, float))
    at_end = best and len(grid) > 1 and rate in (min(grid, key=float), max(grid, key=float))
    return (f"**{loss:.4f}**" if chosen else f"{loss:.4f}") + ("\\*" if at_end else "")


# Cells ----------------------------------------------------------------------------------------------------------------


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
    mark = "" if within_tolerance(row) else " (!)"
    millions = row["parameters"] / 1e6
    count = f"{millions:.2f} M" if millions < 100 else f"{millions:.0f} M"
    return f"{count}, {row['parameters_over_first']:+.1%}{mark}" if row["parameters_over_first"] else count


def _rate(row: SystemRow) -> str:
    if row["rate"] is None:
        return NOT_THERE
    return f"{row['optimizer'] or ''} {row['rate']:g}{'*' if row['rate_at_edge'] else ''}".strip()


def _speedups(row: SystemRow, base: SystemRow | None) -> str:
    """The speed-ups of the seeds that this row and the baseline's have."""
    both = zip(row["runs"], row["speedups"], base["runs"] if base else [], strict=False)
    speedups = [speedup for run, speedup, other in both if run["loss"] is not None and other["loss"] is not None]
    known = [speedup for speedup in speedups if speedup is not None]
    if len(known) == len(speedups):
        return _values(known, ".2f")
    return " / ".join("not reached" if speedup is None else f"{speedup:.2f}" for speedup in speedups)
