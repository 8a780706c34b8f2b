"""Runs side by side: the cells that describe each run, and the columns that fit on a screen."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from lineartime.errors import cannot
from lineartime.runs.curve import counted
from lineartime.runs.summary import RunSummary, find_runs

_MOST_OPTIONS = 4
"""The most columns for options that differ."""
_NOT_COMPARED = ("preset", "data", "text_column", "steps", "out", "resume", "like", "cache", "track")
"""Options with a column of their own, and options that change neither what a run learns nor how fast."""
_PADDING = 2
"""The width of a column beside its text."""


@dataclass(frozen=True)
class Comparison:
    """A table of runs.

    Attributes:
        columns: the cells of each column by its header, one cell for each run.
        left_out: the columns for which the screen is too narrow.
        more_options: the options that also differ, but have no column.
        incomparable: the options for which losses do not compare, because the runs have different values.
    """

    columns: dict[str, list[str]]
    left_out: list[str]
    more_options: list[str]
    incomparable: list[str]


def name_runs(folders: Sequence[Path]) -> tuple[dict[Path, str], list[str]]:
    """All runs in and below folders, each once, with the names to show; and a sentence for each folder without runs."""
    found: dict[Path, tuple[Path, str]] = {}
    missing = []
    for folder in folders:
        try:
            runs = list(find_runs(folder))
        except OSError as error:
            missing.append(str(cannot("read", folder, error)))
            continue
        if not runs:
            missing.append(f"There is no run in {folder}: give the folder of a run, or one with runs in it.")
        for run in runs:
            name = run.relative_to(folder) if len(folders) == 1 and run != folder else run
            found.setdefault(run.resolve(), (run, str(name)))
    return dict(found.values()), missing


def by_validation_loss(runs: Iterable[RunSummary]) -> list[RunSummary]:
    """The runs with the lowest validation loss first; runs without one last."""
    return sorted(runs, key=lambda run: (run.validation_loss is None, run.validation_loss or 0.0, run.name))


def compare(runs: Sequence[RunSummary], width: int) -> Comparison:
    """The table of runs on a screen of `width` characters: the least important columns give way."""
    options = differing_options(runs)
    shown, more = options[:_MOST_OPTIONS], options[_MOST_OPTIONS:]
    columns = {name: [cell(run) for run in runs] for name, cell in _CELLS.items()}
    columns |= {name: [_value(run.options.get(name)) for run in runs] for name in shown}
    columns = {name: cells for name, cells in columns.items() if name in _ALWAYS or set(cells) != {"-"}}
    left_out = []
    for name in (*_FIRST_TO_GO, *reversed(shown), *_LAST_TO_GO):
        if sum(max(map(cell_len, (name, *cells))) + _PADDING for name, cells in columns.items()) + 1 <= width:
            break
        if columns.pop(name, None) is not None:
            left_out.append(name)
    known = [run.options for run in runs if run.options]
    incomparable = [name for name in ("data", "tokenizer", "task") if len({_value(each.get(name)) for each in known}) > 1]
    return Comparison(columns, left_out, more, incomparable)


def differing_options(runs: Sequence[RunSummary]) -> list[str]:
    """The options that differ between the runs whose options are known, in their usual order."""
    known = [run.options for run in runs if run.options]
    names = dict.fromkeys(name for options in known for name in options if name not in _NOT_COMPARED)
    return [name for name in names if len({json.dumps(options.get(name)) for options in known}) > 1]


def _value(value: Any) -> str:
    """The value of an option as a cell: of a path, the last part."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(map(_value, value)) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value.rstrip("/").rpartition("/")[2]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _steps(run: RunSummary) -> str:
    steps = run.options.get("steps")
    return f"{run.step:,}" + (f"/{steps:,}" if isinstance(steps, int) else "")


def _duration(seconds: float) -> str:
    """A time in its two largest units."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def _number(format_spec: str, value: float | None) -> str:
    return "-" if value is None else format(value, format_spec)


_CELLS: dict[str, Callable[[RunSummary], str]] = {
    "run": lambda run: run.name,
    "model": lambda run: _value(run.options.get("preset")),
    "data": lambda run: _value(run.options.get("data")),
    "step": _steps,
    "tokens": lambda run: "-" if run.tokens is None else counted(run.tokens),
    "training": lambda run: _number(".3f", run.training_loss),
    "validation": lambda run: _number(".3f", run.validation_loss),
    "bits/byte": lambda run: _number(".3f", run.bits_per_byte),
    "tokens/s": lambda run: _number(",.0f", run.tokens_per_second),
    "time": lambda run: "-" if run.seconds is None else _duration(run.seconds),
    "waiting": lambda run: _number(".1%", run.waiting),
    "skipped": lambda run: f"{run.skipped:,}" if run.skipped else "-",
    "state": lambda run: f"silent {_duration(run.silent_seconds)}" if run.state == "silent" else run.state,
}
_ALWAYS = ("run", "step", "validation", "state")
# The order in which columns give way on a narrow screen; options that differ go in between.
_FIRST_TO_GO = ("skipped", "waiting", "tokens", "training")
_LAST_TO_GO = ("time", "tokens/s", "data", "model", "bits/byte")
