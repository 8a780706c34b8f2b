"""The numbers of a run: metrics.jsonl, trackers (TensorBoard, Weights & Biases), the display of progress, and plots of losses.

metrics.jsonl has one JSON object per line for each step and each evaluation. A tracker is a convenience: if it fails during a
run (no network, a full disk), training reports that once and continues without it.
"""

import json
import math
import os
import statistics
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from lineartime.errors import LineartimeError, first_line, reporting_file_errors
from lineartime.files import write_atomically
from lineartime.plots import Curve, Panel, draw_panels, drawable, label_axes, looks_of, new_figure, save_figure
from lineartime.runs.record import read_record, texts_of
from lineartime.screen import progress_bar

METRICS_FILE = "metrics.jsonl"
AVERAGED = 20
"""Steps over which displayed losses and speeds are averaged; metrics.jsonl holds those of each step."""

CURVE_FILE = "loss.png"
_MAX_POINTS = 2000
"""The maximum number of points of a curve in a comparison: more than an image has pixels across."""

Line = Mapping[str, float]
"""One line of metrics.jsonl."""
Runs = Mapping[str, Sequence[Line]]
"""The lines of several runs as returned by `thinned`, by the names of the runs."""


class MetricsLog:
    """Appends lines to a run's metrics.jsonl, each with the tokens and the seconds of training so far.

    Lines of steps after `first_step`, left by a killed process, are dropped. `tokens` are those of all processes. Raises
    LineartimeError if the file cannot be written.
    """

    def __init__(self, run: Path, first_step: int) -> None:
        self._file = run / METRICS_FILE
        with reporting_file_errors("write", self._file):
            run.mkdir(parents=True, exist_ok=True)
            kept = [line for line in read_metrics(run) if line["step"] <= first_step] if self._file.exists() else []
            write_atomically(self._file, "".join(json.dumps(line) + "\n" for line in kept))
            self._opened = self._file.open("a", encoding="utf-8")
        totals = {name: value for line in kept for name, value in line.items()}  # the last value of each name
        self.tokens = int(totals.get("tokens", 0))
        self._begin = time.perf_counter() - totals.get("seconds", 0)  # the time between processes does not count

    def write(self, step: int, numbers: Mapping[str, float]) -> dict[str, float]:
        """Append one line and return its numbers, without those that JSON cannot express: infinities and NaN."""
        totals = {"tokens": self.tokens, "seconds": round(time.perf_counter() - self._begin, 3)}
        finite = {name: value for name, value in {**numbers, **totals}.items() if math.isfinite(value)}
        with reporting_file_errors("write", self._file):
            self._opened.write(json.dumps({"step": step, **finite}) + "\n")
            self._opened.flush()
        return finite

    def close(self) -> None:
        """Close the file."""
        with reporting_file_errors("write", self._file):
            self._opened.close()


def read_metrics(run: str | Path) -> list[dict[str, float]]:
    """The finite numbers in each line of a run's metrics file. Raises LineartimeError if the file cannot be read.

    Other lines are left out, such as those that a killed process or a full disk left incomplete.
    """
    lines = []
    path = Path(run, METRICS_FILE)
    with reporting_file_errors("read", path), path.open("rb") as file:
        for content in file:
            with suppress(ValueError):
                line = json.loads(content)
                if isinstance(line, dict) and "step" in line and all(map(_is_finite, line.values())):
                    lines.append(line)
    return lines


def _is_finite(value: object) -> bool:
    return type(value) in (int, float) and abs(cast("float", value)) < math.inf


def losses(lines: Iterable[Line], name: str) -> dict[int, float]:
    """The values of "loss" or "validation_loss" by step, in nats per token."""
    return {int(line["step"]): line[name] for line in lines if name in line}


class Tracker(NamedTuple):
    """What a tracker does with the numbers of a step, by their names, and at the end. Steps arrive in order and may repeat."""

    write: Callable[[int, Mapping[str, float]], object]
    close: Callable[[], object]


def start_trackers(
    names: Sequence[str], run: Path, first_step: int, options: Mapping[str, Any], say: Callable[[str], None], *, resumed: bool
) -> dict[str, Tracker]:
    """The trackers by their names; those of a resumed run resume their runs too.

    A tracker that cannot start is left out of a resumed run, and `say` tells; of a new run, it raises LineartimeError.
    """
    trackers: dict[str, Tracker] = {}
    for name in dict.fromkeys(names):
        try:
            with redirect_stdout(sys.stderr):  # standard output is for results
                trackers[name] = _wandb(run, options, resumed) if name == "wandb" else _tensorboard(run, first_step)
        except Exception as error:  # a foreign package may raise anything
            if not resumed:
                for started in trackers.values():
                    started.close()
                found = f"The tracker {name} cannot start: {first_line(error).rstrip('.')}; fix that"
                raise LineartimeError(f"{found}, or leave it out of `track`.") from None
            say(_failed(name, error))
    return trackers


def _failed(name: str, error: Exception) -> str:
    return f"The tracker {name} failed, and training continues without it: {first_line(error).rstrip('.')}."


