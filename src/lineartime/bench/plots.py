"""The plots of a benchmark: time, memory and decode latency by length, and quality by cost."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lineartime.bench.config import Measure
from lineartime.bench.results import Entry, Results
from lineartime.runs.figures import new_figure, save_figure
from lineartime.runs.ticks import label_axes

WIDTH, HEIGHT = 4.6, 3.4
PURPOSE = "A plot"
AT_ONCE: tuple[Measure, ...] = ("train", "forward", "prefill")


def draw_plots(results: Results, quality: dict[str, float]) -> list[Path]:
    """Draw latency.png, memory.png, decode.png and pareto.png, except those without data, and return the files.

    Args:
        results: what was measured.
        quality: bits per byte by preset.

    Raises:
        LineartimeError: if matplotlib is missing, or a file cannot be written.
    """
    at_once = [entry for entry in results.finished if entry.case.measure in AT_ONCE and entry.median is not None]
    decode = [entry for entry in results.finished if entry.case.measure == "decode"]
    plots: list[tuple[str, list[Entry], str, str, Callable[[Entry], float | None]]] = [
        ("latency", at_once, "tokens of context", "µs per token", _microseconds),
        ("memory", results.finished, "tokens of context", "MB of a step, above the weights", _megabytes),
        ("decode", decode, "tokens read before", "ms per token", _milliseconds),
    ]
    colours = {name: f"C{index % 10}" for index, name in enumerate(dict.fromkeys(e.subject.name for e in results.finished))}
    figures = {}
    for name, entries, x, y, value in plots:
        shown = [entry for entry in entries if value(entry) is not None]
        if shown:
            figures[results.folder / f"{name}.png"] = _by_length(shown, x, y, value, colours)
    if costs := _costs(at_once, quality):
        figures[results.folder / "pareto.png"] = _pareto(costs, quality, colours)
    return [save_figure(figure, file, 130) for file, figure in figures.items()]


def _microseconds(entry: Entry) -> float | None:
    return None if entry.median is None else 1e6 * entry.median / entry.case.tokens


def _milliseconds(entry: Entry) -> float | None:
    return None if entry.median is None else 1e3 * entry.median


def _megabytes(entry: Entry) -> float | None:
    return None if entry.memory is None or entry.problem else max(entry.memory.peak, 1) / 1e6


def _by_length(
    entries: Sequence[Entry], x: str, y: str, value: Callable[[Entry], float | None], colours: dict[str, str]
) -> Any:
    """Draw curves by length: a panel for each measure and precision, with a shared legend."""
    measures = list(dict.fromkeys(entry.case.measure for entry in entries))
    dtypes = list(dict.fromkeys(entry.case.dtype for entry in entries))
    subjects = list(dict.fromkeys(entry.subject for entry in entries))
    rows, columns = (len(dtypes), len(measures)) if len(measures) > 1 else (1, len(dtypes))
    legend = 0.25 * -(-len(subjects) // (2 * columns))
    figure = new_figure(PURPOSE, WIDTH * columns + 0.4, HEIGHT * rows + 0.3 + legend)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    panels = [(measure, dtype) for dtype in dtypes for measure in measures]
    lines: dict[str, Any] = {}
    for (measure, dtype), axes in zip(panels, grid.flat, strict=True):
        shown = [entry for entry in entries if (entry.case.measure, entry.case.dtype) == (measure, dtype)]
        for subject in subjects:
            points = sorted((e.case.length, value(e) or 0.0) for e in shown if e.subject == subject)
            if points:
                style = "o-" if subject.mode == "eager" else "s--"
                colour = colours[subject.name]
                (lines[str(subject)],) = axes.plot(*zip(*points, strict=True), style, color=colour, markersize=4)
        modes = " and ".join(dict.fromkeys(entry.subject.mode for entry in shown))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.set(title=f"{measure}, {dtype}, {modes}", xlabel=x)
        axes.yaxis.set_tick_params(labelleft=True)
    for row in grid:
        row[0].set_ylabel(y)
        for axes in row:  # only after all are drawn, because they share their limits
            label_axes(axes, x_values=[length for line in axes.lines for length in line.get_xdata()])
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=min(len(lines), 2 * columns), frameon=False)
    return figure


def _costs(entries: Sequence[Entry], quality: dict[str, float]) -> dict[str, dict[str, float]]:
    """By panel title, the µs per token of every preset of known quality, in its fastest mode."""
    measure = min((entry.case.measure for entry in entries), key=AT_ONCE.index, default=AT_ONCE[0])
    chosen = [entry for entry in entries if entry.case.measure == measure and entry.subject.name in quality]
    longest = max((entry.case.length for entry in chosen), default=0)
    costs: dict[str, dict[str, float]] = {}
    for entry in chosen:
        cost = _microseconds(entry)
        if entry.case.length == longest and cost is not None:
            panel = costs.setdefault(f"{measure}, {entry.case.dtype}, {longest:,} tokens of context", {})
            panel[entry.subject.name] = min(cost, panel.get(entry.subject.name, cost))
    return costs


def _pareto(costs: dict[str, dict[str, float]], quality: dict[str, float], colours: dict[str, str]) -> Any:
    """Draw quality by cost: a panel for each precision, with a line through the Pareto front."""
    figure = new_figure(PURPOSE, WIDTH * len(costs) + 0.4, HEIGHT + 0.4)
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
        axes.grid(alpha=0.3)
        label_axes(axes)
    return figure


def pareto_front(points: dict[str, tuple[float, float]]) -> list[str]:
    """The names of the Pareto-optimal points (cost, loss), cheapest first."""
    front: list[str] = []
    for name in sorted(points, key=lambda name: points[name]):
        if not front or points[name][1] < points[front[-1]][1]:
            front.append(name)
    return front
