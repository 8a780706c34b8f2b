"""Plots of losses: one run by step; several runs by step, tokens and time."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from lineartime.errors import LineartimeError
from lineartime.plots import Curve, Panel, draw_panels, drawable, label_axes, looks_of, new_figure, save_figure
from lineartime.runs.metrics import AVERAGED, Line, losses, read_metrics
from lineartime.runs.record import read_record, texts_of

CURVE_FILE = "loss.png"
Runs = Mapping[str, Sequence[Line]]
"""The lines of several runs as returned by `thinned`, by the names of the runs."""
_MAX_POINTS = 2000
"""The maximum number of points of a curve in a comparison: more than an image has pixels across."""


def draw_curve(run: str | Path) -> Path:
    """Plot the training and validation losses of a run by step into its folder and return the path of the image.

    Raises LineartimeError without matplotlib, or if a file cannot be read or written.
    """
    run, figure = Path(run), new_figure(7, 4.2)
    axes = figure.subplots()
    lines = read_metrics(run)
    training, validation = losses(lines, "loss"), losses(lines, "validation_loss")
    if training:
        steps, values = list(training), list(training.values())
        marker = "o" if len(steps) == 1 else None  # a line through one point cannot be seen
        axes.plot(steps, values, marker=marker, color="tab:blue", label="training, each step", alpha=0.3, linewidth=0.8)
        if means := _trailing_means(values):
            axes.plot(steps[-len(means) :], means, color="tab:blue", label=f"training, mean of the last {AVERAGED} steps")
    if validation:
        last, least = list(validation.values())[-1], min(validation, key=validation.__getitem__)
        lowest = "" if validation[least] == last else f", {validation[least]:.3f} at step {least:,}"
        label = f"validation, {last:.3f} at the end{lowest}"
        axes.plot(list(validation), list(validation.values()), "o-", color="tab:orange", label=label)
    try:
        options = read_record(run).options
        title = f"{options.get('preset')} on {', '.join(Path(text).name for text in texts_of(options))}"
    except LineartimeError:
        title = run.name
    axes.set(title=drawable(title), xlabel="step", ylabel="loss (nats per token)")
    label_axes(axes, whole_x=True)
    if training or validation:
        axes.legend()
    return save_figure(figure, run / CURVE_FILE)


def thinned(lines: Sequence[Line]) -> list[Line]:
    """The lines of a run for `draw_comparison`: all evaluations, and training losses, averaged unless there are few."""
    training = [line for line in lines if "loss" in line]
    values = _trailing_means([line["loss"] for line in training])
    means = [{**line, "loss": mean} for line, mean in zip(training[len(training) - len(values) :], values, strict=True)]
    every = -(-len(means) // _MAX_POINTS) or 1
    return [*(means or training)[::-every][::-1], *(line for line in lines if "validation_loss" in line)]


def draw_comparison(groups: Mapping[str, Runs], file: Path) -> Path:
    """Plot the validation losses of runs, and faintly their training losses, by step, tokens and time; return the file.

    Each group of runs with comparable losses has its own row or, of more than two, panel by step, with its title. Raises
    LineartimeError without matplotlib, or if the file cannot be written.
    """
    panels = []
    for title, runs in groups.items():
        every = [line for lines in runs.values() for line in lines]
        longest = max((line.get("seconds", 0.0) for line in every), default=0.0)
        unit, seconds = next((unit for unit in (("hours", 3600), ("minutes", 60)) if longest > 2 * unit[1]), ("seconds", 1))
        axes = {"step": ("step", 1), "tokens": ("tokens", 1), "seconds": (f"{unit} of training", seconds)}
        for name, (label, scale) in axes.items() if len(groups) < 3 else [("step", axes["step"])]:
            panel = Panel(title, label, "validation loss, and faint training loss", whole_x=name != "seconds")
            for run, lines in runs.items():
                training = [line for line in lines if {name, "loss"} <= line.keys()]
                evaluated = [line for line in lines if {name, "validation_loss"} <= line.keys()]
                for curve, loss in ((training, "loss"), (evaluated, "validation_loss")):
                    if curve:
                        places, values = [line[name] / scale for line in curve], [line[loss] for line in curve]
                        panel.curves.append(Curve(run, places, values, faint=loss == "loss"))
            panel.y_limits = _limits(runs)
            panels.append(panel)
    names = [name for runs in groups.values() for name in runs]
    return save_figure(draw_panels(panels, looks_of(names), columns=3), file)


def _limits(runs: Runs) -> tuple[float, float] | None:
    """The range of the losses that are compared: the first training losses are so high that they would flatten the curves."""
    every = [line for lines in runs.values() for line in lines]
    evaluations = [line["validation_loss"] for line in every if "validation_loss" in line]
    if len(set(evaluations)) < 2:
        return None
    unmeasured = [lines for lines in runs.values() if not any("validation_loss" in line for line in lines)]
    low = min([*evaluations, *(line["loss"] for line in every if "loss" in line)])
    high = max([*evaluations, *(line["loss"] for lines in unmeasured for line in lines if "loss" in line)])
    return low - 0.05 * (high - low), high + 0.05 * (high - low)


def _trailing_means(losses: Sequence[float]) -> list[float]:
    """The mean of the last `AVERAGED` losses for each step, except for the first steps, which have fewer."""
    return [statistics.fmean(losses[end - AVERAGED : end]) for end in range(AVERAGED, len(losses) + 1)]