def _tensorboard(run: Path, first_step: int) -> Tracker:
    """Scalars in TensorBoard's format, written in the calling thread, so that errors such as a full disk can be reported."""
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto import event_pb2
    from tensorboardX.summary import scalar

    event: Any = event_pb2.Event
    (run / "tensorboard").mkdir(parents=True, exist_ok=True)
    writer: Any = EventsWriter(str(run / "tensorboard" / "events"), filename_suffix=f".{os.getpid()}.{first_step}")
    # Tells TensorBoard to drop later steps that a killed process wrote.
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    writer.write_event(event(wall_time=time.time(), step=first_step + 1, session_log=start))

    def write(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.write_event(event(wall_time=time.time(), step=step, summary=scalar(name, value)))
        writer.flush()

    return Tracker(write, writer.close)


def _wandb(run: Path, options: Mapping[str, Any], resumed: bool) -> Tracker:
    """A run of Weights & Biases, configured by its environment variables: WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY."""
    import wandb

    file = run / "tracker-id"  # by which a resumed run goes on with its run there
    if not (resumed and file.is_file()):
        write_atomically(file, uuid.uuid4().hex[:12] + "\n")
    tracked: Any = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "lineartime"),
        id=file.read_text(encoding="utf-8", errors="replace").strip(),
        name=run.absolute().name,
        dir=str(run.absolute()),
        config=dict(options),
        resume="allow",
        settings=wandb.Settings(console="off"),  # otherwise it captures the progress bar
    )
    # W&B's own step never decreases; this axis may, when a killed run resumes from an earlier checkpoint.
    tracked.define_metric("step", hidden=True)
    tracked.define_metric("*", step_metric="step")
    return Tracker(lambda step, numbers: tracked.log({**numbers, "step": step}), tracked.finish)


class NullReporter(AbstractContextManager["NullReporter"]):
    """Reports nothing: for the processes of a run that are not the main one."""

    def __exit__(self, *error: object) -> None:
        """Leave the `with` block."""

    def say(self, text: str) -> None:
        """Print a line."""

    def step(self, step: int, tokens: int, numbers: Mapping[str, float]) -> None:
        """Record the numbers of a step (from 1) on so many tokens, which has just ended, by their names in metrics.jsonl."""

    def validation(self, step: int, loss: float, bits_per_byte: float | None) -> None:
        """Record and print an evaluation on held-out text after a step."""


class Reporter(NullReporter):
    """A context manager that shows and records the numbers of a run. Only the main process has one.

    A terminal, or a notebook with ipywidgets, shows a progress bar and a line per evaluation. Any other output gets only the
    lines. At the end, even if the run failed, the losses are plotted into the run's folder.

    `record` holds the run's options, for trackers that show them. Raises LineartimeError if metrics.jsonl cannot be written, or
    a tracker cannot start.
    """

    def __init__(
        self, run: Path, first_step: int, steps: int, trackers: Sequence[str], *, record: Mapping[str, Any], resumed: bool
    ) -> None:
        self._run = run
        self._steps = steps
        self._recorded = False
        self._progress = progress_bar(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s{task.fields[skipped]}  ETA"),
            TimeRemainingColumn(compact=True),
        )
        self._task = self._progress.add_task("train", total=steps, completed=first_step, loss="-", speed="-", skipped="")
        self._log = MetricsLog(run, first_step)
        try:
            self._trackers = start_trackers(trackers, run, first_step, record, self.say, resumed=resumed)
        except LineartimeError:
            self._log.close()
            raise
        self._step_tokens = 0
        self._latest: dict[str, deque[float]] = {name: deque(maxlen=AVERAGED) for name in ("loss", "speed")}

    def __enter__(self) -> "Reporter":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()
        self._track(lambda tracker: tracker.close())
        with suppress(LineartimeError) if any(error) else nullcontext():
            self._log.close()
        if self._recorded:
            try:
                self.say(f"loss curve: {draw_curve(self._run)}")
            except LineartimeError as problem:
                self.say(f"no loss curve: {problem}")

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._progress.console.print(text)

    def step(self, step: int, tokens: int, numbers: Mapping[str, float]) -> None:
        """Record a step, and show the mean of the last ones."""
        self._step_tokens = tokens
        self._log.tokens = step * tokens  # not a running sum: a power cut may have taken lines of the file
        self._latest["speed"].append(numbers["tokens_per_second"])
        if math.isfinite(numbers["loss"]):
            self._latest["loss"].append(numbers["loss"])
        self._progress.update(
            self._task,
            completed=step,
            loss=f"{self._average('loss'):.3f}",
            speed=f"{self._average('speed'):,.0f}",
            skipped=f"  {numbers['skipped']} skipped" if "skipped" in numbers else "",
        )
        self._record(step, numbers)

    def validation(self, step: int, loss: float, bits_per_byte: float | None) -> None:
        """Record and print an evaluation on held-out text after a step."""
        parts = [f"step {step:>{len(str(self._steps))}}/{self._steps}"]
        if self._latest["loss"]:  # none just after resuming
            parts.append(f"training loss {self._average('loss'):.3f}")
        bits = {} if bits_per_byte is None else {"validation_bits_per_byte": bits_per_byte}
        parts.append(f"validation loss {loss:.3f}" + (f" ({bits_per_byte:.3f} bits per byte)" if bits else ""))
        if (speed := self._average("speed")) > 0:
            remaining = timedelta(seconds=round((self._steps - step) * self._step_tokens / speed))
            parts += [f"{speed:,.0f} tokens/s", f"ETA {remaining}"]
        self.say("  ".join(parts))
        self._record(step, {"validation_loss": loss, **bits})

    def _average(self, name: str) -> float:
        """The mean over the latest steps; NaN before the first."""
        return statistics.fmean(self._latest[name] or [math.nan])

    def _record(self, step: int, numbers: Mapping[str, float]) -> None:
        self._recorded = True
        finite = self._log.write(step, numbers)
        self._track(lambda tracker: tracker.write(step, finite))

    def _track(self, action: Callable[[Tracker], object]) -> None:
        """Do something with every tracker. One that fails is dropped, and the user is told."""
        for name, tracker in list(self._trackers.items()):
            try:
                with redirect_stdout(sys.stderr):
                    action(tracker)
            except Exception as error:  # a foreign package may raise anything
                del self._trackers[name]
                self.say(_failed(name, error))


# Plots of losses ------------------------------------------------------------------------------------------------------


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
