"""Trackers of a run's numbers: TensorBoard, Weights & Biases.

A tracker is a convenience: if it fails during a run (no network, a full disk), training reports that once and continues
without it. metrics.jsonl holds the same numbers.
"""

import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from lineartime.errors import ArgumentError, LineartimeError, first_line, is_installed, missing_extra
from lineartime.files import write_atomically

IDENTITY_FILE = "tracker-id"
PROJECT = "lineartime"
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""The package that each tracker needs."""


def check_trackers(names: Sequence[str]) -> None:
    """Raise LineartimeError for a tracker that does not exist, or whose package is not installed."""
    for name in names:
        if name not in PACKAGES:
            raise ArgumentError("track", f"contains {name!r}, but must be any of {', '.join(PACKAGES)}.")
        if name != "tensorboard" and not is_installed(PACKAGES[name]):  # which is a dependency of lineartime, not an extra
            raise missing_extra(PACKAGES[name], name, f"The tracker {name}")


class Tracker(NamedTuple):
    """What a tracker does with the numbers of a step, by their names, and at the end. Steps arrive in order and may repeat."""

    write: Callable[[int, Mapping[str, float]], object]
    close: Callable[[], object]


class Trackers:
    """Combines several trackers. A tracker that fails is dropped, and `say` reports this to the user.

    The trackers of a resumed run resume their runs too. Raises LineartimeError as `check_trackers`, and for a tracker that
    cannot start a new run.
    """

    def __init__(
        self,
        names: Sequence[str],
        run: Path,
        first_step: int,
        options: Mapping[str, Any],
        say: Callable[[str], None],
        *,
        resumed: bool,
    ) -> None:
        check_trackers(names)
        self._say = say
        self._trackers: dict[str, Tracker] = {}
        for name in dict.fromkeys(names):
            try:
                with redirect_stdout(sys.stderr):  # standard output is for results
                    if name == "tensorboard":
                        self._trackers[name] = _tensorboard(run / "tensorboard", first_step)
                    else:
                        self._trackers[name] = _wandb(run, _identity(run, resumed), options)
            except Exception as error:  # a foreign package may raise anything
                if not resumed:
                    self.close()
                    found = f"The tracker {name} cannot start: {first_line(error).rstrip('.')}; fix that, or leave it out of "
                    raise LineartimeError(found, "`track`.") from None
                self._say_failed(name, error)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send numbers to every tracker."""
        self._each(lambda tracker: tracker.write(step, numbers))

    def close(self) -> None:
        """Finish every tracker."""
        with redirect_stdout(sys.stderr):
            self._each(lambda tracker: tracker.close())

    def _each(self, action: Callable[[Tracker], object]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                action(tracker)
            except Exception as error:  # a foreign package may raise anything
                del self._trackers[name]
                self._say_failed(name, error)

    def _say_failed(self, name: str, error: Exception) -> None:
        self._say(f"The tracker {name} failed, and training continues without it: {first_line(error).rstrip('.')}.")


def _identity(run: Path, keep: bool) -> str:
    """The run's identity in Weights & Biases: stored in its folder, new for a new run."""
    file = run / IDENTITY_FILE
    if keep and file.is_file():
        return file.read_text(encoding="utf-8", errors="replace").strip()
    identity = uuid.uuid4().hex[:12]
    write_atomically(file, identity + "\n")
    return identity


def _tensorboard(folder: Path, first_step: int) -> Tracker:
    """Scalars in TensorBoard's format, written in the calling thread, so that errors such as a full disk can be reported."""
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto import event_pb2
    from tensorboardX.summary import scalar

    event: Any = event_pb2.Event
    folder.mkdir(parents=True, exist_ok=True)
    writer: Any = EventsWriter(str(folder / "events"), filename_suffix=f".{os.getpid()}.{first_step}")
    # Tells TensorBoard to drop later steps that a killed process wrote.
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    writer.write_event(event(wall_time=time.time(), step=first_step + 1, session_log=start))

    def write(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.write_event(event(wall_time=time.time(), step=step, summary=scalar(name, value)))
        writer.flush()

    return Tracker(write, writer.close)


def _wandb(run: Path, identity: str, options: Mapping[str, Any]) -> Tracker:
    """A run of Weights & Biases, configured by its environment variables: WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY."""
    import wandb

    tracked: Any = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=identity,
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
