"""`lineartime runs`: compare runs in a table and a plot."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lineartime.errors import LineartimeError
from lineartime.plots import check_picture
from lineartime.runs.metrics import draw_comparison
from lineartime.runs.table import UNLIMITED, RunSummary, group_runs, make_tables, name_runs, summarize
from lineartime.screen import SCREEN, Progress, output_console

_PICTURE = "runs.png"
Groups = Mapping[str, Sequence[RunSummary]]
_MOST_DRAWN = 8
"""The maximum number of groups in the plot: a row of panels each."""


@dataclass(frozen=True)
class RunsOptions:
    """The options of `lineartime runs`."""

    folders: tuple[Path, ...] = (Path("runs"),)
    """Runs, or folders with runs in them, up to three levels down."""
    plot: Path | None = None
    """Plot to write; the default is runs.png in the first folder, or no plot with --json."""
    json: bool = False
    """Print the same as one line of JSON."""


def run(options: RunsOptions) -> None:
    """Print the runs and draw them; damaged files are reported on standard error, and all else is shown.

    Raises:
        LineartimeError: for folders without runs, after all others are shown, or if the picture in --plot cannot be written.
    """
    names, missing = name_runs(options.folders)
    problems: list[str] = []
    runs: list[RunSummary] = []
    with Progress("reading", len(names)) as progress:
        for path, name in names.items():
            summary, damaged = summarize(path, name)
            runs.append(summary)
            problems += damaged
            progress.advance(1)
    if runs:
        groups = group_runs(runs)
        picture = _draw(options, groups, problems)
        if options.json:
            shown = [{"group": title, **run.to_dict()} for title, of_group in groups.items() for run in of_group]
            print(json.dumps({"runs": shown, "problems": problems, "plot": picture and str(picture)}))
        else:
            _print(groups)
            if picture is not None:
                print(f"plot: {picture}")
    for problem in problems:
        print(problem, file=SCREEN)
    if missing:
        raise LineartimeError(" ".join(missing))


def _draw(options: RunsOptions, groups: Groups, problems: list[str]) -> Path | None:
    """Draw the plot; without --plot, a failure is added to the problems instead of raised."""
    if options.json and options.plot is None:
        return None
    if options.plot is not None:
        check_picture(options.plot)
    file = options.plot or next(folder for folder in options.folders if folder.is_dir()) / _PICTURE
    largest = sorted(groups, key=lambda title: -len(groups[title]))[:_MOST_DRAWN]
    drawn = {title: {run.name: run.lines for run in runs} for title, runs in groups.items() if title in largest}
    if len(drawn) < len(groups):
        problems.append(f"The plot shows the {len(drawn)} largest of {len(groups)} groups: give the folders of other runs.")
    try:
        return draw_comparison(drawn, file)
    except LineartimeError as error:
        if options.plot is not None:
            raise
        problems.append(f"No plot: {error}")
        return None


def _print(groups: Groups) -> None:
    on_screen = sys.stdout.isatty()
    console = output_console(markup=False, width=None if on_screen else UNLIMITED)
    tables, left_out = make_tables(groups, console.width if on_screen else None)
    for title, table in zip(groups, tables, strict=True):
        if title:
            console.print(title, soft_wrap=True)
        console.print(table)
    failed = [run for runs in groups.values() for run in runs if run.error and "failed" in run.state]
    notes = [f"{run.name} failed: {run.error}" for run in failed]
    if left_out:
        notes.append(f"The screen is too narrow for {', '.join(left_out)} (--json has everything).")
    for note in notes:
        console.print(note, soft_wrap=True)
