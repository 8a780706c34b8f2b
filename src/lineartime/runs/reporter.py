"""The reports of a run while it trains: a progress display, metrics.jsonl, the chosen trackers, and its loss curve."""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from lineartime.errors import LineartimeError
from lineartime.runs.curve import draw_curve
from lineartime.runs.metrics import AVERAGED, MetricsLog
from lineartime.runs.trackers import Trackers
from lineartime.screen import progress_bar


@dataclass(frozen=True)
class StepMetrics:
    """The numbers of one optimiser step."""

    loss: float  # the loss in nats per token, NaN for a step without targets; the loss and the norm may be infinite or NaN
    learning_rates: Mapping[str, float]  # the learning rates of this step, by their names in metrics.jsonl
    gradient_norm: float  # the norm of the gradient before clipping
    tokens: int  # the number of tokens in this step, over all processes
    seconds: float  # how long the step took
    waiting: float  # seconds of the step spent waiting for data
    skipped: int  # the number of steps so far that were skipped because a number was not finite


class NullReporter:
    """Reports nothing: for the processes of a run that are not the main one."""

    def __enter__(self) -> "NullReporter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave the `with` block."""

    def say(self, text: str) -> None:
        """Print a line."""

    def step(self, step: int, metrics: StepMetrics) -> None:
        """Record step number `step` (from 1), which has just ended."""

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
            self._trackers = Trackers(trackers, run, first_step, record, self.say, resumed=resumed)
        except LineartimeError:
            self._log.close()
            raise
        self._step_tokens = 0
        self._latest: dict[str, deque[float]] = {name: deque(maxlen=AVERAGED) for name in ("loss", "speed")}

    def __enter__(self) -> "Reporter":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()
        self._trackers.close()
        try:
            self._log.close()
        except LineartimeError:
            if error is None:
                raise
        if self._recorded:
            try:
                self.say(f"loss curve: {draw_curve(self._run)}")
            except LineartimeError as problem:
                self.say(f"no loss curve: {problem}")

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._progress.console.print(text)

    def step(self, step: int, metrics: StepMetrics) -> None:
        """Record step number `step` (from 1), which has just ended."""
        duration = max(metrics.seconds, 1e-9)
        self._step_tokens = metrics.tokens
        self._log.tokens = step * metrics.tokens  # not a running sum: a power cut may have taken lines of the file
        self._latest["speed"].append(metrics.tokens / duration)
        if math.isfinite(metrics.loss):
            self._latest["loss"].append(metrics.loss)
        self._progress.update(
            self._task,
            completed=step,
            loss=f"{self._average('loss'):.3f}",
            speed=f"{self._average('speed'):,.0f}",
            skipped=f"  {metrics.skipped} skipped" if metrics.skipped else "",
        )
        self._record(
            step,
            loss=metrics.loss,
            **metrics.learning_rates,
            gradient_norm=metrics.gradient_norm,
            tokens_per_second=metrics.tokens / duration,
            waiting=min(metrics.waiting / duration, 1.0),
            **({"skipped": metrics.skipped} if metrics.skipped else {}),
        )

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
        self._record(step, validation_loss=loss, **bits)

    def _average(self, name: str) -> float:
        """The mean over the latest steps; NaN before the first."""
        return statistics.fmean(self._latest[name] or [math.nan])

    def _record(self, step: int, **numbers: float) -> None:
        self._recorded = True
        self._trackers.write(step, self._log.write(step, numbers))
