"""Pictures of runs: the losses of one by step, and those of several by step, tokens and time."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from lineartime.errors import LineartimeError, cannot, missing_extra
from lineartime.runs.metrics import AVERAGED, METRICS_FILE, read_metrics

CURVE_FILE = "loss.png"
Line = Mapping[str, float]
"""A line of metrics.jsonl."""

_MOST_POINTS = 2000
"""Of a curve among others: more than a picture has pixels across."""


def draw_curve(run: Path, title: str) -> Path:
    """Draw the training and validation losses of a run into its folder and return the picture's path.

    Raises:
        LineartimeError: without matplotlib, or where files cannot be read or written.
    """
    figure_class = _figure_class("The loss curve")
    try:
        lines = read_metrics(run)
    except OSError as error:
        raise cannot("read", run / METRICS_FILE, error) from None
    training = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    validation = [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]

    figure = figure_class(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    if training:
        steps, losses = zip(*training, strict=True)
        axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="training, each step")
        axes.plot(steps, _smooth(losses), color="tab:blue", label=f"training, mean of the last {AVERAGED} steps")
    if validation:
        label = f"validation, {validation[-1][1]:.3f} in the end"
        axes.plot(*zip(*validation, strict=True), "o-", color="tab:orange", label=label)
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)")
    _round_numbers(axes)
    axes.grid(alpha=0.3)
    if training or validation:
        axes.legend()
    return _save(figure, run / CURVE_FILE)


def thinned(lines: Sequence[Line]) -> list[Line]:
    """What `draw_comparison` shows of a run: all evaluations, and means of training losses at as many steps as can be seen."""
    training = [line for line in lines if "loss" in line]
    means = [{**line, "loss": loss} for line, loss in zip(training, _smooth([line["loss"] for line in training]), strict=True)]
    every = -(-len(means) // _MOST_POINTS) or 1
    return [*means[::-every][::-1], *(line for line in lines if "validation_loss" in line)]


def draw_comparison(runs: Mapping[str, Sequence[Line]], file: Path) -> Path:
    """Draw the validation losses of runs, and faintly their training losses, by step, tokens and time; return the file.

    Args:
        runs: by name, what `thinned` gives.
        file: the picture to write.

    Raises:
        LineartimeError: without matplotlib, or where the file cannot be written.
    """
    figure_class = _figure_class("A plot of runs")
    columns = 3
    figure = figure_class(figsize=(13, 4.2 + 0.25 * -(-len(runs) // columns)), layout="constrained")
    longest = max((line.get("seconds", 0.0) for lines in runs.values() for line in lines), default=0.0)
    unit, seconds = next((unit for unit in (("hours", 3600), ("minutes", 60)) if longest > 2 * unit[1]), ("seconds", 1))
    panels = (("step", "step", 1), ("tokens", "tokens", 1), ("seconds", f"{unit} of training", seconds))
    entries: dict[str, Any] = {}
    for axes, (name, label, scale) in zip(figure.subplots(1, columns, sharey=True), panels, strict=True):
        styles = cycle((f"C{colour}", style) for style in ("-", "--", ":", "-.") for colour in range(10))
        for (run, lines), (colour, style) in zip(runs.items(), styles, strict=False):
            training = [(line[name] / scale, line["loss"]) for line in lines if {name, "loss"} <= line.keys()]
            evaluated = [line for line in lines if {name, "validation_loss"} <= line.keys()]
            if training:
                (faint,) = axes.plot(*zip(*training, strict=True), style, color=colour, alpha=0.3, linewidth=0.8)
                entries.setdefault(run, faint)
            if evaluated:
                points = [(line[name] / scale, line["validation_loss"]) for line in evaluated]
                (entries[run],) = axes.plot(*zip(*points, strict=True), style, color=colour, marker="o", markersize=3)
        axes.set_xlabel(label)
        if name != "seconds":
            _round_numbers(axes)
        axes.grid(alpha=0.3)
    first = figure.axes[0]
    first.set_ylabel("loss (nats per token)")
    evaluations = [line["validation_loss"] for lines in runs.values() for line in lines if "validation_loss" in line]
    if len(evaluations) > 1:  # the steep beginning of the training losses would leave no room for what is compared
        losses = [line["loss"] for lines in runs.values() for line in lines if "loss" in line]
        low, high = min([*losses, *evaluations]), max(evaluations)
        first.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    title = f"validation loss; faint: training loss, mean of the last {AVERAGED} steps"
    figure.suptitle(title, fontsize="medium")
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False)
    return _save(figure, file)


def _figure_class(purpose: str) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", "plot", purpose) from None
    return Figure


def _round_numbers(axes: Any) -> None:
    """Marks of the horizontal axis at few and whole numbers, as they are counted: 5,000, 10 M."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: counted(value)))


def counted(number: float) -> str:
    """A count in few characters: 600, 12,000, 1.23 M, 45 G."""
    for limit, unit in ((1e9, " G"), (1e6, " M")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:,.0f}"


def _save(figure: Any, file: Path) -> Path:
    try:
        figure.savefig(file, dpi=150)
    except OSError as error:
        raise cannot("write", file, error) from None
    except ValueError:  # an ending that matplotlib has no format for
        raise LineartimeError(f"{file} has an ending that is no format of pictures: use .png, .pdf or .svg.") from None
    return file


def _smooth(losses: Sequence[float]) -> list[float]:
    """For each step, the mean of the losses up to it, as many as `AVERAGED`."""
    return [statistics.fmean(losses[max(0, end - AVERAGED) : end]) for end in range(1, len(losses) + 1)]
