"""The pictures of a report."""

import statistics
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, cast

from lineartime.experiments.collect import baseline_row, metric_of_test, values_of_row
from lineartime.experiments.plan import Plan
from lineartime.experiments.report_data import LatencyReport, QualityReport, QualitySetting, Report, TestMetric
from lineartime.experiments.report_texts import CURVES
from lineartime.runs.figures import new_figure, save_figure
from lineartime.runs.ticks import label_axes

WIDTH, HEIGHT = 4.8, 3.6
_COLOURS = [*(f"C{number}" for number in range(10)), "black", "gold", "navy"]
_MARKERS = "osD^v<>PX*dph"


def draw_pictures(plan: Plan, report: Report) -> list[tuple[Path, str]]:
    """Draw all pictures for which there are numbers, and return each with its caption. LineartimeError without matplotlib."""
    if plan.experiment.kind == "latency":
        times = cast("LatencyReport", report)
        figures = [("latency", _latency(plan, times), "Time of a token by the length of the context, here and in the paper.")]
    else:
        results = cast("QualityReport", report)
        figures = [("quality", _curves(plan, results), CURVES.format(base=plan.experiment.baseline))]
        figures.append(
            ("contexts", _contexts(plan, results), "Final quality by the length of the context, here and in the paper.")
        )
        if len(plan.experiment.tests) > 2:
            figures.append(("tests", _tests(plan, results), "Quality by the size of chunks in the test; circled: as trained."))
    drawn = []
    for name, figure, caption in figures:
        if figure is None:
            (plan.folder / f"{name}.png").unlink(missing_ok=True)  # of an earlier report, perhaps
            continue
        drawn.append((save_figure(figure, plan.folder / f"{name}.png", 130), caption))
    return drawn


def _metric(plan: Plan) -> tuple[TestMetric, str]:
    return ("loss", "nats per masked token") if plan.experiment.task == "mlm" else ("bits_per_byte", "bits per byte")


