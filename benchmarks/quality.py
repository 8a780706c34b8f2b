"""The README's table of quality, from what `lineartime reproduce lm` measured: `python benchmarks/quality.py [FOLDER]`.

With the folder of an experiment, its report and pictures are copied to `benchmarks/results/reproduce` first. See its
`report.md` for how all systems were treated alike. `--again` makes the text and pictures of all reports there again, from their
`report.json`.
"""

import argparse
import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from measure import RESULTS, markdown

from lineartime.experiments.config import ReproduceConfig
from lineartime.experiments.plan import make_plan
from lineartime.experiments.report import render

REPORTS = RESULTS / "reproduce"
LANGUAGE_MODELS = REPORTS / "lm-cpu"
DOCUMENTS = RESULTS.parents[1] / "docs"
PICTURES = {"lm-cpu": "quality.png", "latency-cpu": "latency.png"}
"""Those that the documents show."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="of an experiment, with report.json")
    parser.add_argument("--again", action="store_true", help="make report.md and the pictures of all reports again")
    options = parser.parse_args()
    if options.folder is not None:
        copy(options.folder)
    if options.again:
        for file in sorted(REPORTS.glob("*/report.json")):
            render_again(file.parent)
    report = json.loads((LANGUAGE_MODELS / "report.json").read_text())
    table = quality_table(report)
    (RESULTS / "quality.md").write_text(table)
    print(table)


def copy(folder: Path) -> None:
    """Bring the report of an experiment into the repository, without its runs."""
    into = REPORTS / folder.resolve().name
    into.mkdir(parents=True, exist_ok=True)
    for file in (folder / "report.json", folder / "report.md", *sorted(folder.glob("*.png"))):
        shutil.copy(file, into)
    if picture := PICTURES.get(into.name):
        shutil.copy(folder / picture, DOCUMENTS)


def render_again(folder: Path) -> None:
    """Make the text and the pictures of a report again, from its data."""
    report = json.loads((folder / "report.json").read_text())
    with TemporaryDirectory() as place:
        plan = make_plan(ReproduceConfig(report["experiment"], report["scale"], Path(place), **report["options"]))
        plan.folder.mkdir()
        render(plan, report)
        for file in plan.folder.iterdir():
            shutil.copy(file, folder)


def quality_table(report: dict[str, Any]) -> str:
    """Each system's test bits per byte, of all seeds, and its speed-up, in every setting; the paper's beside."""
    settings = [setting for setting in report["settings"] if any(map(measured, setting["rows"]))]
    header = ["model"]
    for setting in settings:
        header += [
            f"{setting['name'][0].upper()}{setting['name'][1:]}: test bits per byte",
            "speed-up",
            "the paper: perplexity (speed-up)",
        ]
    lines = []
    for index, row in enumerate(settings[0]["rows"]):
        rows = [setting["rows"][index] for setting in settings]
        if not any(map(measured, rows)):
            continue
        cells = [f"`{row['name']}`"]
        for each in rows:
            paper = each["paper"]
            cells.append(" / ".join(f"{value:.3f}" for value in measured(each)) or "-")
            cells.append(" / ".join("-" if value is None else f"{value:.2f}" for value in each["speedups"]) or "-")
            speedup = f" ({paper['speedup']:g})" if paper.get("speedup") else ""
            cells.append(f"{paper['pplx']:.2f}{speedup}" if paper.get("pplx") else "-")
        lines.append(cells)
    kept = [place for place in range(len(header)) if any(line[place] != "-" for line in lines)]
    return markdown([header[place] for place in kept], [[line[place] for place in kept] for line in lines])


def measured(row: dict[str, Any]) -> list[float]:
    """The test bits per byte of all seeds that have ended."""
    return [test["bits_per_byte"] for run in row["runs"] for test in run["tests"] if test["name"] == ""]


if __name__ == "__main__":
    main()
