"""A table of runs: the cells that describe each run, and the columns that fit on a screen."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from lineartime.choices import TEXT_COLUMN
from lineartime.files import is_there
from lineartime.runs.record import WITHOUT_EFFECT, texts_of
from lineartime.runs.summary import RunSummary, find_runs
from lineartime.units import counted, duration

_MAX_OPTIONS = 4
"""The maximum number of columns for options that differ."""
_NOT_COMPARED = (
    "preset",
    "data",
    "text_column",
    "max_expansion",
    "include",
    "exclude",
    "steps",
    *WITHOUT_EFFECT,
)
"""Options with a column of their own, and options that change neither what a run learns nor how fast."""
_GROUPED_BY = {"data": "text", "tokenizer": "tokenizer", "task": "task"}
"""The options that must be equal for losses to be comparable, and their names in titles."""
_PADDING = 2
"""The padding of a column, in characters."""


@dataclass(frozen=True)
class Group:
    """Runs with comparable losses, the best first. `title` names their text, tokenizer and task, as far as groups differ."""

    title: str
    runs: list[RunSummary]


@dataclass(frozen=True)
class Comparison:
    """A table of runs.

    Attributes:
        columns: the cells of each column by its header, one cell for each run.
        left_out: the columns that do not fit on the screen.
        more_options: the options that also differ, but have no column.
    """

    columns: dict[str, list[str]]
    left_out: list[str]
    more_options: list[str]


def column_widths(columns: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """The width of the longest cell in each column, in characters."""
    return {name: max(map(cell_len, (name, *cells))) for name, cells in columns.items()}


def full_width(widths: Mapping[str, int]) -> int:
    """The width of a table whose columns have these widths, in characters."""
    return sum(width + _PADDING for width in widths.values()) + 1


def name_runs(folders: Sequence[Path]) -> tuple[dict[Path, str], list[str]]:
    """Find the runs in and below folders, each once, with their names to show; and a sentence for each folder without runs."""
    found: dict[Path, tuple[Path, str]] = {}
    missing = []
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
            name = run.relative_to(folder) if len(folders) == 1 and run != folder else run
            own = run.resolve()
            if own not in found or _indirection(run) < _indirection(found[own][0]):
                found[own] = (run, str(name))
    return dict(found.values()), missing


def _indirection(run: Path) -> tuple[int, int]:
    """How many links a path has, and how many parts."""
    return sum(part.is_symlink() for part in (run, *run.parents)), len(run.parts)


def group_runs(runs: Sequence[RunSummary]) -> list[Group]:
    """Group runs by text, tokenizer and task. Runs with unknown options form the last group."""
    groups: dict[tuple[tuple[str, ...], ...], list[RunSummary]] = {}
    names = _tokenizer_names(runs)
    for run in runs:
        groups.setdefault(_compared_by(run, names), []).append(run)
    known = sorted(key for key in groups if key)
    parts = {word: _cells(values) for word, values in zip(_GROUPED_BY.values(), zip(*known, strict=True), strict=False)}
    told = {word: cells for word, cells in parts.items() if len(set(cells)) > 1 or (word == "text" and () in groups)}
    titles = [", ".join(f"{word} {cells[at]}" for word, cells in told.items()) for at in range(len(known))]
    found = [Group(title, _ranked(groups[key])) for key, title in zip(known, titles, strict=True)]
    unknown = [Group("unknown text" if known else "", _ranked(groups[()]))] if () in groups else []
    return [*found, *unknown]


def _tokenizer_names(runs: Sequence[RunSummary]) -> dict[str, str]:
    """A name for each tokenizer, by its digest: the shortest that a run has for it, which is seldom a path."""
    named = [(run.tokenizer, str(run.options.get("tokenizer") or "bytes")) for run in runs if run.tokenizer]
    return dict(sorted(named, key=lambda pair: (len(pair[1]), pair[1]), reverse=True))


def _compared_by(run: RunSummary, tokenizers: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """The texts, the tokenizer and the task of a run; empty if unknown."""
    if not run.options:
        return ()
    given = run.options.get
    column = given("text_column")
    in_column = () if column in (None, TEXT_COLUMN) else (f"(column {column})",)
    tokenizer = tokenizers.get(run.tokenizer, str(given("tokenizer") or "bytes"))
    return (*texts_of(run.options), *in_column), (tokenizer,), (str(given("task") or "clm"),)


def _ranked(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """Sort runs by bits per byte, or by nats per token if any lacks bits. Runs without an evaluation come last."""
    in_bits = all(run.bits_per_byte is not None for run in runs if run.validation_loss is not None)

    def rank(run: RunSummary) -> tuple[bool, float, str]:
        loss = run.bits_per_byte if in_bits else run.validation_loss
        return loss is None, loss or 0.0, run.name

    return sorted(runs, key=rank)


def compare(groups: Sequence[Group], width: int | None = None) -> Comparison:
    """Make a table of all runs, group by group, with the options that differ between runs of the same group.

    If it does not fit on a screen of `width` characters, the least important columns are left out.
    """
    runs = [run for group in groups for run in group.runs]
    in_titles = (*_GROUPED_BY, "seed") if any(run.seeds for run in runs) else tuple(_GROUPED_BY)
    differing = dict.fromkeys(name for group in groups for name in differing_options(group.runs))
    options = [name for name in differing if name not in in_titles]
    most = len(options) if width is None else _MAX_OPTIONS
    shown, more = options[:most], options[most:]
    columns = {name: [cell(run) for run in runs] for name, cell in _CELLS.items()}
    columns |= {name: _cells([_options_of(run).get(name) for run in runs]) for name in ("data", *shown)}
    if len(set(columns["data"])) > 1:  # the titles of the groups name the text
        del columns["data"]
    columns = {name: cells for name, cells in columns.items() if name in _ALWAYS or set(cells) != {"-"}}
    left_out = []
    for name in (*_FIRST_TO_GO, *reversed(shown), *_LAST_TO_GO):
        if width is None or full_width(column_widths(columns)) <= width:
            break
        if columns.pop(name, None) is not None:
            left_out.append(name)
    return Comparison(columns, left_out, more)


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


def _cells(values: Sequence[Any]) -> list[str]:
    """The values of an option as cells, in full where different values would look alike."""
    short = [_value(value) for value in values]
    alike = {cell: {json.dumps(value) for value, other in zip(values, short, strict=True) if other == cell} for cell in short}
    return [cell if len(alike[cell]) == 1 else _in_full(value) for value, cell in zip(values, short, strict=True)]


def _in_full(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _value(value: Any) -> str:
    """The value of an option as a cell; for a path, its last part."""
    if value is None:
        return "-"
    if isinstance(value, (list, tuple)):
        return " ".join(map(_value, value)) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value.rstrip("/").rpartition("/")[2]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _steps(run: RunSummary) -> str:
    steps = run.options.get("steps")
    return f"{run.step:,}" + (f"/{steps:,}" if isinstance(steps, int) else "")


def _number(format_spec: str, value: float | None, deviation: float | None = None) -> str:
    spread = "" if deviation is None else f" ± {deviation:{format_spec}}"
    return "-" if value is None else f"{value:{format_spec}}{spread}"


_CELLS: dict[str, Callable[[RunSummary], str]] = {
    "run": lambda run: run.name,
    "model": lambda run: _value(run.options.get("preset")),
    "data": lambda run: "-",  # filled in by `compare`, as are the options that differ
    "seeds": lambda run: f"{len(run.seeds)}" if run.seeds else "-",
    "step": _steps,
    "tokens": lambda run: "-" if run.tokens is None else counted(run.tokens),
    "training": lambda run: _number(".3f", run.training_loss),
    "validation": lambda run: _number(".3f", run.validation_loss, run.validation_deviation),
    "bits/byte": lambda run: _number(".3f", run.bits_per_byte, run.bits_deviation),
    "tokens/s": lambda run: _number(",.0f", run.tokens_per_second),
    "time": lambda run: "-" if run.seconds is None else duration(run.seconds),
    "waiting": lambda run: _number(".1%", run.waiting),
    "skipped": lambda run: f"{run.skipped:,}" if run.skipped else "-",
    "state": lambda run: f"silent {duration(run.silent_seconds)}" if run.state == "silent" else run.state,
}
_ALWAYS = ("run", "step", "validation", "state")
# The order in which columns are left out on a narrow screen; options that differ come in between.
_FIRST_TO_GO = ("skipped", "waiting", "tokens", "training")
_LAST_TO_GO = ("time", "tokens/s", "data", "model", "bits/byte")
