"""Find runs in folders, and summarise each from its files."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from lineartime.checkpoint import checkpoint_path, list_checkpoints, read_from, read_training_state
from lineartime.errors import LineartimeError, reporting_file_errors
from lineartime.files import RECORD_FILE, TOKENIZER_FILE, is_there
from lineartime.runs.curve import thinned
from lineartime.runs.lock import is_locked
from lineartime.runs.metrics import AVERAGED, METRICS_FILE, Line, read_damaged_metrics
from lineartime.runs.record import Record, last_error, read_record

DEPTH = 3
"""Levels of folders to search for runs."""


@dataclass(frozen=True)
class RunSummary:
    """The summary of a run; values that its files do not hold are None."""

    name: str  # the name for display
    path: Path
    options: dict[str, Any]  # the options with which it was started; empty if unknown
    tokenizer: str  # a digest of its tokenizer; empty if unknown
    step: int  # the last recorded step
    tokens: int | None  # the number of tokens trained on
    training_loss: float | None  # the mean of the last 20 steps, in nats per token
    validation_loss: float | None  # the lowest validation loss, in nats per token
    bits_per_byte: float | None  # the bits per byte of the same evaluation
    tokens_per_second: float | None  # the median of all steps
    seconds: float | None  # the time spent training, including evaluations and checkpoints
    waiting: float | None  # the share of the steps' time spent waiting for data
    skipped: int
    state: str  # damaged, failed, finished, running, stopped (its last step is saved) or silent: see `_state`
    error: str | None  # the message of the error that ended a failed run
    silent_seconds: float  # the time since its last write
    lines: list[Line] = field(repr=False)  # its losses, thinned for the plot
    seeds: tuple[int, ...] = ()  # of several runs that `merge_seeds` has merged, their seeds; empty for one run
    validation_deviation: float | None = None  # the standard deviation of their losses
    bits_deviation: float | None = None  # the same in bits per byte
    paths: tuple[Path, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dictionary for JSON, without the losses of each step."""
        values = {name: value for name, value in vars(self).items() if name != "lines"}
        return {**values, "path": str(self.path), "paths": [str(path) for path in self.paths]}


def name_runs(folders: Sequence[Path]) -> tuple[dict[Path, str], list[str]]:
    """Find the runs in and below folders, each once, with their names to show; and a sentence for each folder without runs."""
    found: list[tuple[Path, str]] = []
    missing: list[str] = []
    for folder in folders:
        if not is_there(folder):
            missing.append(f"{folder} does not exist: give the folder of a run, or one with runs in it.")
            continue
        unreadable: list[str] = []
        runs = list(find_runs(folder, unreadable))
        missing += unreadable
        if not runs and not unreadable:
            missing.append(f"There is no run in {folder}: give the folder of a run, or one with runs in it.")
        for run in runs:
            shown = run.relative_to(folder) if len(folders) == 1 and run != folder else run
            found.append((run, str(shown)))
    found.sort(key=lambda each: sum(path.is_symlink() for path in (each[0], *each[0].parents)))  # its own name before links
    unique: dict[Path, tuple[Path, str]] = {}
    for run, name in found:
        unique.setdefault(run.resolve(), (run, name))
    return dict(unique.values()), missing


def find_runs(folder: Path, unreadable: list[str], depth: int = DEPTH) -> Iterator[Path]:
    """Yield the runs in a folder and its subfolders; add a sentence to `unreadable` for each of them that cannot be read."""
    try:
        with reporting_file_errors("read", folder):
            is_run = any((folder / name).is_file() for name in (METRICS_FILE, RECORD_FILE)) or bool(list_checkpoints(folder))
            within = [] if is_run else [path for path in folder.iterdir() if path.is_dir() and path.name[0] != "."]
            within.sort()
    except LineartimeError as error:
        unreadable.append(str(error))
        return
    if is_run:
        yield folder
    for path in within if depth else ():
        yield from find_runs(path, unreadable, depth - 1)


