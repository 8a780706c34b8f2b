"""The report of an experiment, complete or not: report.json, report.md and pictures."""

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lineartime.errors import LineartimeError
from lineartime.experiments.collect import collect
from lineartime.experiments.config import ReproduceConfig
from lineartime.experiments.folder import PLAN_FILE, plan_options
from lineartime.experiments.paper import DESCRIPTIONS
from lineartime.experiments.pictures import draw_pictures
from lineartime.experiments.plan import Plan, with_defaults
from lineartime.experiments.report_data import Report, settings_with_results
from lineartime.experiments.tables import (
    latency_tables,
    memory_tables,
    pairs_table,
    positions_tables,
    quality_tables,
    tests_tables,
)
from lineartime.experiments.treatment import equal_treatment, parameters_apart
from lineartime.files import write_file
from lineartime.models.registering import imported_names

JSON_FILE, MARKDOWN_FILE = "report.json", "report.md"
LATENCY = (
    "All systems take turns in each measurement, with the same tokens in a step. A step is forward and backward, without the "
    "optimiser. The paper's times are of whole steps on other machines, so only their ratios compare."
)
MEMORY = (
    "All runs of a task and a seed train on the same texts, {batch:,} tokens in a step, and each text is read once. *accuracy* "
    "is the share of right answers in texts that are the same for all; of several rates, the best one of a system is shown. "
    "*steps to 95%*, where a system got there, are those of the first evaluation with so many right answers. *state* is of one "
    "stream after a text, in float32. Times are of this machine, whatever else it did; a step is whole, with the optimiser. On "
    "a CPU, one function in C++ decodes a token of a stack of FLASH, and operations of PyTorch those of all others."
)


def write_report(plan: Plan) -> tuple[Path, Report, list[str]]:
    """Write the report of the existing results. Return its file, its data, and a sentence for each missing picture.

    Raises LineartimeError if the folder has no runs or cannot be written.
    """
    if not (plan.folder / PLAN_FILE).exists():
        raise LineartimeError(
            f"{plan.folder} has no runs of {plan.config.name} at the scale {plan.config.scale}: run it first."
        )
    report = collect(plan)
    write_file(plan.folder / JSON_FILE, json.dumps(report, indent=1) + "\n")
    file, notes = render(plan, report)
    return file, report, notes


def render(plan: Plan, report: Report) -> tuple[Path, list[str]]:
    """Write the text and the pictures of a report from its data. Return the file, and a sentence for each missing picture."""
    notes: list[str] = []
    try:
        pictures = draw_pictures(plan, report)
    except LineartimeError as error:
        pictures, notes = [], [f"no pictures: {error}"]
    file = plan.folder / MARKDOWN_FILE
    return write_file(file, "\n\n".join(_blocks(plan, report, pictures)) + "\n"), notes


def _blocks(plan: Plan, report: Report, pictures: Sequence[tuple[Path, str]]) -> Iterator[str]:
    yield f"# {report['title']}"
    yield report["question"]
    yield _facts(plan, report)
    if not report["complete"]:
        yield _incomplete(report)
    for picture, caption in pictures:
        yield f"![{caption}]({picture.name})\n\n{caption}"
    if plan.experiment.kind == "memory":
        yield from memory_tables(report)
        yield MEMORY.format(batch=plan.scale.tokens_per_batch)
        yield parameters_apart(report)
        return
    if plan.experiment.kind == "quality":
        yield from quality_tables(plan, report)
        yield _legend(plan)
        yield from positions_tables(report)
        yield from tests_tables(plan, report)
        yield from pairs_table(plan, report)
        yield from equal_treatment(plan, report)
    else:
        yield from latency_tables(report)
        yield LATENCY
        yield parameters_apart(report)
    tables = "; ".join(DESCRIPTIONS[name] for name in plan.experiment.paper_tables)
    yield f"The paper: {report['paper']}{f' ({tables})' if tables else ''}."


def _facts(plan: Plan, report: Report) -> str:
    lines = [
        f"- experiment `{report['experiment']}`, scale `{report['scale']}`: {plan.scale.description}",
        f"- command: `{_command(plan, report['options'])}`",
    ]
    if report["started"]:
        lines.append(f"- runs started from {report['started'][0]} to {report['started'][1]}")
    lines += [f"- machine: {machine}" for machine in report["machines"]]
    if precisions := report.get("precisions"):  # reports of earlier versions do not hold them
        lines.append(f"- precision of matrix products: {' and '.join(precisions)}")
    labels = {setting["label"] for setting in settings_with_results(report)}
    lines += [f"- text of {label}: {text}" for label, text in report["texts"].items() if label in labels]
    if plan.config.scale == "trial":
        lines.append("- **a trial**: toy models trained for seconds, to see that everything works; the numbers mean nothing")
    return "\n".join(lines)


def _command(plan: Plan, options: dict[str, Any]) -> str:
    """The command that makes these runs, with file names of texts in place of paths. It may have run in several parts."""
    usual: dict[str, Any] = plan_options(with_defaults(ReproduceConfig(plan.config.name, plan.config.scale)))
    words = ["lineartime", "reproduce", plan.config.name, "--scale", plan.config.scale]
    for name, value in options.items():
        if value is not None and json.dumps(value) != json.dumps(usual.get(name)):
            values = value if isinstance(value, (list, tuple)) else [value]
            words += [f"--{name}", *(f"{each:g}" if isinstance(each, float) else str(each) for each in values)]
    return shlex.join([*words, *(word for name in imported_names() for word in ("--import", Path(name).name))])


def _incomplete(report: Report) -> str:
    lines = ["**Not complete.**"]
    if report["missing"]:
        shown = ", ".join(f"`{name}`" for name in report["missing"][:8])
        more = f", and {len(report['missing']) - 8} more (see {JSON_FILE})" if len(report["missing"]) > 8 else ""
        lines.append(f"Missing runs: {shown}{more}.")
    lines += [f"{problem.rstrip('.')}." for problem in report["problems"]]
    if report["missing"]:
        lines.append("Settings and systems of which nothing has run are left out of the tables of quality.")
    return "\n\n".join(lines)


def _legend(plan: Plan) -> str:
    """What the columns of the tables of quality mean."""
    base = plan.experiment.baseline
    per = "masked token" if plan.experiment.task == "mlm" else "byte"
    return "\n".join(
        [
            "- Of two or three seeds, all values are shown; of more, the mean ± the standard deviation, and their number.",
            f"- Losses per {per} are on text that was not trained on: *held-out* text, on which the curves and the tuned rates "
            "are measured, and the *test* split, measured once at the end.",
            f"- *loss against the baseline*: the held-out loss over that of {base}, less one; for the paper, the same of the "
            "logarithms of its perplexities. It compares across tokenizers and sizes better than losses do. "
            "Like the speed-up, it is over the seeds that both have.",
            f"- *speed-up*, as the paper defines it: the time in which {base} reaches its final quality, over the time in "
            "which this system reaches it; of the same seed, and of training alone. A learning rate is scheduled for the whole "
            "run, so a shorter run could reach that quality sooner.",
        ]
    )
