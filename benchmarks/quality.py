"""Write the tables of quality for the README and docs/experiments.md: `python benchmarks/quality.py [FOLDER]`.

The numbers come from the reports of `lineartime reproduce` in `benchmarks/results/reproduce`. With the folder of an experiment,
its report and pictures are copied there first. `--again` makes the text and pictures of all reports there again, from their
`report.json`. A report describes how all systems were treated alike.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from measure import RESULTS

from lineartime.experiments.catalogue import EXPERIMENTS
from lineartime.experiments.collect import add_relative_losses
from lineartime.experiments.config import ReproduceConfig
from lineartime.experiments.pictures import draw_pictures
from lineartime.experiments.plan import Plan, make_plan
from lineartime.experiments.report import render
from lineartime.experiments.report_data import QualityReport, QualitySetting, SystemRow
from lineartime.markdown import markdown_table

REPORTS = RESULTS / "reproduce"
LANGUAGE_MODELS = ("lm-cpu-600s-wikipedia-512", "lm-cpu-600s-wikipedia-2048-fp32", "lm-cpu-600s-books")
"""The reports that the README shows: a setting of `lm` each."""
OFF_SCALE = ("performer",)
"""Systems whose losses are so high that the curves of all others would lie together."""
DOCUMENTS = RESULTS.parents[1] / "docs"
PICTURES = {"latency-cpu": "latency.png"}
"""The pictures of single reports that the documents show."""
LOST_ITS_SHIFT = "2026-11-24T16"
NAMES_BEFORE = {"flash-next": "flash-next, token shift", "flash-next, no token shift": "flash-next"}
"""What reports from before that hour call models: `flash-next` had a token shift then."""


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
    reports = {file.parent.name: json.loads(file.read_text()) for file in sorted(REPORTS.glob("*/report.json"))}
    language_models = together([reports[name] for name in LANGUAGE_MODELS])
    table = quality_table(language_models)
    (RESULTS / "quality.md").write_text(table)
    draw_quality(language_models)
    tables = [test_table(name, report) for name, report in reports.items() if any(map(has_begun, report["settings"]))]
    (RESULTS / "experiments.md").write_text("\n".join(tables))
    print(table, *tables, sep="\n")


def together(reports: list[QualityReport]) -> QualityReport:
    """A report of the settings of several, each of which has run in one of them."""
    settings = [setting for report in reports for setting in report["settings"] if has_begun(setting)]
    return QualityReport({**reports[0], "settings": settings})


def draw_quality(report: QualityReport) -> None:
    """Draw the curves of a report for the README, without those of `OFF_SCALE`."""
    settings = [
        QualitySetting({**setting, "rows": [row for row in setting["rows"] if row["name"] not in OFF_SCALE]})
        for setting in report["settings"]
    ]
    with plan_of(report) as plan:
        draw_pictures(plan, QualityReport({**report, "settings": settings}))
        shutil.copy(plan.folder / "quality.png", DOCUMENTS)


@contextmanager
def plan_of(report: QualityReport) -> Iterator[Plan]:
    """The plan of a report, with a folder that exists for a while."""
    with TemporaryDirectory() as place:
        plan = make_plan(ReproduceConfig(report["experiment"], report["scale"], Path(place), **report["options"]))
        plan.folder.mkdir()
        yield plan


def copy(folder: Path) -> None:
    """Copy the report of an experiment into the repository, without its runs."""
    into = REPORTS / folder.resolve().name
    into.mkdir(parents=True, exist_ok=True)
    for file in (folder / "report.json", folder / "report.md", *sorted(folder.glob("*.png"))):
        shutil.copy(file, into)
    if picture := PICTURES.get(into.name):
        shutil.copy(folder / picture, DOCUMENTS)


def render_again(folder: Path) -> None:
    """Regenerate the text and the pictures of a report from its data, with today's comparisons of the runs."""
    report = json.loads((folder / "report.json").read_text())
    with plan_of(report) as plan:
        if plan.experiment.kind == "quality":
            for setting in report["settings"]:
                add_relative_losses(plan, setting["rows"])
            (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        render(plan, report)
        for file in plan.folder.iterdir():
            shutil.copy(file, folder)


def quality_table(report: QualityReport) -> str:
    """Each system's test bits per byte for all seeds, and its speed-up, in every setting, beside the paper's numbers."""
    settings = [setting for setting in report["settings"] if any(map(measured, setting["rows"]))]
    header = ["model"]
    for setting in settings:
        header += [
            f"{setting['name'][0].upper()}{setting['name'][1:]}: test bits per byte",
            "speed-up",
            "the paper: perplexity (speed-up)",
        ]
    by_name = [{name_today(report, row): row for row in setting["rows"] if measured(row)} for setting in settings]
    lines = []
    for name in sorted({name for rows in by_name for name in rows}, key=[arm.name for arm in EXPERIMENTS["lm"].arms].index):
        cells = [f"`{name}`"]
        for row in (rows.get(name) for rows in by_name):
            if row is None:
                cells += ["-"] * 3
                continue
            paper = row["paper"]
            cells.append(" / ".join(f"{value:.3f}" for value in measured(row)))
            cells.append(" / ".join("not reached" if value is None else f"{value:.2f}" for value in row["speedups"]) or "-")
            speedup = f" ({paper['speedup']:g})" if paper.get("speedup") else ""
            cells.append(f"{paper['pplx']:.2f}{speedup}" if paper.get("pplx") else "-")
        lines.append(cells)
    kept = [place for place in range(len(header)) if any(line[place] != "-" for line in lines)]
    return markdown_table([header[place] for place in kept], [[line[place] for place in kept] for line in lines])


def name_today(report: QualityReport, row: SystemRow) -> str:
    """The name that the model of a row has in the catalogue today."""
    name: str = row["name"]
    return NAMES_BEFORE.get(name, name) if report["started"][0] < LOST_ITS_SHIFT else name


def has_begun(setting: QualitySetting) -> bool:
    """Whether any system of a setting has been trained and tested."""
    return any("runs" in row and measured(row) for row in setting["rows"])


def test_table(name: str, report: QualityReport) -> str:
    """The test bits per byte of an experiment, of all seeds: a row for each system, a column for each setting."""
    settings = list(filter(has_begun, report["settings"]))
    lines = []
    for index, row in enumerate(settings[0]["rows"]):
        cells = [" / ".join(f"{bits:.3f}" for bits in measured(setting["rows"][index])) or "-" for setting in settings]
        if set(cells) != {"-"}:
            lines.append([name_today(report, row), *cells])
    return markdown_table([f"`{name}`", *(setting["name"] for setting in settings)], lines)


def measured(row: SystemRow) -> list[float]:
    """The test bits per byte of all finished seeds; for masked tokens, which have none, nats per token."""
    tests = [test for run in row["runs"] for test in run["tests"] if test["name"] == ""]
    return [test["loss"] if test["bits_per_byte"] is None else test["bits_per_byte"] for test in tests]


if __name__ == "__main__":
    main()