def summarize(path: Path, name: str) -> tuple[RunSummary, list[str]]:
    """Summarise a run; also return a sentence for each of its damaged files."""
    problems: list[str] = []
    record = _record(path, problems)
    options, failure = record.options | record.schedule, last_error(record)
    lines: list[dict[str, float]] = []
    damaged: list[str] = []
    metrics = path / METRICS_FILE
    if is_there(metrics):  # otherwise it has not taken a step yet
        try:
            lines, damaged = read_damaged_metrics(path)
        except LineartimeError as error:
            problems.append(str(error))
    whole = not problems
    if damaged:
        what = "1 damaged line" if len(damaged) == 1 else f"{len(damaged):,} damaged lines"
        problems.append(f"{metrics} has {what}, skipped here ({damaged[0]}): restore it from a copy if you have one.")
    evaluated = [line for line in lines if "validation_loss" in line]
    best = min(evaluated, key=lambda line: line["validation_loss"], default={})
    losses = [line["loss"] for line in lines if "loss" in line]
    timed = [line for line in lines if line.get("tokens_per_second", 0) > 0]
    totals: dict[str, float] = {"step": 0}
    for line in lines:
        totals |= {
            name: max(totals.get(name, 0), line[name]) for name in ("step", "tokens", "seconds", "skipped") if name in line
        }
    changed: list[float] = []
    for place in (metrics, path):
        with suppress(OSError):  # a run that fails removes its folder
            changed.append(place.stat().st_mtime)
    silent = max(0.0, time.time() - max(changed, default=time.time()))
    summary = RunSummary(
        name=name,
        path=path,
        options=options,
        tokenizer=_tokenizer(path),
        step=int(totals["step"]),
        tokens=int(totals["tokens"]) if "tokens" in totals else None,
        training_loss=statistics.fmean(losses[-AVERAGED:]) if losses else None,
        validation_loss=best.get("validation_loss"),
        bits_per_byte=best.get("validation_bits_per_byte"),
        tokens_per_second=statistics.median(line["tokens_per_second"] for line in timed) if timed else None,
        seconds=totals.get("seconds"),
        waiting=_waiting([line for line in timed if "waiting" in line]),
        skipped=int(totals.get("skipped", 0)),
        state=_state(path, options.get("steps"), failure, totals, silent) if whole else "damaged",
        error=failure,
        silent_seconds=round(silent, 1),
        lines=thinned(lines),
    )
    return summary, problems


def _record(path: Path, problems: list[str]) -> Record:
    """The record of a run, or else one with the options in its last checkpoint, or else an empty one."""
    if is_there(path / RECORD_FILE):
        try:
            return read_record(path)
        except LineartimeError as error:
            problems.append(str(error))
    if list_checkpoints(path):
        try:
            return Record(read_from(path, read_training_state, "last").config, ())
        except LineartimeError as error:
            problems.append(str(error))
    return Record({}, ())


def _tokenizer(path: Path) -> str:
    """A digest of the tokenizer in the last checkpoint of a run; empty if there is none."""
    for checkpoint in list_checkpoints(path)[-1:]:
        with suppress(OSError):
            return sha256((checkpoint / TOKENIZER_FILE).read_bytes()).hexdigest()[:16]
    return ""


def _waiting(steps: Sequence[Line]) -> float | None:
    """The share of waiting in the time of all steps. They have equally many tokens: their times are inverse to their speeds."""
    seconds = [1 / line["tokens_per_second"] for line in steps]
    return sum(line["waiting"] * second for line, second in zip(steps, seconds, strict=True)) / sum(seconds) if steps else None


def _state(path: Path, steps: object, error: str | None, totals: dict[str, float], silent: float) -> str:
    """Determine the state of a run from its error, recorded steps, lock, last checkpoint and last write, in this order."""
    locked, step, saved = is_locked(path), int(totals["step"]), list_checkpoints(path)[-1:]
    if error is not None:
        return "running" if locked else "failed"  # it is being resumed, or not
    if isinstance(steps, int) and step >= steps and saved in ([], [checkpoint_path(path, steps)]):
        return "finished"  # perhaps copied without checkpoints; one killed in its last evaluation has only earlier ones
    if locked:
        return "running"
    if saved == [checkpoint_path(path, step)]:
        return "stopped"
    if locked is False:  # its process was killed
        return "silent"
    # The run may be on another machine: allow a minute, or ten of its steps if they are long.
    ten_steps = 10 * totals.get("seconds", 0) / step if step else 0.0
    return "running" if silent < max(60.0, ten_steps) else "silent"
