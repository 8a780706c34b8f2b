"""Draw docs/quality.png, and print what the README says of it: `python benchmarks/quality.py [FOLDER]`.

The numbers come from the reports of `SHOWN` in `benchmarks/results/reproduce`. With the folder of an experiment, its report is
copied there first, and its table is printed, for docs/results.md.
"""

import argparse
import json
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

from measure import RESULTS

from lineartime.plots import Curve, Panel, draw_panels, looks_of, save_figure
from lineartime.units import markdown_table

REPORTS = RESULTS / "reproduce"
DOCUMENTS = RESULTS.parents[1] / "docs"

SHOWN = {
    "lm-cpu-600s-wikipedia-512": "Wikipedia, 512 tokens",
    "lm-cpu-600s-wikipedia-2048-fp32": "Wikipedia, 2,048 tokens",
    "lm-cpu-600s-books": "books, 4,096 tokens",
}
"""The reports that the README shows, each of one setting."""
MODELS = ("flash", "flash-next", "flash-quad", "transformer++")
BASELINE = "transformer++"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="of an experiment, with report.json")
    folder = parser.parse_args().folder
    if folder is not None:
        copy(folder)
        print(test_table(folder.resolve().name, json.loads((folder / "report.json").read_text())))
    draw()
    print(readme_sentence())


def copy(folder: Path) -> None:
    """Copy the report of an experiment, and its numbers if the README shows them."""
    into = REPORTS / folder.resolve().name
    into.mkdir(parents=True, exist_ok=True)
    if into.name in SHOWN:
        shutil.copy(folder / "report.json", into)
    text = (folder / "report.md").read_text()
    (into / "report.md").write_text(re.sub(r"^!\[.*\]\(\w+\.png\)\n\n", "", text, flags=re.MULTILINE))


def systems(name: str) -> dict[str, dict[str, Any]]:
    """What a report of the README says of each system."""
    return {row["name"]: row for row in begun(json.loads((REPORTS / name / "report.json").read_text()))[0]["rows"]}


def begun(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings of a report in which a system has been trained and tested."""
    return [setting for setting in report["settings"] if any(tested(row) for row in setting["rows"] if "runs" in row)]


def tested(row: dict[str, Any]) -> list[str]:
    """The test bits per byte of all finished seeds; for masked tokens, which have none, nats per token."""
    tests = [test for run in row["runs"] for test in run["tests"] if test["name"] == ""]
    return [f"{test['loss'] if test['bits_per_byte'] is None else test['bits_per_byte']:.3f}" for test in tests]


def readme_sentence() -> str:
    """By how much `flash` and `flash-next` are below `BASELINE` in the three settings of the README, in per cent."""
    below: dict[str, list[float]] = {"flash": [], "flash-next": []}
    for rows in map(systems, SHOWN):
        means = {model: statistics.mean(map(float, tested(rows[model]))) for model in (*below, BASELINE)}
        for model, found in below.items():
            found.append(100 * (1 - means[model] / means[BASELINE]))
    (least, most), (of_next, most_of_next) = ((min(found), max(found)) for found in below.values())
    return (
        f"{least:.0f} to {most:.0f} % below Transformer++, and `flash-next`, our variant, {of_next:.0f} to {most_of_next:.0f} %"
    )


def test_table(name: str, report: dict[str, Any]) -> str:
    """The test losses of an experiment, of all seeds: a row for each setting, a column for each system."""
    settings = begun(report)
    models = list(dict.fromkeys(row["name"] for setting in settings for row in setting["rows"] if tested(row)))
    lines = []
    for setting in settings:
        cells = {row["name"]: " / ".join(tested(row)) or "-" for row in setting["rows"]}
        lines.append([setting["name"], *(cells.get(model, "-") for model in models)])
    return markdown_table([f"`{name}`", *models], lines)


def draw() -> None:
    """Draw the curves of `MODELS`: held-out bits per byte by seconds of training."""
    panels = []
    for name, title in SHOWN.items():
        rows = systems(name)
        final = rows[BASELINE]["runs"][0]["bits_per_byte"]
        lowest = min(run["bits_per_byte"] for model in MODELS for run in rows[model]["runs"])
        limits = (lowest - 0.04, final + 0.45)
        panels.append(Panel(title, "seconds of training", "held-out bits per byte", y_limits=limits, level=final))
        for model in MODELS:
            for run in rows[model]["runs"]:
                _, seconds, _, bits, *_ = zip(*run["curve"], strict=True)
                panels[-1].curves.append(Curve(model, seconds, bits, thin=run["seed"] != 0))
    save_figure(draw_panels(panels, looks_of(MODELS)), DOCUMENTS / "quality.png", 110)


if __name__ == "__main__":
    main()