def _looks(plan: Plan, names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """A colour and a marker for each name: those of its arm, which are the same in all reports of an experiment."""
    shown = list(dict.fromkeys(names))
    everything = dict.fromkeys([*(arm.name for arm in plan.experiment.arms), *shown])
    looks = dict(zip(everything, cycle(zip(_COLOURS, _MARKERS, strict=True)), strict=False))
    return {name: looks[name] for name in shown}


def _columns(panels: int) -> int:
    """The number of panels in a row."""
    return 2 if panels == 4 else min(panels, 3)


def _figure(panels: int, names: int) -> tuple[Any, list[Any]]:
    """A figure with panels in rows of two or three, and room for a legend below them."""
    columns = _columns(panels)
    rows, lines = -(-panels // columns), -(-names // (3 * columns))
    figure = new_figure("A picture", WIDTH * columns + 0.4, HEIGHT * rows + 0.4 + 0.22 * lines)
    figure.get_layout_engine().set(wspace=0.05, hspace=0.05)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in grid[panels:]:
        unused.remove()
    return figure, grid[:panels]


def _legend(figure: Any, lines: dict[str, Any], panels: int) -> None:
    columns = _columns(panels)
    figure.legend(
        lines.values(), lines.keys(), loc="outside lower center", ncols=min(len(lines), 3 * columns), frameon=False, fontsize=8
    )


def _curves(plan: Plan, report: QualityReport) -> Any:
    """Held-out loss by seconds of training: a panel for each setting."""
    name, unit = _metric(plan)
    place = 3 if name == "bits_per_byte" else 2
    settings = [each for each in report["settings"] if any(run["curve"] for row in each["rows"] for run in row["runs"])]
    if not settings:
        return None
    looks = _looks(plan, (row["name"] for setting in settings for row in setting["rows"]))
    figure, panels = _figure(len(settings), len(looks))
    lines: dict[str, Any] = {}
    for axes, setting in zip(panels, settings, strict=True):
        late: list[float] = []
        base = baseline_row(setting["rows"], plan.experiment.baseline)
        for row in setting["rows"]:
            colour, marker = looks[row["name"]]
            for run in row["runs"]:
                points = [(point[1], point[place]) for point in run["curve"]]
                if not points:
                    continue
                first = run["seed"] == 0
                (line,) = axes.plot(
                    *zip(*points, strict=True),
                    "-",
                    color=colour,
                    marker=marker if first else "",
                    markersize=3,
                    linewidth=1.4 if first else 0.7,
                )
                lines.setdefault(row["name"], line)
                late += [value for _, value in points[len(points) // 3 :]]
                if row is base and first:
                    axes.axhline(points[-1][1], color=colour, linestyle=":", linewidth=1)
        low, high = min(late), max(late)  # the first losses would flatten what is compared
        margin = 0.05 * (high - low) or 0.01
        axes.set_ylim(low - margin, high + margin)
        axes.set(title=setting["name"], xlabel="seconds of training", ylabel=unit)
        axes.grid(alpha=0.3)
        label_axes(axes)
    _legend(figure, lines, len(settings))
    return figure


def _contexts(plan: Plan, report: QualityReport) -> Any:
    """Final quality by context: a panel for each text with two contexts or more, and one of the paper."""
    metric, unit = _metric(plan)
    texts: dict[str, list[QualitySetting]] = {}
    for setting in report["settings"]:
        texts.setdefault(setting["text"], []).append(setting)
    panels: list[tuple[str, str, dict[str, list[tuple[float, float]]]]] = []
    for text, settings in texts.items():
        points: dict[str, list[tuple[float, float]]] = {}
        for setting in settings:
            for row in setting["rows"]:
                if found := values_of_row(row, metric_of_test("", metric)):
                    points.setdefault(row["name"], []).append((setting["context"], statistics.fmean(found)))
        if len({context for each in points.values() for context, _ in each}) > 1:
            panels.append((f"{text}, test split", unit, points))
    of_paper: dict[str, list[tuple[float, float]]] = {}
    for setting in report["settings"]:
        for row in setting["rows"]:
            if "pplx" in row["paper"]:
                points_of = of_paper.setdefault(row["name"], [])
                if setting["context"] not in [context for context, _ in points_of]:
                    points_of.append((setting["context"], row["paper"]["pplx"]))
    if not panels:
        return None
    if len({context for each in of_paper.values() for context, _ in each}) > 1:
        panels.append(("the paper", "perplexity", of_paper))
    return _by_number(plan, panels, "tokens of context")


def _tests(plan: Plan, report: QualityReport) -> Any:
    """Quality by the chunk size of the test: a panel for each setting."""
    metric, unit = _metric(plan)
    panels = []
    circles: list[list[tuple[float, float]]] = []
    for setting in report["settings"]:
        points: dict[str, list[tuple[float, float]]] = {}
        trained: list[tuple[float, float]] = []
        for row in setting["rows"]:
            for test in plan.experiment.tests:
                found = values_of_row(row, metric_of_test(test.name, metric))
                if test.chunk_size is not None and found:
                    points.setdefault(row["name"], []).append((test.chunk_size, statistics.fmean(found)))
                    if test.chunk_size == row["chunk_size"]:
                        trained.append(points[row["name"]][-1])
        if points:
            panels.append((setting["name"], unit, points))
            circles.append(trained)
    return _by_number(plan, panels, "tokens of a chunk in the test", circles) if panels else None


def _by_number(
    plan: Plan,
    panels: Sequence[tuple[str, str, dict[str, list[tuple[float, float]]]]],
    label: str,
    circles: Sequence[Sequence[tuple[float, float]]] = (),
) -> Any:
    """Curves by a power of two: a panel each, and one legend."""
    looks = _looks(plan, (name for _, _, points in panels for name in points))
    figure, all_axes = _figure(len(panels), len(looks))
    lines: dict[str, Any] = {}
    for number, (axes, (title, unit, points)) in enumerate(zip(all_axes, panels, strict=True)):
        for name, values in points.items():
            colour, marker = looks[name]
            (lines[name],) = axes.plot(*zip(*sorted(values), strict=True), "-", color=colour, marker=marker, markersize=4)
        for x, y in circles[number] if circles else ():
            axes.plot(x, y, "o", markersize=10, markerfacecolor="none", markeredgecolor="black")
        axes.set_xscale("log", base=2)
        axes.set(title=title, xlabel=label, ylabel=unit)
        axes.margins(x=0.08, y=0.08)
        axes.grid(alpha=0.3)
        label_axes(axes, x_values=sorted({x for values in points.values() for x, _ in values}))
    _legend(figure, lines, len(panels))
    return figure


def _latency(plan: Plan, report: LatencyReport) -> Any:
    """Microseconds a token by context, here and in the paper."""
    ours: dict[str, list[tuple[float, float]]] = {}
    paper: dict[str, list[tuple[float, float]]] = {}
    for setting in report["settings"]:
        for row in setting["rows"]:
            if row["microseconds_per_token"] is not None:
                ours.setdefault(row["name"], []).append((setting["context"], row["microseconds_per_token"]))
            if "latency_ms" in row["paper"]:
                paper.setdefault(row["name"], []).append((setting["context"], row["paper"]["latency_ms"]))
    if not ours:
        return None
    figure = _by_number(
        plan,
        [("here", "µs per token", ours), ("the paper", "ms per step of 262,144 tokens", paper)][: 2 if paper else 1],
        "tokens of context",
    )
    for axes in figure.axes:
        axes.set_yscale("log")
        label_axes(axes, x_values=sorted({float(x) for line in axes.lines for x in line.get_xdata()}))
    return figure
