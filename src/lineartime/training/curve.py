"""The picture of a run: its losses by step."""

import statistics
from pathlib import Path

from lineartime.errors import cannot, missing_extra
from lineartime.training.reporting import AVERAGED, METRICS_FILE, read_metrics

CURVE_FILE = "loss.png"


def draw_curve(run: Path, title: str) -> Path:
    """Draw the training and validation losses of a run into its folder and return the picture's path.

    Raises:
        LineartimeError: without matplotlib, or where files cannot be read or written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise missing_extra("matplotlib", "plot", "The loss curve") from None
    try:
        lines = read_metrics(run)
    except OSError as error:
        raise cannot("read", run / METRICS_FILE, error) from None
    training = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    validation = [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    if training:
        steps, losses = zip(*training, strict=True)
        axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="training, each step")
        axes.plot(steps, _smooth(losses), color="tab:blue", label=f"training, mean of the last {AVERAGED} steps")
    if validation:
        label = f"validation, {validation[-1][1]:.3f} in the end"
        axes.plot(*zip(*validation, strict=True), "o-", color="tab:orange", label=label)
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(alpha=0.3)
    if training or validation:
        axes.legend()
    try:
        figure.savefig(run / CURVE_FILE, dpi=150)
    except OSError as error:
        raise cannot("write", run / CURVE_FILE, error) from None
    return run / CURVE_FILE


def _smooth(losses: tuple[float, ...]) -> list[float]:
    """For each step, the mean of the losses up to it, as many as `AVERAGED`."""
    return [statistics.fmean(losses[max(0, end - AVERAGED) : end]) for end in range(1, len(losses) + 1)]
