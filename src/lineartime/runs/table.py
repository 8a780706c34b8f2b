"""A table of runs: groups with comparable losses, the cells that describe each run, and the columns that fit on a screen."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lineartime.choices import TEXT_COLUMN
from lineartime.markdown import NOT_THERE, cell, without_empty
from lineartime.runs.record import WITHOUT_EFFECT, texts_of
from lineartime.runs.summary import RunSummary
from lineartime.screen import new_table
from lineartime.units import counted, duration

_MAX_OPTIONS = 4
"""The maximum number of columns for options that differ, on a screen."""
UNLIMITED = 100_000
"""The width, in columns, of output that is not a terminal."""
_NOT_COMPARED = ("preset", "data", "text_column", "max_expansion", "include", "exclude", "steps", *WITHOUT_EFFECT)
"""Options with a column of their own, and options that change neither what a run learns nor how fast."""
_GROUPED_BY = ("data", "tokenizer", "task")
"""The options that must be equal for losses to be comparable."""


@dataclass(frozen=True)
class Group:
    """Runs with comparable losses, the best first. `title` names their text, tokenizer and task, as far as groups differ."""

    title: str
    runs: list[RunSummary]


def group_runs(runs: Sequence[RunSummary]) -> list[Group]:
    """Group runs by text, tokenizer and task. Runs with unknown options form the last group."""
    named = [(run.tokenizer, str(run.options.get("tokenizer") or "bytes")) for run in runs if run.tokenizer]
    # The shortest name that a run has for a tokenizer, which is seldom a path.
    names = dict(sorted(named, key=lambda pair: (len(pair[1]), pair[1]), reverse=True))
    groups: dict[tuple[tuple[str, ...], ...], list[RunSummary]] = {}
    for run in runs:
        groups.setdefault(_compared_by(run, names), []).append(run)
    known = sorted(key for key in groups if key)
    parts = [
        [f"{word} {name}" for name in _short_names(values)]
        for word, values in zip(("text", "tokenizer", "task"), zip(*known, strict=True), strict=False)
        if len(set(values)) > 1 or (word == "text" and () in groups)
    ]
    titles = [", ".join(part[place] for part in parts) for place in range(len(known))]
    found = [Group(title, _ranked(groups[key])) for key, title in zip(known, titles, strict=True)]
    unknown = [Group("unknown text" if known else "", _ranked(groups[()]))] if () in groups else []
    return [*found, *unknown]


def _compared_by(run: RunSummary, tokenizers: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """The texts, the tokenizer and the task of a run; empty if unknown."""
    if not run.options:
        return ()
    given = run.options.get
    column = given("text_column")
    in_column = () if column in (None, TEXT_COLUMN) else (f"(column {column})",)
    tokenizer = tokenizers.get(run.tokenizer, str(given("tokenizer") or "bytes"))
    return (*texts_of(run.options), *in_column), (tokenizer,), (str(given("task") or "clm"),)


def _short_names(values: Sequence[Sequence[str]]) -> list[str]:
    """The last parts of paths, unless different ones would look alike."""
    short = [" ".join(Path(part).name for part in value) for value in values]
    return short if len(set(short)) == len(set(values)) else [" ".join(value) for value in values]


def _ranked(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """Sort runs by bits per byte, or by nats per token if any lacks bits. Runs without an evaluation come last."""
    in_bits = all(run.bits_per_byte is not None for run in runs if run.validation_loss is not None)

    def rank(run: RunSummary) -> tuple[bool, float, str]:
        loss = run.bits_per_byte if in_bits else run.validation_loss
        return loss is None, loss or 0.0, run.name

    return sorted(runs, key=rank)


def make_tables(groups: Sequence[Group], width: int | None = None) -> tuple[list[Table], list[str], list[str]]:
    """A table for each group; then the columns that were left out, and the options that also differ, but have no column.

    On a screen of `width` characters, there are a few options, and the least important columns are left out if need be.
    """
    runs = [run for group in groups for run in group.runs]
    in_titles = (*_GROUPED_BY, "seed") if any(run.seeds for run in runs) else _GROUPED_BY
    differing = dict.fromkeys(name for group in groups for name in differing_options(group.runs))
    options = [name for name in differing if name not in in_titles]
    most = len(options) if width is None else _MAX_OPTIONS
    columns, left_out = _columns(runs, options[:most]), []
    for name in (*_FIRST_TO_GO, *reversed(options[:most]), *_LAST_TO_GO):
        if width is None or all(_width(table) <= width for table in _tables(groups, columns)):
            break
        if columns.pop(name, None) is not None:
            left_out.append(name)
    return _tables(groups, columns), left_out, options[most:]


def _columns(runs: Sequence[RunSummary], options: Sequence[str]) -> dict[str, Sequence[str]]:
    """The cells of all runs by column, with columns for options. Columns without content are left out."""
    columns = {name: [shown(run) for run in runs] for name, shown in _CELLS.items()}
    columns |= {name: [_option(_options_of(run).get(name)) for run in runs] for name in options}
    if len({_option(run.options.get("data")) for run in runs}) > 1:  # the titles of the groups name the text
        del columns["data"]
    return without_empty(columns, _ALWAYS)


def _tables(groups: Sequence[Group], columns: Mapping[str, Sequence[str]]) -> list[Table]:
    """A table for each group. In a narrow one, only the names of runs fold."""
    rows, tables = zip(*columns.values(), strict=True), []
    for group in groups:
        tables.append(new_table([*columns], left=("run", "model", "data", "state"), folded=("run",)))
        for row in islice(rows, len(group.runs)):
            tables[-1].add_row(*row)
    return tables


def _width(table: Table) -> int:
    """The width of a table in which nothing folds, in characters."""
    console = Console()
    return console.measure(table, options=console.options.update_width(UNLIMITED)).maximum


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


def _spread(deviation: float | None) -> str:
    return "" if deviation is None else f" ± {deviation:.3f}"


_CELLS: dict[str, Callable[[RunSummary], str]] = {
    "run": lambda run: run.name,
    "model": lambda run: _option(run.options.get("preset")),
    "data": lambda run: " ".join(Path(text).name for text in texts_of(run.options)) if run.options.get("data") else NOT_THERE,
    "seeds": lambda run: cell(len(run.seeds) or None, ""),
    "step": lambda run: f"{run.step:,}" + (f"/{run.options['steps']:,}" if run.options.get("steps") else ""),
    "tokens": lambda run: cell(run.tokens, counted),
    "training": lambda run: cell(run.training_loss, ".3f"),
    "validation": lambda run: cell(run.validation_loss, ".3f", unit=_spread(run.validation_deviation)),
    "bits/byte": lambda run: cell(run.bits_per_byte, ".3f", unit=_spread(run.bits_deviation)),
    "tokens/s": lambda run: cell(run.tokens_per_second, ",.0f"),
    "time": lambda run: cell(run.seconds, duration),
    "waiting": lambda run: cell(run.waiting, ".1%"),
    "skipped": lambda run: cell(run.skipped or None, ","),
    "state": lambda run: f"silent {duration(run.silent_seconds)}" if run.state == "silent" else run.state,
}
_ALWAYS = ("run", "step", "validation", "state")
# The order in which columns are left out on a narrow screen; options that differ come in between.
_FIRST_TO_GO = ("skipped", "waiting", "tokens", "training")
_LAST_TO_GO = ("time", "tokens/s", "data", "model", "bits/byte")
