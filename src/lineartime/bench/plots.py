"""The plots of a benchmark: time, memory and decode latency by length, and quality by cost."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lineartime.bench.config import Measure
from lineartime.bench.results import Measurement, Results
from lineartime.plots import label_axes, legend_below, new_figure, save_figure

WIDTH, HEIGHT = 4.6, 3.4
AT_ONCE: tuple[Measure, ...] = ("train", "forward", "prefill")


def draw_plots(results: Results, quality: dict[str, float]) -> list[Path]:
    """Draw latency.png, memory.png, decode.png and pareto.png, except those without data, and return the files.

    Args:
        results: what was measured.
        quality: bits per byte by preset.

    Raises:
        LineartimeError: if matplotlib is missing, or a file cannot be written.
    """
    finished = results.finished
    timed = [found for found in finished if found.median is not None]
    at_once = [found for found in timed if found.case.measure in AT_ONCE]
    decode = [found for found in timed if found.case.measure == "decode"]
    measured = [found for found in finished if found.memory is not None and not found.problem]
    colours = {name: f"C{index % 10}" for index, name in enumerate(dict.fromkeys(each.subject.name for each in finished))}
    figures = {}
    if at_once:
        figures["latency"] = _by_length(at_once, "tokens of context", "µs per token", _microseconds, colours)
    if measured:
        figures["memory"] = _by_length(measured, "tokens of context", "MB of a step, above the weights", _megabytes, colours)
    if decode:
        figures["decode"] = _by_length(decode, "tokens read before", "ms per token", _milliseconds, colours)
    if costs := _costs(at_once, quality):
        figures["pareto"] = _pareto(costs, quality, colours)
    return [save_figure(figure, results.folder / f"{name}.png", 130) for name, figure in figures.items()]


def _microseconds(found: Measurement) -> float:
    assert found.median is not None
    return 1e6 * found.median / found.case.tokens


def _milliseconds(found: Measurement) -> float:
    assert found.median is not None
    return 1e3 * found.median


def _megabytes(found: Measurement) -> float:
    assert found.memory is not None
    return max(found.memory.peak, 1) / 1e6


def _by_length(
    measurements: Sequence[Measurement], x: str, y: str, value: Callable[[Measurement], float], colours: dict[str, str]
) -> Any:
    """Draw curves by length: a panel for each measure and precision, with a shared legend."""
    panels = list(dict.fromkeys((found.case.dtype, found.case.measure) for found in measurements))
    dtypes, measures = (list(dict.fromkeys(parts)) for parts in zip(*panels, strict=True))
    subjects = list(dict.fromkeys(found.subject for found in measurements))
    rows, columns = (len(dtypes), len(measures)) if len(measures) > 1 else (1, len(dtypes))
    legend_height = 0.25 * -(-len(subjects) // (2 * columns))
    figure = new_figure(WIDTH * columns + 0.4, HEIGHT * rows + 0.3 + legend_height)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    lines: dict[str, Any] = {}
    for axes, (dtype, measure) in zip(grid.flat, [(d, m) for d in dtypes for m in measures], strict=True):
        shown = [found for found in measurements if (found.case.dtype, found.case.measure) == (dtype, measure)]
        for subject in subjects:
            points = sorted((found.case.length, value(found)) for found in shown if found.subject == subject)
            if points:
                style = "o-" if subject.mode == "eager" else "s--"
                colour = colours[subject.name]
                (lines[str(subject)],) = axes.plot(*zip(*points, strict=True), style, color=colour, markersize=4)
        modes = " and ".join(dict.fromkeys(found.subject.mode for found in shown))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(title=f"{measure}, {dtype}, {modes}", xlabel=x)
        axes.yaxis.set_tick_params(labelleft=True)
        label_axes(axes, x_values=[found.case.length for found in shown])
    for row in grid:
        row[0].set_ylabel(y)
    legend_below(figure, lines, 2 * columns)
    return figure


def _costs(measurements: Sequence[Measurement], quality: dict[str, float]) -> dict[str, dict[str, float]]:
    """By panel title, the µs per token of every preset of known quality, in its fastest mode."""
    measure = min((found.case.measure for found in measurements), key=AT_ONCE.index, default=AT_ONCE[0])
    chosen = [found for found in measurements if found.case.measure == measure and found.subject.name in quality]
    longest = max((found.case.length for found in chosen), default=0)
    costs: dict[str, dict[str, float]] = {}
    for found in chosen:
        if found.case.length == longest:
            panel = costs.setdefault(f"{measure}, {found.case.dtype}, {longest:,} tokens of context", {})
            panel[found.subject.name] = min(_microseconds(found), panel.get(found.subject.name, float("inf")))
    return costs


def _pareto(costs: dict[str, dict[str, float]], quality: dict[str, float], colours: dict[str, str]) -> Any:
    """Draw quality by cost: a panel for each precision, with a line through the Pareto front."""
    figure = new_figure(WIDTH * len(costs) + 0.4, HEIGHT + 0.4)
    for (title, points), axes in zip(costs.items(), figure.subplots(1, len(costs), squeeze=False).flat, strict=True):
        best = pareto_front({name: (cost, quality[name]) for name, cost in points.items()})
        axes.plot([points[name] for name in best], [quality[name] for name in best], "-", color="0.75", zorder=0)
        middle = (min(points.values()) + max(points.values())) / 2
        for name, cost in points.items():
            axes.plot(cost, quality[name], "o", color=colours[name])
            offset, side = (5, "left") if cost <= middle else (-5, "right")  # keep names inside the axes
            axes.annotate(name, (cost, quality[name]), xytext=(offset, 6), textcoords="offset points", fontsize=8, ha=side)
        axes.set(title=title, xlabel="µs per token", ylabel="bits per byte (lower is better)")
        axes.margins(x=0.3, y=0.15)
        label_axes(axes)
    return figure


def pareto_front(points: dict[str, tuple[float, float]]) -> list[str]:
    """The names of the Pareto-optimal points (cost, loss), cheapest first."""
    front: list[str] = []
    for name in sorted(points, key=lambda name: points[name]):
        if not front or points[name][1] < points[front[-1]][1]:
            front.append(name)
    return front
