"""Write the tables and the picture of quality for README.md and docs/results.md: `python benchmarks/quality.py [FOLDER]`.

The numbers come from the reports of `lineartime reproduce` in `benchmarks/results/reproduce`. With the folder of an experiment,
its report is copied there first.
"""

import argparse
import json
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

from measure import RESULTS

from lineartime.markdown import markdown_table

REPORTS = RESULTS / "reproduce"
DOCUMENTS = RESULTS.parents[1] / "docs"

LANGUAGE_MODELS = {
    "lm-cpu-600s-wikipedia-512": "Wikipedia, 512, bf16",
    "lm-cpu-600s-wikipedia-512-fp32": "Wikipedia, 512, fp32",
    "lm-cpu-600s-wikipedia-2048-bf16": "Wikipedia, 2,048, bf16",
    "lm-cpu-600s-wikipedia-2048-bf16-second": "Wikipedia, 2,048, bf16, slower machine",
    "lm-cpu-600s-wikipedia-2048-fp32": "Wikipedia, 2,048, fp32",
    "lm-cpu-600s-books": "books, 4,096, bf16",
    "lm-cpu-600s-books-fp32": "books, 4,096, fp32",
    "lm-cpu-3600s": "Wikipedia, 2,048, fp32, an hour",
}
"""The reports of `lm`, each of one setting: its text, the tokens of its context and the precision."""
SHOWN = {
    "lm-cpu-600s-wikipedia-512": "Wikipedia, 512 tokens",
    "lm-cpu-600s-wikipedia-2048-fp32": "Wikipedia, 2,048 tokens",
    "lm-cpu-600s-books": "books, 4,096 tokens",
}
"""Those that the README shows, of `MODELS`."""
MODELS = ("flash", "flash-next", "flash-quad", "transformer++")
BASELINE = "transformer++"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="of an experiment, with report.json")
    folder = parser.parse_args().folder
    if folder is not None:
        copy(folder)
    reports = {file.parent.name: json.loads(file.read_text()) for file in sorted(REPORTS.glob("*/report.json"))}
    tables = [
        language_model_table("test bits per byte", reports, tested),
        language_model_table("speed-up", reports, speedups),
        *[test_table(name, report) for name, report in reports.items() if name not in LANGUAGE_MODELS and in_bits(report)],
    ]
    (RESULTS / "quality.md").write_text(readme_table(reports))
    (RESULTS / "experiments.md").write_text("\n".join(tables))
    draw(reports)
    print(readme_table(reports), *tables, sep="\n")


def copy(folder: Path) -> None:
    """Copy the report of an experiment into the repository, and the picture of `latency` into the documents."""
    into = REPORTS / folder.resolve().name
    into.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / "report.json", into)
    text = (folder / "report.md").read_text()
    (into / "report.md").write_text(re.sub(r"^!\[.*\]\(\w+\.png\)\n\n", "", text, flags=re.MULTILINE))
    if (folder / "latency.png").exists():
        shutil.copy(folder / "latency.png", DOCUMENTS)


def begun(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings of a report in which a system has been trained and tested."""
    return [setting for setting in report["settings"] if any(tested(row) for row in setting["rows"] if "runs" in row)]


def in_bits(report: dict[str, Any]) -> bool:
    """Whether a report compares losses of text: not the times of `latency`, nor the answers of `memory`."""
    return report["experiment"] != "memory" and bool(begun(report))


def tested(row: dict[str, Any]) -> list[str]:
    """The test bits per byte of all finished seeds; for masked tokens, which have none, nats per token."""
    tests = [test for run in row["runs"] for test in run["tests"] if test["name"] == ""]
    return [f"{test['loss'] if test['bits_per_byte'] is None else test['bits_per_byte']:.3f}" for test in tests]


def speedups(row: dict[str, Any]) -> list[str]:
    """The time in which the baseline reaches its final quality, over that of a system, of all finished seeds."""
    finished = row["speedups"][: len(tested(row))]
    return ["not reached" if value is None else f"{value:.2f}" for value in finished]


def readme_table(reports: dict[str, Any]) -> str:
    """The means over seeds of `MODELS` in the three contexts of the README."""
    settings = [{row["name"]: row for row in begun(reports[name])[0]["rows"]} for name in SHOWN]
    lines = []
    for model in MODELS:
        cells = []
        for row in (rows[model] for rows in settings):
            bits = statistics.mean(map(float, tested(row)))
            reached = None not in row["speedups"]
            speedup = f"{statistics.mean(row['speedups']):.2f} x" if reached else "not reached"
            cells.append(f"{bits:.3f} ({speedup})")
        lines.append([f"`{model}`", *cells])
    return markdown_table(["test bits per byte (speed-up)", *SHOWN.values()], lines)


def language_model_table(title: str, reports: dict[str, Any], cell: Any) -> str:
    """A row for each system, a column for each report of `lm`; the values of all seeds."""
    columns = [{row["name"]: cell(row) for row in begun(reports[name])[0]["rows"]} for name in LANGUAGE_MODELS]
    names = dict.fromkeys(name for column in columns for name in column)
    lines = [[f"`{name}`", *(" / ".join(column.get(name, [])) or "-" for column in columns)] for name in names]
    if cell is speedups:
        lines = [line for line in lines if line[0] != f"`{BASELINE}`"]
    lines = [line for line in lines if re.search(r"\d", "".join(line[1:]))]  # those with a number
    return markdown_table([title, *LANGUAGE_MODELS.values()], lines)


def test_table(name: str, report: dict[str, Any]) -> str:
    """The test bits per byte of an experiment, of all seeds: a row for each setting, a column for each model.

    Models with long names, which set options at places of a pattern, have the rows.
    """
    settings = begun(report)
    models = [row["name"] for row in settings[0]["rows"] if tested(row)]
    lines = []
    for setting in settings:
        cells = {row["name"]: " / ".join(tested(row)) or "-" for row in setting["rows"]}
        lines.append([setting["name"], *(cells[model] for model in models)])
    if not any("pattern" in model for model in models):
        return markdown_table([f"`{name}`", *models], lines)
    header, *columns = ([f"`{x}`" for x in (name, *models)], *lines)
    rows = [list(row) for row in zip(header, *columns, strict=True)]
    return markdown_table(rows[0], rows[1:])


def draw(reports: dict[str, Any]) -> None:
    """Draw the curves of `MODELS` for the README: held-out bits per byte by seconds of training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(1, len(SHOWN)), SHOWN.items(), strict=True):
        rows = {row["name"]: row for row in begun(reports[name])[0]["rows"]}
        for model, colour in zip(MODELS, ("C0", "C1", "C2", "C3"), strict=True):
            for run in rows[model]["runs"]:
                _, seconds, _, bits = zip(*run["curve"], strict=True)
                first = run["seed"] == 0
                axes.plot(seconds, bits, color=colour, linewidth=2 if first else 0.8, label=model if first else None)
        final = rows[BASELINE]["runs"][0]["bits_per_byte"]
        axes.axhline(final, color="C3", linestyle=":", linewidth=1)
        lowest = min(run["bits_per_byte"] for model in MODELS for run in rows[model]["runs"])
        axes.set(xlim=(60, 620), ylim=(lowest - 0.04, final + 0.45), title=title, xlabel="seconds of training")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("held-out bits per byte")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(MODELS), frameon=False)
    figure.savefig(DOCUMENTS / "quality.png", dpi=110)


if __name__ == "__main__":
    main()
