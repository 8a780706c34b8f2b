"""What a run tells while it goes on: a live display, metrics.jsonl and TensorBoard scalars."""

import json
import os
import statistics
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lineartime.errors import LineartimeError, cannot

METRICS_FILE = "metrics.jsonl"
AVERAGED = 20
"""Steps over which losses and speeds are averaged where they are shown; metrics.jsonl has those of each step."""


class Reporter:
    """Shows and records the numbers of a run; a context manager.

    Args:
        run: the run's folder.
        first_step: steps taken before; metrics of later ones, left by a killed process, are dropped.
        steps: of the whole run.
        tensorboard: whether to write TensorBoard scalars.
    """

    def __init__(self, run: Path, first_step: int, steps: int, tensorboard: bool) -> None:
        self._file = run / METRICS_FILE
        self._steps = steps
        self._console = Console(stderr=True, highlight=False, markup=False)
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s  ETA"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("train", total=steps, completed=first_step, loss="-", speed="-")
        try:
            run.mkdir(parents=True, exist_ok=True)
            _drop_after(run, first_step)
            self._metrics = self._file.open("a", encoding="utf-8")
        except OSError as error:
            raise cannot("write", self._file, error) from None
        self._scalars = _TensorBoard(run / "tensorboard", first_step) if tensorboard else None
        self._clock = time.perf_counter()
        self._tokens = 0  # in the latest step
        self._latest: dict[str, deque[float]] = {name: deque(maxlen=AVERAGED) for name in ("loss", "speed")}

    def __enter__(self) -> "Reporter":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()
        try:
            self._metrics.close()
            if self._scalars is not None:
                self._scalars.close()
        except OSError:
            if error is None:
                raise

    def say(self, text: str) -> None:
        """Print a line above the live display."""
        self._progress.console.print(text, soft_wrap=True)

    def step(self, step: int, loss: float, learning_rate: float, gradient_norm: float, tokens: int) -> None:
        """Record one optimiser step, over `tokens` tokens, that ended now; `step` counts from 1."""
        now = time.perf_counter()
        speed = tokens / (now - self._clock)
        self._clock, self._tokens = now, tokens
        self._latest["loss"].append(loss)
        self._latest["speed"].append(speed)
        shown_loss, shown_speed = f"{self._average('loss'):.3f}", f"{self._average('speed'):,.0f}"
        self._progress.update(self._task, completed=step, loss=shown_loss, speed=shown_speed)
        self._record(step, loss=loss, learning_rate=learning_rate, gradient_norm=gradient_norm, tokens_per_second=speed)

    def validation(self, step: int, loss: float, bits_per_byte: float | None) -> None:
        """Record an evaluation on held-out text, after some step, and print it; the time it took counts towards no step."""
        bits = "" if bits_per_byte is None else f" ({bits_per_byte:.3f} bits per byte)"
        training, speed = self._average("loss"), self._average("speed")
        remaining = timedelta(seconds=round((self._steps - step) * self._tokens / speed))
        steps = f"step {step:>{len(str(self._steps))}}/{self._steps}"
        losses = f"training loss {training:.3f}  validation loss {loss:.3f}{bits}"
        self.say(f"{steps}  {losses}  {speed:,.0f} tokens/s  ETA {remaining}")
        extra = {} if bits_per_byte is None else {"validation_bits_per_byte": bits_per_byte}
        self._record(step, validation_loss=loss, **extra)
        self._clock = time.perf_counter()

    def _average(self, name: str) -> float:
        """The mean over the latest steps."""
        return statistics.fmean(self._latest[name])

    def _record(self, step: int, **numbers: float) -> None:
        try:
            self._metrics.write(json.dumps({"step": step, **numbers}) + "\n")
            self._metrics.flush()
            if self._scalars is not None:
                self._scalars.write(step, numbers)
        except OSError as error:
            raise cannot("write", self._file, error) from None


def read_metrics(run: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics file, but for one that a killed process, or a full disk, did not finish."""
    lines = []
    for text in (run / METRICS_FILE).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "step" in line:
            lines.append(line)
    return lines


def _drop_after(run: Path, step: int) -> None:
    """Keep only the lines of a run's metrics up to `step`."""
    file = run / METRICS_FILE
    if file.exists():
        kept = [json.dumps(line) + "\n" for line in read_metrics(run) if line["step"] <= step]
        partial = file.with_suffix(".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(file)


class _TensorBoard:
    """Scalars in TensorBoard's format, written in this thread, so that a full disk is noticed where it can be reported."""

    def __init__(self, folder: Path, first_step: int) -> None:
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2
            from tensorboardX.summary import scalar
        except ImportError:
            raise LineartimeError(
                "TensorBoard scalars need tensorboardX: pip install tensorboardX, or do without by --no-tensorboard."
            ) from None
        self._event: Any = event_pb2.Event
        self._scalar: Any = scalar
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._writer: Any = EventsWriter(str(folder / "events"), filename_suffix=f".{os.getpid()}.{first_step}")
        except OSError as error:
            raise cannot("write", folder, error) from None
        # Tells TensorBoard to forget later steps of a process that was killed.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.write_event(event_pb2.Event(wall_time=time.time(), step=first_step + 1, session_log=start))

    def write(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.write_event(self._event(wall_time=time.time(), step=step, summary=self._scalar(name, value)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
