"""The plots of a benchmark: time, memory and decode latency by length."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lineartime.bench.config import Dtype, Measure
from lineartime.bench.results import Entry, Results
from lineartime.plots import Panel, draw_panels, save_figure

AT_ONCE: tuple[Measure, ...] = ("train", "forward", "prefill")


def draw_plots(results: Results) -> list[Path]:
    """Draw latency.png, memory.png and decode.png, except those without data, and return the files.

    Raises LineartimeError if matplotlib is missing, or a file cannot be written.
    """
    figures = {
        "latency": _by_length(results, "tokens of context", "µs per token", _microseconds),
        "memory": _by_length(results, "tokens of context", "MB of a step, above the weights", _megabytes),
        "decode": _by_length(results, "tokens read before", "ms per token", _milliseconds),
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
