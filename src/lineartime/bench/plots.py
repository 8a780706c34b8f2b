"""The plots of a benchmark: time, memory and decode latency by length, and quality by cost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lineartime.bench.config import Dtype, Measure
from lineartime.bench.results import Entry, Results
from lineartime.plots import Panel, draw_panels, label_axes, new_panels, save_figure

AT_ONCE: tuple[Measure, ...] = ("train", "forward", "prefill")


def draw_plots(results: Results, quality: dict[str, float]) -> list[Path]:
    """Draw latency.png, memory.png, decode.png and pareto.png, except those without data, and return the files.

    The quality is in bits per byte, by preset. Raises LineartimeError if matplotlib is missing, or a file cannot be written.
    """
    figures = {
        "latency": _by_length(results, "tokens of context", "µs per token", _microseconds),
        "memory": _by_length(results, "tokens of context", "MB of a step, above the weights", _megabytes),
        "decode": _by_length(results, "tokens read before", "ms per token", _milliseconds),
        "pareto": _pareto(results, quality),
    }
    return [save_figure(figure, results.folder / f"{name}.png", 130) for name, figure in figures.items() if figure is not None]


def _microseconds(found: Entry) -> float | None:
    return found.microseconds_per_token if found.measure in AT_ONCE else None


def _milliseconds(found: Entry) -> float | None:
    return 1e3 * found.median_seconds if found.median_seconds is not None and found.measure == "decode" else None


def _megabytes(found: Entry) -> float | None:
    return max(found.peak_bytes, 1) / 1e6 if found.peak_bytes is not None and not found.problem else None


def _colours(results: Results) -> dict[str, str]:
    names = dict.fromkeys(found.subject for found in results.finished)
    return {name: f"C{place % 10}" for place, name in enumerate(names)}


def _by_length(results: Results, x: str, y: str, value: Callable[[Entry], float | None]) -> Any:
    """Curves by length: a panel for each measure and precision. None if there are no values."""
    panels: dict[tuple[Measure, Dtype], Panel] = {}
    looks: dict[str, dict[str, Any]] = {}
    colours = _colours(results)
    for found in results.finished:
        if (number := value(found)) is not None:
            panel = panels.setdefault((found.measure, found.dtype), Panel(f"{found.measure}, {found.dtype}", y))
            panel.add(found.label, found.length, number)
            style = {"linestyle": "-", "marker": "o"} if found.mode == "eager" else {"linestyle": "--", "marker": "s"}
            looks[found.label] = {"color": colours[found.subject], **style}
    measures = dict.fromkeys(measure for measure, _ in panels)
    dtypes = dict.fromkeys(dtype for _, dtype in panels)
    shown = [panels[measure, dtype] for dtype in dtypes for measure in measures if (measure, dtype) in panels]
    return draw_panels(shown, x, looks, columns=len(measures) if len(measures) > 1 else None, log=True, share_y=True)


def _pareto(results: Results, quality: dict[str, float]) -> Any:
    """Draw quality by cost in the longest context, in the fastest mode: a panel for each precision. None without quality."""
    known = [
        (found, cost) for found in results.finished if found.subject in quality and (cost := _microseconds(found)) is not None
    ]
    measure = min((found.measure for found, _ in known), key=AT_ONCE.index, default="train")
    longest = max((found.length for found, _ in known if found.measure == measure), default=0)
    costs: dict[str, dict[str, float]] = {}
    for found, cost in known:
        if (found.measure, found.length) == (measure, longest):
            panel = costs.setdefault(f"{measure}, {found.dtype}, {longest:,} tokens of context", {})
            panel[found.subject] = min(cost, panel.get(found.subject, cost))
    if not costs:
        return None
    colours = _colours(results)
    figure, panels = new_panels(len(costs), 0)
    for (title, points), axes in zip(costs.items(), panels, strict=True):
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
