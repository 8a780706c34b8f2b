"""`lineartime runs`: compare runs in a table and a plot."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lineartime.errors import LineartimeError
from lineartime.runs.curve import draw_comparison
from lineartime.runs.summary import RunSummary, summarize
from lineartime.runs.table import by_validation_loss, compare, name_runs

_PICTURE = "runs.png"


@dataclass(frozen=True)
class Options:
    """Compare runs: a table sorted by validation loss, and a plot of losses by step, tokens and time."""

    folders: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs"),)
    """Runs, or folders with runs in them, up to three levels down."""
    plot: Path | None = None
    """Picture to write; the default is runs.png in the first folder, and none with --json."""
    json: bool = False
    """Print the same as one line of JSON."""


def run(options: Options) -> None:
    """Print the runs and draw them; damaged files are named on standard error, and everything else is shown.

    Raises:
        LineartimeError: for folders without runs, after all others are shown, or if the picture in --plot cannot be written.
    """
    names, missing = name_runs(options.folders)
    problems: list[str] = []
    runs: list[RunSummary] = []
    screen = Console(stderr=True)
    for path, name in track(names.items(), "reading", console=screen, transient=True, disable=not screen.is_terminal):
        summary, damaged = summarize(path, name)
        runs.append(summary)
        problems += damaged
    if runs:
        runs = by_validation_loss(runs)
        picture = _draw(options, runs, problems)
        if options.json:
            facts = {"runs": [summary.to_dict() for summary in runs], "problems": problems, "plot": picture and str(picture)}
            print(json.dumps(facts))
        else:
            _print(runs)
            if picture is not None:
                print(f"plot: {picture}")
    for problem in problems:
        print(problem, file=sys.stderr)
    if missing:
        raise LineartimeError(" ".join(missing))


def _draw(options: Options, runs: Sequence[RunSummary], problems: list[str]) -> Path | None:
    """Draw the plot; without --plot, a failure is one of the problems to print, and no error."""
    if options.json and options.plot is None:
        return None
    file = options.plot or next(folder for folder in options.folders if folder.is_dir()) / _PICTURE
    try:
        return draw_comparison({run.name: run.lines for run in runs}, file)
    except LineartimeError as error:
        if options.plot is not None:
            raise
        problems.append(f"No plot: {error}")
        return None


def _print(runs: Sequence[RunSummary]) -> None:
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 140)
    comparison = compare(runs, console.width)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in comparison.columns:
        words = name in ("run", "model", "data", "state")
        table.add_column(name, justify="left" if words else "right", no_wrap=name != "run", overflow="fold")
    for row in zip(*comparison.columns.values(), strict=True):
        table.add_row(*row)
    console.print(table)
    notes = []
    if comparison.left_out:
        notes.append(f"The screen is too narrow for {', '.join(comparison.left_out)} (--json has everything).")
    if comparison.more_options:
        count, names = len(comparison.more_options), ", ".join(comparison.more_options)
        notes.append(f"{count} more options differ: {names} (--json has everything).")
    notes += [f"Losses do not compare between runs with another {name}." for name in comparison.incomparable]
    for note in notes:
        console.print(note, soft_wrap=True)
