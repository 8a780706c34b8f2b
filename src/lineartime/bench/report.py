"""The tables of a benchmark, as Markdown in its folder and on the screen."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from rich import box
from rich.table import Column, Table

from lineartime.bench.config import Measure
from lineartime.bench.results import Entry, Results
from lineartime.files import write_file
from lineartime.host import threads_in_words
from lineartime.markdown import markdown_table, three_digits
from lineartime.screen import output_console
from lineartime.units import size

REPORT_FILE = "results.md"
WHAT: dict[Measure, str] = {
    "train": "train: one step, forward and backward",
    "forward": "forward: all positions at once",
    "prefill": "prefill: reading a prompt",
    "decode": "decode: one more token of each stream",
}
LEGEND = {
    "spread": "distance between the quartiles of the rounds",
    "x first": "time over that of the first row of the same length: the median over the rounds",
    "MFU": "model FLOP/s as a share of the peak of matrix products",
    "peak": "memory of a step above the weights (on a CPU, accurate to some MB)",
    "state": "memory of a stream",
    "compile": "time of the first step above the median",
}


@dataclass(frozen=True)
class Section:
    """One table: its title, the names of its columns, and its rows."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def sections(results: Results) -> Iterator[Section]:
    """One table for each measure and precision."""
    groups: dict[tuple[Measure, str], list[Entry]] = {}
    for entry in results.finished:
        groups.setdefault((entry.case.measure, entry.case.dtype), []).append(entry)
    for (measure, dtype), entries in groups.items():
        rows = [_row(results, entry) for entry in entries]
        kept = [name for name in rows[0] if name in ("model", "ms") or any(row[name] for row in rows)]
        table = [tuple(row[name] or "-" for name in kept) for row in rows]
        yield Section(f"{WHAT[measure]}, {dtype}", tuple(kept), table)


def _row(results: Results, entry: Entry) -> dict[str, str]:
    """The cells of an entry by column; empty where there is nothing to show."""
    case, memory = entry.case, entry.memory
    ratio, use = results.ratio_to_first(entry), results.use_of_peak(entry)
    first_column = "position" if case.measure == "decode" else "context"
    return {
        first_column: f"{case.length:,}",
        "batch": f"{case.batch:,}",
        "model": str(entry.subject) + ("*" if entry.alone else ""),
        "ms": entry.problem or ("" if entry.median is None else _milliseconds(entry.median)),
        "spread": "" if entry.spread is None else _milliseconds(entry.spread),
        "tokens/s": "" if entry.tokens_per_second is None else three_digits(entry.tokens_per_second),
        "x first": "" if ratio is None else f"{ratio:.2f}",
        "MFU": "" if use is None else f"{use:.1%}",
        "peak": "" if memory is None else size(memory.peak),
        "state": "" if entry.state_bytes is None else size(entry.state_bytes),
        "compile": "" if entry.compile_seconds is None else f"{entry.compile_seconds:.1f} s",
    }


def write_report(results: Results) -> Path:
    """Write the tables as Markdown."""
    blocks = ["# Benchmark\n", _facts(results)]
    for section in sections(results):
        blocks.append(f"## {section.title[0].upper()}{section.title[1:]}\n\n" + _markdown(section))
    blocks += [_markdown(_models(results)), *_notes(results)]
    return write_file(results.folder / REPORT_FILE, "\n".join(blocks))


def print_results(results: Results) -> None:
    """Print the tables, 100 columns wide if the output is not a terminal."""
    console = output_console(markup=False, width=None if sys.stdout.isatty() else 100)
    for section in sections(results):
        columns = [
            Column(name, justify="left" if name == "model" else "right", no_wrap=name not in ("model", "ms"))
            for name in section.columns
        ]
        table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=section.title, title_justify="left")
        for row, after in zip_longest(section.rows, section.rows[1:]):
            table.add_row(*row, end_section=after is not None and after[0] != row[0])
        console.print(table)
    for note in (*_notes(results), _facts(results)):
        console.print(note.strip(), soft_wrap=True)


def _facts(results: Results) -> str:
    machine = results.machine
    device = machine["gpu"] if machine["device"] == "cuda" else f"{machine['cpu']}, {threads_in_words(machine['threads'])}"
    peaks = ", ".join(
        f"{dtype} {_operations(max(runs))} ({' and '.join(map(_operations, runs))})" for dtype, runs in results.peaks.items()
    )
    lines = [f"machine: {device}, torch {machine['torch']}, Python {machine['python']}", f"started: {results.started}"]
    if results.precision:
        lines.append(f"precision: {results.precision}")
    if peaks:
        lines.append(f"peak of matrix products (measured at the beginning and the end, the larger counts): {peaks}")
    return "\n".join(lines) + "\n"


def _models(results: Results) -> Section:
    """The sizes of the models."""
    weights = {entry.subject.name: entry.memory.weights for entry in results.finished if entry.memory is not None}
    configs = {entry.subject.name: entry.subject.config for entry in results.finished}
    rows: list[tuple[str, ...]] = [
        (name, f"{config.n_blocks} x {config.d_model}", size(weights[name]) if name in weights else "-")
        for name, config in configs.items()
    ]
    return Section("models", ("model", "blocks x width", "weights"), rows)


def _notes(results: Results) -> list[str]:
    used = {name for section in sections(results) for name in section.columns}
    notes = [f"{name}: {meaning}.\n" for name, meaning in LEGEND.items() if name in used]
    if any(entry.alone for entry in results.finished):
        notes.append("*: measured after the others, because all together did not fit into memory.\n")
    wanted = results.options["tokens_per_batch"]
    longer = {e.case.length for e in results.finished if e.case.measure in ("train", "forward") and e.case.length > wanted}
    if longer:
        lengths = ", ".join(f"{length:,}" for length in sorted(longer))
        notes.append(f"Batches have {wanted:,} tokens; with context {lengths}, a batch is one sequence, which has more.\n")
    return notes


def _markdown(section: Section) -> str:
    return markdown_table(section.columns, section.rows, left=section.columns.index("model") + 1)


def _milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value >= 0.01 else f"{value:.1g}"


def _operations(number: float) -> str:
    return f"{number / 1e12:,.1f} TFLOP/s" if number >= 1e12 else f"{number / 1e9:,.1f} GFLOP/s"
