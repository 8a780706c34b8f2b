"""The comparison of runs: find them, summarise each from its files, group those that compare, make tables."""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lineartime.checkpoint import checkpoint_path, list_checkpoints
from lineartime.errors import LineartimeError
from lineartime.files import RECORD_FILE, is_there
from lineartime.runs.metrics import AVERAGED, METRICS_FILE, Line, read_metrics, thinned
from lineartime.runs.record import WITHOUT_EFFECT, Record, is_locked, last_error, read_record, texts_of
from lineartime.screen import new_table
from lineartime.units import NOT_THERE, cell, counted, duration, without_empty

DEPTH = 3
"""Levels of folders to search for runs."""
UNLIMITED = 100_000
"""The width, in columns, of output that is not a terminal."""
_NOT_COMPARED = ("preset", "data", "text_column", "include", "exclude", "raw_ids", "steps", *WITHOUT_EFFECT)
"""Options with a column of their own, and options that change neither what a run learns nor how fast."""
_GROUPED_BY = ("data", "tokenizer", "task")
"""The options that must be equal for losses to be comparable."""


@dataclass(frozen=True)
class RunSummary:
    """The summary of a run; values that its files do not hold are None."""

    name: str  # the name for display
    path: Path
    options: dict[str, Any]  # the options with which it was started; empty if unknown
    step: int  # the last recorded step
    tokens: int | None  # the number of tokens trained on
    training_loss: float | None  # the mean of the last 20 steps, in nats per token
    validation_loss: float | None  # the lowest validation loss, in nats per token
    bits_per_byte: float | None  # the bits per byte of the same evaluation
    tokens_per_second: float | None  # the median of all steps
    seconds: float | None  # the time spent training, including evaluations and checkpoints
    state: str  # damaged, failed, finished, running, or stopped: see `_state`
    error: str | None  # the message of the error that ended a failed run
    lines: list[Line] = field(repr=False)  # its losses, thinned for the plot

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dictionary for JSON, without the losses of each step."""
        return {name: value for name, value in vars(self).items() if name != "lines"} | {"path": str(self.path)}


def name_runs(folders: Sequence[Path]) -> tuple[dict[Path, str], list[str]]:
    """Find the runs in and below folders, each once, with their names to show; and a sentence for each folder without runs."""
    unique: dict[Path, tuple[Path, str]] = {}
    missing: list[str] = []
    for folder in folders:
        runs = list(find_runs(folder))
        if not runs:
            missing.append(f"There is no run in {folder}: give the folder of a run, or one with runs in it.")
        for run in runs:
            name = run.relative_to(folder) if len(folders) == 1 and run != folder else run
            unique.setdefault(run.resolve(), (run, str(name)))
    return dict(unique.values()), missing


def find_runs(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Yield the runs in a folder and its subfolders, except for what may not be read."""
    try:
        is_run = any((folder / name).is_file() for name in (METRICS_FILE, RECORD_FILE)) or bool(list_checkpoints(folder))
        within = sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
    except (OSError, LineartimeError):
        return
    if is_run:
        yield folder
    elif depth:
        for path in within:
            yield from find_runs(path, depth - 1)


def summarize(path: Path, name: str) -> tuple[RunSummary, list[str]]:
    """Summarise a run; also return a sentence for each of its damaged files."""
    record, lines = Record({}, ()), list[dict[str, float]]()
    problems: list[str] = []
    try:
        if is_there(path / RECORD_FILE):
            record = read_record(path)
        if is_there(path / METRICS_FILE):  # otherwise it has not taken a step yet
            lines = read_metrics(path)
    except LineartimeError as error:
        problems.append(str(error))
    options, failure = record.options | record.schedule, last_error(record)
    best = min((line for line in lines if "validation_loss" in line), key=lambda line: line["validation_loss"], default={})
    losses = [line["loss"] for line in lines if "loss" in line]
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    last = {name: value for line in lines for name, value in line.items()}
    step = int(last.get("step", 0))
    summary = RunSummary(
        name=name,
        path=path,
        options=options,
        step=step,
        tokens=int(last["tokens"]) if "tokens" in last else None,
        training_loss=statistics.fmean(losses[-AVERAGED:]) if losses else None,
        validation_loss=best.get("validation_loss"),
        bits_per_byte=best.get("validation_bits_per_byte"),
        tokens_per_second=statistics.median(speeds) if speeds else None,
        seconds=last.get("seconds"),
        state="damaged" if problems else _state(path, options.get("steps"), failure, step, last.get("seconds", 0.0)),
        error=failure,
        lines=thinned(lines),
    )
    return summary, problems


def _state(path: Path, steps: object, error: str | None, step: int, seconds: float) -> str:
    """The state of a run, from its lock, error, recorded steps, last checkpoint and last write, in this order.

    One that is not locked may be on another machine: it is running if it has written within a minute, or ten of its steps.
    """
    saved = list_checkpoints(path)[-1:]
    ended = isinstance(steps, int) and step >= steps and saved in ([], [checkpoint_path(path, steps)])
    if error is None and ended:
        return "finished"  # perhaps copied without checkpoints; one killed in its last evaluation has only earlier ones
    if is_locked(path):
        return "running"  # a failed run is being resumed
    if error is not None or saved == [checkpoint_path(path, step)]:
        return "stopped" if error is None else "failed"
    written = max(place.stat().st_mtime for place in (path / METRICS_FILE, path) if is_there(place))
    return "running" if time.time() - written < max(60.0, 10 * seconds / max(step, 1)) else "stopped"


