"""What a run tells while it goes on: a live display, metrics.jsonl, and whatever trackers were asked for."""

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lineartime.errors import LineartimeError, cannot
from lineartime.files import write_atomically
from lineartime.runs.trackers import Trackers

METRICS_FILE = "metrics.jsonl"
AVERAGED = 20
"""Steps over which losses and speeds are averaged where they are shown; metrics.jsonl has those of each step."""


class Reporter:
    """Shows and records the numbers of a run; a context manager. One process of a run has it, the others a `Silent`.

    Args:
        run: the run's folder.
        first_step: steps taken before; metrics of later ones, left by a killed process, are dropped.
        steps: of the whole run.
        trackers: of "tensorboard", "wandb", "trackio".
        record: the run's options, for trackers that show them.

    Raises:
        LineartimeError: if metrics.jsonl cannot be written, or a tracker cannot begin.
    """

    def __init__(self, run: Path, first_step: int, steps: int, trackers: Sequence[str], *, record: Mapping[str, Any]) -> None:
        self._file = run / METRICS_FILE
        self._steps = steps
        self._console = Console(stderr=True, highlight=False, markup=False)
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s{task.fields[skipped]}  ETA"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("train", total=steps, completed=first_step, loss="-", speed="-", skipped="")
        try:
            run.mkdir(parents=True, exist_ok=True)
            before = _drop_after(run, first_step)
            self._metrics = self._file.open("a", encoding="utf-8")
        except OSError as error:
            raise cannot("write", self._file, error) from None
        try:
            self._trackers = Trackers(trackers, run, first_step, record, self.say)
        except LineartimeError:
            self._metrics.close()
            raise
        self._tokens = int(_last(before, "tokens"))
        self._skipped = int(_last(before, "skipped"))
        self._begin = time.perf_counter() - _last(before, "seconds")  # as if no time had passed between processes
        self._clock = time.perf_counter()
        self._step_tokens = 0
        self._latest: dict[str, deque[float]] = {name: deque(maxlen=AVERAGED) for name in ("loss", "speed")}

    def __enter__(self) -> "Reporter":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()
        self._trackers.close()
        try:
            self._metrics.close()
        except OSError as failure:
            if error is None:
                raise cannot("write", self._file, failure) from None

    def say(self, text: str) -> None:
        """Print a line above the live display."""
        self._progress.console.print(text, soft_wrap=True)

    def step(
        self,
        step: int,
        *,
        loss: float,
        learning_rate: float,
        gradient_norm: float,
        tokens: int,
        waiting: float,
        skipped: int,
    ) -> None:
        """Record one optimiser step that ended now.

        Args:
            step: its number, from 1.
            loss: in nats per token; neither this nor the norm has to be finite.
            learning_rate: that it was taken with.
            gradient_norm: before clipping.
            tokens: it was taken over, in all processes.
            waiting: seconds of it that were spent waiting for data.
            skipped: steps of the run so far that changed nothing, because a gradient was not finite.
        """
        now = time.perf_counter()
        duration = max(now - self._clock, 1e-9)
        self._clock, self._step_tokens, self._skipped = now, tokens, skipped
        self._tokens += tokens
        self._latest["speed"].append(tokens / duration)
        if math.isfinite(loss):
            self._latest["loss"].append(loss)
        self._progress.update(
            self._task,
            completed=step,
            loss=f"{self._average('loss'):.3f}",
            speed=f"{self._average('speed'):,.0f}",
            skipped=f"  {skipped} skipped" if skipped else "",
        )
        self._record(
            step,
            loss=loss,
            learning_rate=learning_rate,
            gradient_norm=gradient_norm,
            tokens_per_second=tokens / duration,
            waiting=min(waiting / duration, 1.0),
            **({"skipped": skipped} if skipped else {}),
        )

    def skipped(self, step: int, reason: str) -> None:
        """Say why a step changes nothing, before it is recorded by `step`, which counts it, too."""
        self._skipped += 1
        self.say(f"step {step} was skipped ({self._skipped} so far in this run): {reason}")
        self._record(step, skipped=self._skipped)

    def validation(self, step: int, loss: float, bits_per_byte: float | None) -> None:
        """Record an evaluation on held-out text, after some step, and print it; the time it took counts towards no step."""
        bits = "" if bits_per_byte is None else f" ({bits_per_byte:.3f} bits per byte)"
        steps = f"step {step:>{len(str(self._steps))}}/{self._steps}"
        losses = f"training loss {self._average('loss'):.3f}  validation loss {loss:.3f}{bits}"
        speed = self._average("speed")
        pace = ""
        if speed > 0:  # none yet where a run goes on with an evaluation
            remaining = timedelta(seconds=round((self._steps - step) * self._step_tokens / speed))
            pace = f"  {speed:,.0f} tokens/s  ETA {remaining}"
        self.say(f"{steps}  {losses}{pace}")
        extra = {} if bits_per_byte is None else {"validation_bits_per_byte": bits_per_byte}
        self._record(step, validation_loss=loss, **extra)
        self._clock = time.perf_counter()

    def _average(self, name: str) -> float:
        """The mean over the latest steps; not a number before the first."""
        return statistics.fmean(self._latest[name]) if self._latest[name] else math.nan

    def _record(self, step: int, **numbers: float) -> None:
        """Write numbers, with the tokens and the time so far; JSON has no words for those that are not finite: left out."""
        numbers |= {"tokens": self._tokens, "seconds": round(time.perf_counter() - self._begin, 3)}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        try:
            self._metrics.write(json.dumps({"step": step, **finite}) + "\n")
            self._metrics.flush()
        except OSError as error:
            raise cannot("write", self._file, error) from None
        self._trackers.write(step, finite)


