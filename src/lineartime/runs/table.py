"""Runs side by side, in a table and a plot: `lineartime runs`."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from lineartime.errors import LineartimeError, cannot
from lineartime.runs.curve import counted, draw_comparison
from lineartime.runs.summary import RunSummary, find_runs, summarize

PICTURE = "runs.png"
MOST_OPTIONS = 4
"""Columns for options that differ, at the most."""
NOT_COMPARED = ("preset", "data", "steps", "out", "resume", "like", "cache", "tensorboard", "trackers")
"""Options with a column of their own, and those that do not change what is learned, nor how fast."""


@dataclass(frozen=True)
class RunsConfig:
    """Compare runs: a table sorted by validation loss, and a plot of losses by step, tokens and time."""

    folders: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs"),)
    """Runs, or folders with runs in them, up to three levels down."""
    plot: Path | None = None
    """Picture to write; the default is runs.png in the first folder, and none with --json."""
    json: bool = False
    """Print the same as one line of JSON."""


def show_runs(config: RunsConfig) -> None:
    """Print the runs and draw them; what is damaged is named on standard error, and everything else is shown.

    Raises:
        LineartimeError: for folders without runs, after all others are shown, or if --plot cannot be written.
    """
    paths, missing = _find(config.folders)
    runs: list[RunSummary] = []
    problems: list[str] = []
    screen = Console(stderr=True)
    for path, name in track(paths.items(), "reading", console=screen, transient=True, disable=not screen.is_terminal):
        run, damaged = summarize(path, name)
        runs.append(run)
        problems += damaged
    runs.sort(key=lambda run: (run.validation_loss is None, run.validation_loss or 0.0, run.name))
    if runs:
        picture = _draw(config, runs, problems)
        if config.json:
            facts = {"runs": [run.to_dict() for run in runs], "problems": problems, "plot": picture and str(picture)}
            print(json.dumps(facts))
        else:
            _print(runs)
            if picture is not None:
                print(f"plot: {picture}")
    for problem in problems:
        print(problem, file=sys.stderr)
    if missing:
        raise LineartimeError(" ".join(missing))


def _find(folders: Sequence[Path]) -> tuple[dict[Path, str], list[str]]:
    """All runs, once each, with names to show them by; and a sentence for each folder that has none."""
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


def _draw(config: RunsConfig, runs: Sequence[RunSummary], problems: list[str]) -> Path | None:
    """Draw the plot; one that nobody asked for may fail."""
    if config.json and config.plot is None:
        return None
    file = config.plot or next(folder for folder in config.folders if folder.is_dir()) / PICTURE
    try:
        return draw_comparison({run.name: run.lines for run in runs}, file)
    except LineartimeError as error:
        if config.plot is not None:
            raise
        problems.append(f"No plot: {error}")
        return None


def _print(runs: Sequence[RunSummary]) -> None:
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 140)
    options = differing_options(runs)
    columns = {name: [cell(run) for run in runs] for name, cell in _CELLS.items()}
    columns |= {name: [_shown(run.options.get(name)) for run in runs] for name in options[:MOST_OPTIONS]}
    columns = {name: cells for name, cells in columns.items() if name in _ALWAYS or set(cells) != {"-"}}
    narrow = []
    for name in (*_LEAST_FIRST, *reversed(options[:MOST_OPTIONS]), *_THEN):
        if sum(max(map(cell_len, (name, *cells))) + 2 for name, cells in columns.items()) + 1 <= console.width:
            break
        if columns.pop(name, None) is not None:
            narrow.append(name)
    table = Table(
        *(Column(name, justify=_side(name), no_wrap=name != "run", overflow="fold") for name in columns),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    console.print(table)
    if narrow:
        console.print(f"left out, for there is no room: {', '.join(narrow)} (--json has everything)", soft_wrap=True)
    if len(options) > MOST_OPTIONS:
        others = ", ".join(options[MOST_OPTIONS:])
        console.print(f"{len(options) - MOST_OPTIONS} more options differ: {others} (--json has everything)", soft_wrap=True)
    for name in ("data", "tokenizer", "task"):
        if len({_shown(run.options.get(name)) for run in runs if run.options}) > 1:
            console.print(f"Losses do not compare between runs with another {name}.", soft_wrap=True)


def _side(column: str) -> Literal["left", "right"]:
    return "left" if column in ("run", "model", "data", "state") else "right"


def differing_options(runs: Sequence[RunSummary]) -> list[str]:
    """The options that are not the same in all runs whose options are known, in the order of the command line."""
    known = [run.options for run in runs if run.options]
    names = dict.fromkeys(name for options in known for name in options if name not in NOT_COMPARED)
    return [name for name in names if len({json.dumps(options.get(name)) for options in known}) > 1]


def _shown(value: Any) -> str:
    """The value of an option in a cell: of a path its last part."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(map(_shown, value)) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value.rstrip("/").rpartition("/")[2]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _steps(run: RunSummary) -> str:
    steps = run.options.get("steps")
    return f"{run.step:,}" + (f"/{steps:,}" if isinstance(steps, int) else "")


def _state(run: RunSummary) -> str:
    return f"silent {_duration(run.silent_seconds)}" if run.state == "silent" else run.state


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
    "model": lambda run: _shown(run.options.get("preset")),
    "data": lambda run: _shown(run.options.get("data")),
    "step": _steps,
    "tokens": lambda run: "-" if run.tokens is None else counted(run.tokens),
    "training": lambda run: _number(".3f", run.training_loss),
    "validation": lambda run: _number(".3f", run.validation_loss),
    "bits/byte": lambda run: _number(".3f", run.bits_per_byte),
    "tokens/s": lambda run: _number(",.0f", run.tokens_per_second),
    "time": lambda run: "-" if run.seconds is None else _duration(run.seconds),
    "waiting": lambda run: _number(".1%", run.waiting),
    "skipped": lambda run: f"{run.skipped:,}" if run.skipped else "-",
    "state": _state,
}
_ALWAYS = ("run", "step", "validation", "state")
# Where a terminal is too narrow, columns are left out in this order; options that differ go in between.
_LEAST_FIRST = ("skipped", "waiting", "tokens", "training")
_THEN = ("time", "tokens/s", "data", "model", "bits/byte")