def group_runs(runs: Sequence[RunSummary]) -> dict[str, list[RunSummary]]:
    """The runs by text, tokenizer and task, in words if there are several; the best first, unknown options last.

    The best has the fewest bits per byte, or nats per token if any lacks bits. Runs without an evaluation come last.
    """
    groups: dict[tuple[Any, ...], list[RunSummary]] = {}
    for run in runs:
        names = [str(run.options.get(name) or usual) for name, usual in (("tokenizer", "bytes"), ("task", "clm"))]
        groups.setdefault((tuple(texts_of(run.options)), *names) if run.options else (), []).append(run)
    texts = {key[0]: " ".join(Path(part).name for part in key[0]) for key in groups if key}
    if len(set(texts.values())) < len(texts):  # different ones would look alike
        texts = {text: " ".join(text) for text in texts}
    titles = {key: f"text {texts[key[0]]}, tokenizer {key[1]}, task {key[2]}" for key in sorted(groups) if key}
    titles |= {(): "unknown text"} if () in groups else {}
    for group in groups.values():
        in_bits = all(run.bits_per_byte is not None for run in group if run.validation_loss is not None)
        losses = {run.name: run.bits_per_byte if in_bits else run.validation_loss for run in group}
        group.sort(key=lambda run: (losses[run.name] is None, losses[run.name] or 0.0, run.name))
    return {title if len(groups) > 1 else "": groups[key] for key, title in titles.items()}


def make_tables(groups: Mapping[str, Sequence[RunSummary]], width: int | None = None) -> tuple[list[Table], list[str]]:
    """A table for each group, and the columns that were left out, the least important ones, on a screen of a width."""
    runs = [run for of_group in groups.values() for run in of_group]
    differing = dict.fromkeys(name for of_group in groups.values() for name in differing_options(of_group))
    options = [name for name in differing if name not in _GROUPED_BY]
    columns: dict[str, Sequence[str]] = {name: [shown(run) for run in runs] for name, shown in _CELLS.items()}
    columns |= {name: [_option(_options_of(run).get(name)) for run in runs] for name in options}
    if len({_option(run.options.get("data")) for run in runs}) > 1:  # the titles of the groups name the text
        del columns["data"]
    columns, left_out = without_empty(columns, _ALWAYS), []
    console = Console()
    unfolded = console.options.update_width(UNLIMITED)
    for name in (*_FIRST_TO_GO, *reversed(options), *_LAST_TO_GO):
        tables = _tables(groups, columns)
        if width is None or all(console.measure(table, options=unfolded).maximum <= width for table in tables):
            break
        if columns.pop(name, None) is not None:
            left_out.append(name)
    return _tables(groups, columns), left_out


def _tables(groups: Mapping[str, Sequence[RunSummary]], columns: Mapping[str, Sequence[str]]) -> list[Table]:
    """A table for each group. In a narrow one, only the names of runs fold."""
    rows, tables = zip(*columns.values(), strict=True), []
    for runs in groups.values():
        tables.append(new_table([*columns], left=("run", "model", "data", "state"), folded=("run",)))
        for row in islice(rows, len(runs)):
            tables[-1].add_row(*row)
    return tables


def differing_options(runs: Sequence[RunSummary]) -> list[str]:
    """The options that differ between the runs whose options are known, in their usual order."""
    known = [_options_of(run) for run in runs if run.options]
    names = dict.fromkeys(name for options in known for name in options if name not in _NOT_COMPARED)
    return [name for name in names if len({json.dumps(options.get(name)) for options in known}) > 1]


def _options_of(run: RunSummary) -> dict[str, Any]:
    """The options of a run, in which each NAME=VALUE of `override` is an option of its own."""
    options = dict(run.options)
    items = (item.partition("=") for item in options.pop("override", None) or ())
    return options | {name if name not in options else f"override {name}": value for name, _, value in items}


def _option(value: Any) -> str:
    """The value of an option as a cell."""
    if isinstance(value, (list, tuple)):
        value = " ".join(map(str, value)) or None
    return NOT_THERE if value is None else str(value)


_CELLS: dict[str, Callable[[RunSummary], str]] = {
    "run": lambda run: run.name,
    "model": lambda run: _option(run.options.get("preset")),
    "data": lambda run: " ".join(Path(text).name for text in texts_of(run.options)) if run.options.get("data") else NOT_THERE,
    "step": lambda run: f"{run.step:,}" + (f"/{run.options['steps']:,}" if run.options.get("steps") else ""),
    "tokens": lambda run: cell(run.tokens, counted),
    "training": lambda run: cell(run.training_loss, ".3f"),
    "validation": lambda run: cell(run.validation_loss, ".3f"),
    "bits/byte": lambda run: cell(run.bits_per_byte, ".3f"),
    "tokens/s": lambda run: cell(run.tokens_per_second, ",.0f"),
    "time": lambda run: cell(run.seconds, duration),
    "state": lambda run: run.state,
}
_ALWAYS = ("run", "step", "validation", "state")
# The order in which columns are left out on a narrow screen; options that differ come in between.
_FIRST_TO_GO, _LAST_TO_GO = ("tokens", "training"), ("time", "tokens/s", "data", "model", "bits/byte")
