"""Plots of losses: one run by step; several runs by step, tokens and time."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from lineartime.data import load_corpus
from lineartime.errors import LineartimeError, missing_extra, reporting
from lineartime.runs.metrics import AVERAGED, METRICS_FILE, Line, losses, read_metrics
from lineartime.runs.record import read_record

CURVE_FILE = "loss.png"
_MOST_POINTS = 2000
"""Points of a curve in a comparison: more than a picture has pixels across."""


def draw_curve(run: str | Path, title: str | None = None) -> Path:
    """Draw the training and validation losses of a run into its folder and return the picture's path.

    The default title names the model and the text. LineartimeError without matplotlib, or if a file cannot be read or written.
    """
    run = Path(run)
    figure = _figure("The loss curve", 7, 4.2)
    with reporting("read", run / METRICS_FILE):
        lines = read_metrics(run)
    training, validation = losses(lines, "loss"), losses(lines, "validation_loss")

    axes = figure.subplots()
    if training:
        steps, values = list(training), list(training.values())
        axes.plot(steps, values, color="tab:blue", alpha=0.3, linewidth=0.8, label="training, each step")
        axes.plot(steps, _smooth(values), color="tab:blue", label=f"training, mean of the last {AVERAGED} steps")
    if validation:
        label = f"validation, {list(validation.values())[-1]:.3f} at the end"
        axes.plot(list(validation), list(validation.values()), "o-", color="tab:orange", label=label)
    axes.set(title=_title(run) if title is None else title, xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    _round_numbers(axes)
    if training or validation:
        axes.legend()
    return _save(figure, run / CURVE_FILE)


def thinned(lines: Sequence[Line]) -> list[Line]:
    """The lines of a run for `draw_comparison`: all evaluations, and averaged training losses at as many steps as show."""
    training = [line for line in lines if "loss" in line]
    means = [{**line, "loss": loss} for line, loss in zip(training, _smooth([line["loss"] for line in training]), strict=True)]
    every = -(-len(means) // _MOST_POINTS) or 1
    return [*means[::-every][::-1], *(line for line in lines if "validation_loss" in line)]


def draw_comparison(runs: Mapping[str, Sequence[Line]], file: Path) -> Path:
    """Draw the validation losses of runs, and faintly their training losses, by step, tokens and time; return the file.

    `runs` has the lines from `thinned` by the run's name. LineartimeError without matplotlib, or if the file cannot be written.
    """
    columns = 3
    figure = _figure("A plot of runs", 13, 4.2 + 0.25 * -(-len(runs) // columns))
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
    if len(evaluations) > 1:  # the first training losses are so high that they would flatten what is compared
        low = min([*evaluations, *(line["loss"] for lines in runs.values() for line in lines if "loss" in line)])
        high = max(evaluations)
        first.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    figure.suptitle(f"validation loss; faint: training loss, mean of the last {AVERAGED} steps", fontsize="medium")
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False)
    return _save(figure, file)


def _title(run: Path) -> str:
    """The model of a run and its text, or the folder's name if the record tells neither."""
    try:
        options = read_record(run)["options"]
    except LineartimeError:
        return run.name
    text = Path(options["data"]).name if options.get("data") else load_corpus(None).name
    return f"{options.get('preset')} on {text}"


def _figure(purpose: str, width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", "plot", purpose) from None
    return Figure(figsize=(width, height), layout="constrained")


def _round_numbers(axes: Any) -> None:
    """Few ticks at whole numbers on the horizontal axis, in short form: 5,000, 10 M."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: counted(value)))


def counted(number: float) -> str:
    """A count in short form: 600, 12,000, 1.23 M, 45 G."""
    for limit, unit in ((1e9, " G"), (1e6, " M")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:,.0f}"


def _save(figure: Any, file: Path) -> Path:
    try:
        with reporting("write", file):
            figure.savefig(file, dpi=150)
    except ValueError:  # matplotlib does not know the suffix
        raise LineartimeError(f"{file} has a suffix that is no picture format: use .png, .pdf or .svg.") from None
    return file


def _smooth(losses: Sequence[float]) -> list[float]:
    """For each step, the mean of the last `AVERAGED` losses up to it."""
    return [statistics.fmean(losses[max(0, end - AVERAGED) : end]) for end in range(1, len(losses) + 1)]