class Silent:
    """What the other processes of a distributed run have for a `Reporter`: the same calls, of which nothing is seen."""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Do nothing."""

    def say(self, text: str) -> None:
        """Do nothing."""

    def step(
        self,
        step: int,
        *,
        loss: float,
        learning_rate: float,
        gradient_norm: float,
        tokens: int,
        waiting: float,
        skipped: int,
    ) -> None:
        """Do nothing."""

    def skipped(self, step: int, reason: str) -> None:
        """Do nothing."""

    def validation(self, step: int, loss: float, bits_per_byte: float | None) -> None:
        """Do nothing."""


def read_metrics(run: Path) -> list[dict[str, float]]:
    """The finite numbers of each line of a run's metrics file; OSError where it cannot be read.

    Lines that are none are passed over: a killed process, or a full disk, leaves one that is cut off.
    """
    return read_damaged_metrics(run)[0]


def read_damaged_metrics(run: Path) -> tuple[list[dict[str, float]], int]:
    """What `read_metrics` gives, and how many lines were passed over, but for a last one that was only cut off."""
    *texts, last = (run / METRICS_FILE).read_text(encoding="utf-8", errors="replace").split("\n")
    found = [_parse(text) for text in texts]
    begin = '{"step": '
    if last[: len(begin)] != begin[: len(last)] or _parse(last) is not None:
        found.append(_parse(last))
    lines = [line for line in found if line is not None]
    return lines, len(found) - len(lines)


def _parse(text: str) -> dict[str, float] | None:
    """The numbers of a line, with the step that they belong to; None for a line that has none."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        return None
    return {name: value for name, value in line.items() if isinstance(value, (int, float)) and math.isfinite(value)}


def _drop_after(run: Path, step: int) -> list[dict[str, float]]:
    """Keep only the lines of a run's metrics up to `step`, and return them."""
    file = run / METRICS_FILE
    if not file.exists():
        return []
    kept = [line for line in read_metrics(run) if line["step"] <= step]
    write_atomically(file, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


def _last(lines: Iterable[dict[str, float]], name: str) -> float:
    """The last value of a running total, or zero."""
    return next((line[name] for line in reversed(list(lines)) if name in line), 0)
