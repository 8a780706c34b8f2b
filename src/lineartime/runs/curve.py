"""Plots of losses: one run by step, and by position in the context; several runs by step, tokens and time."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineartime.errors import LineartimeError
from lineartime.plots import drawable, label_axes, legend_below, looks_of, new_figure, save_figure
from lineartime.runs.metrics import AVERAGED, METRICS_FILE, Line, losses, read_metrics
from lineartime.runs.record import read_record, texts_of

if TYPE_CHECKING:  # needs PyTorch, without which the command line shows its help
    from lineartime.evaluation import Evaluation

CURVE_FILE = "loss.png"
DEVIATION = "validation_deviation"
"""In the lines of merged seeds: the standard deviation of their validation losses, which is drawn as a band."""
Runs = Mapping[str, Sequence[Line]]
"""The lines of several runs as returned by `thinned`, by the names of the runs."""
_FAINT: dict[str, Any] = {"alpha": 0.3, "linewidth": 0.8}
"""The look of training losses beside validation losses or means."""
_MAX_POINTS = 2000
"""The maximum number of points of a curve in a comparison: more than an image has pixels across."""


def draw_curve(run: str | Path) -> Path:
    """Plot the training and validation losses of a run into its folder and return the path of the image.

    Raises LineartimeError without matplotlib, or if a file cannot be read or written.
    """
    run = Path(run)
    figure = new_figure(7, 4.2)
    _draw_losses(figure.subplots(), run)
    return save_figure(figure, run / CURVE_FILE)


def draw_report(run: str | Path, evaluation: "Evaluation", file: Path) -> Path:
    """Plot the losses of a run next to the loss by position of an evaluation; return the file.

    For a model without metrics, only the loss by position is plotted. Raises LineartimeError without matplotlib, or if a file
    cannot be read or written.
    """
    run = Path(run)
    learned = (run / METRICS_FILE).exists()
    figure = new_figure(12 if learned else 6, 4.2)
    panels = figure.subplots(1, 2 if learned else 1, squeeze=False)[0]
    if learned:
        _draw_losses(panels[0], run)
    _draw_positions(panels[-1], evaluation)
    return save_figure(figure, file)


def _draw_losses(axes: Any, run: Path) -> None:
    """Plot the training and validation losses of a run by step, under its model and text."""
    lines = read_metrics(run)
    training, validation = losses(lines, "loss"), losses(lines, "validation_loss")
    if training:
        steps, values = list(training), list(training.values())
        marker = "o" if len(steps) == 1 else None  # a line through one point cannot be seen
        axes.plot(steps, values, marker=marker, color="tab:blue", label="training, each step", **_FAINT)
        if means := _trailing_means(values):
            axes.plot(steps[-len(means) :], means, color="tab:blue", label=f"training, mean of the last {AVERAGED} steps")
    if validation:
        last, least = list(validation.values())[-1], min(validation, key=lambda step: validation[step])
        lowest = "" if validation[least] == last else f", {validation[least]:.3f} at step {least:,}"
        label = f"validation, {last:.3f} at the end{lowest}"
        axes.plot(list(validation), list(validation.values()), "o-", color="tab:orange", label=label)
    axes.set(title=drawable(_title(run)), xlabel="step", ylabel="loss (nats per token)")
    label_axes(axes, whole_x=True)
    if training or validation:
        axes.legend()


def _draw_positions(axes: Any, evaluation: "Evaluation") -> None:
    """Plot the loss by the number of tokens read, one level for each power of two, and the overall mean as a line."""
    positions = evaluation.by_position
    edges = [*(position.first for position in positions), positions[-1].last + 1]
    low, values, high = ([position.loss + sign * (position.error or 0.0) for position in positions] for sign in (-1, 0, 1))
    axes.stairs(values, edges, baseline=None, color="tab:green", linewidth=2)
    band = ([*low, low[-1]], [*high, high[-1]])  # a filled `stairs` would be cut at the edge of the panel
    axes.fill_between(edges, *band, step="post", color="tab:green", alpha=0.2, linewidth=0, label="± standard error")
    axes.axhline(evaluation.loss, color="black", linestyle=":", linewidth=1, label=f"mean, {evaluation.loss:.3f}")
    axes.set_xscale("log", base=2)
    where, token = ("place in the window", "masked token") if evaluation.masked else ("tokens read before", "token")
    axes.set(title=drawable(evaluation.text), xlabel=where, ylabel=f"loss (nats per {token})")
    label_axes(axes)
    axes.legend()


def thinned(lines: Sequence[Line]) -> list[Line]:
    """The lines of a run for `draw_comparison`: all evaluations, and training losses, averaged unless there are few."""
    training = [line for line in lines if "loss" in line]
    values = _trailing_means([line["loss"] for line in training])
    means = [{**line, "loss": mean} for line, mean in zip(training[len(training) - len(values) :], values, strict=True)]
    every = -(-len(means) // _MAX_POINTS) or 1
    return [*(means or training)[::-every][::-1], *(line for line in lines if "validation_loss" in line)]


def draw_comparison(groups: Mapping[str, Runs], file: Path) -> Path:
    """Plot the validation losses of runs, and faintly their training losses, by step, tokens and time; return the file.

    Each group of runs with comparable losses has its own row or, of more than two, panel, with a title. Raises LineartimeError
    without matplotlib, or if the file cannot be written.
    """
    columns, names = 3, [name for runs in groups.values() for name in runs]
    rows = len(groups) if len(groups) < columns else -(-len(groups) // columns)  # many groups have a panel each, by step
    figure = new_figure(13, 4.2 * rows + 0.25 * -(-len(names) // columns))
    look = looks_of(names)
    legend: dict[str, Any] = {}
    grid = figure.subplots(rows, columns, sharey="row" if rows == len(groups) else False, squeeze=False)
    grid = grid if rows == len(groups) else grid.reshape(-1, 1)
    for unused in grid[len(groups) :].flat:
        unused.remove()
    for row, (title, runs) in zip(grid, groups.items(), strict=False):
        legend |= _draw_group(row, runs, look)
        row[0].set_ylabel("loss (nats per token)")
        row[len(row) // 2].set_title(drawable(title), fontsize="medium")
    averaged = any("loss" in line for runs in groups.values() for lines in runs.values() for line in lines)
    faint = f"; faint: training loss, of {AVERAGED} steps and more the mean of the last {AVERAGED}" if averaged else ""
    figure.suptitle(f"validation loss{faint}", fontsize="medium")
    legend_below(figure, legend, columns)
    return save_figure(figure, file)


def _draw_group(row: Sequence[Any], runs: Runs, look: Mapping[str, dict[str, str]]) -> dict[str, Any]:
    """Plot runs in the panels for steps, tokens and time, and return their lines for the legend."""
    every = [line for lines in runs.values() for line in lines]
    longest = max((line.get("seconds", 0.0) for line in every), default=0.0)
    unit, seconds = next((unit for unit in (("hours", 3600), ("minutes", 60)) if longest > 2 * unit[1]), ("seconds", 1))
    legend: dict[str, Any] = {}
    for axes, name, label, scale in zip(
        row, ("step", "tokens", "seconds"), ("step", "tokens", f"{unit} of training"), (1, 1, seconds), strict=False
    ):
        for run, lines in runs.items():
            training = [(line[name] / scale, line["loss"]) for line in lines if {name, "loss"} <= line.keys()]
            evaluated = [line for line in lines if {name, "validation_loss"} <= line.keys()]
            if training:
                (faint,) = axes.plot(*zip(*training, strict=True), **{**look[run], "marker": ""}, **_FAINT)
                legend.setdefault(run, faint)
            if evaluated:
                places, means = [line[name] / scale for line in evaluated], [line["validation_loss"] for line in evaluated]
                (legend[run],) = axes.plot(places, means, markersize=3, **look[run])
                below, above = (
                    [line["validation_loss"] + sign * line.get(DEVIATION, 0.0) for line in evaluated] for sign in (-1, 1)
                )
                axes.fill_between(places, below, above, color=look[run]["color"], alpha=0.15, linewidth=0)
        axes.set_xlabel(label)
        axes.yaxis.set_tick_params(labelleft=True)
        label_axes(axes, whole_x=name != "seconds")
    evaluations = [line["validation_loss"] for line in every if "validation_loss" in line]
    if len(set(evaluations)) > 1:  # the first training losses are so high that they would flatten the curves
        unmeasured = [lines for lines in runs.values() if not any("validation_loss" in line for line in lines)]
        low = min([*evaluations, *(line["loss"] for line in every if "loss" in line)])
        high = max([*evaluations, *(line["loss"] for lines in unmeasured for line in lines if "loss" in line)])
        row[0].set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    return legend


def _title(run: Path) -> str:
    """The model of a run and its text, or the folder's name if the record cannot be read."""
    try:
        options = read_record(run).options
    except LineartimeError:
        return run.name
    text = ", ".join(Path(text).name for text in texts_of(options))
    return f"{options.get('preset')} on {text}"


def _trailing_means(losses: Sequence[float]) -> list[float]:
    """The mean of the last `AVERAGED` losses for each step, except for the first steps, which have fewer."""
    return [statistics.fmean(losses[end - AVERAGED : end]) for end in range(AVERAGED, len(losses) + 1)]
