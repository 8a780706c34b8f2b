"""The report of a benchmark, in Markdown: results.md, which is also what the command prints."""

from collections.abc import Iterator, Sequence

from lineartime.bench.config import Measure
from lineartime.bench.results import Entry, Results
from lineartime.host import threads_in_words
from lineartime.markdown import NOT_THERE, cell, column_table, three_digits, without_empty
from lineartime.units import size

REPORT_FILE = "results.md"
TITLES: dict[Measure, str] = {
    "train": "Train: one step, forward and backward",
    "forward": "Forward: all positions at once",
    "prefill": "Prefill: reading a prompt",
    "decode": "Decode: one more token of each stream",
}
LEGEND = {
    "spread": "distance between the quartiles of the rounds",
    "x first": "time over that of the first row of the same length: the median over the rounds",
    "MFU": "model FLOP/s as a share of the peak of matrix products",
    "peak": "memory of a step above the weights",
    "state": "memory of a stream",
    "compile": "time of the first step above the median",
}


def report(results: Results) -> str:
    """The tables, one for each measure and precision, with what one has to know to read them."""
    tables = dict(_tables(results))
    blocks = ["# Benchmark", _facts(results)]
    for title, table in tables.items():
        blocks.append(f"## {title}\n\n{column_table(table, left=3)}")
    blocks.append(column_table(_models(results)))
    blocks += _notes(results, {name for table in tables.values() for name in table})
    return "\n\n".join(blocks) + "\n"


def _tables(results: Results) -> Iterator[tuple[str, dict[str, Sequence[str]]]]:
    """The titles of the tables, and the cells of their columns by the names of these."""
    for measure, dtype in dict.fromkeys((found.measure, found.dtype) for found in results.finished):
        rows = [_row(found) for found in results.finished if (found.measure, found.dtype) == (measure, dtype)]
        yield f"{TITLES[measure]}, {dtype}", without_empty({name: [row[name] for row in rows] for name in rows[0]})


def _row(found: Entry) -> dict[str, str]:
    """The cells of an entry by column."""
    return {
        "position" if found.measure == "decode" else "context": f"{found.length:,}",
        "batch": f"{found.batch:,}",
        "model": found.label + ("*" if found.alone else ""),
        "ms": found.problem or cell(found.median_seconds, three_digits, 1e3),
        "spread": cell(found.spread_seconds, three_digits, 1e3),
        "tokens/s": cell(found.tokens_per_second, three_digits),
        "x first": cell(found.ratio_to_first, ".2f"),
        "MFU": cell(found.use_of_peak, ".1%"),
        "peak": cell(found.peak_bytes, size),
        "state": cell(found.state_bytes, size),
        "compile": cell(found.compile_seconds, ".1f", unit=" s"),
    }


def _models(results: Results) -> dict[str, list[str]]:
    """The sizes of the models, as the columns of a table."""
    weights = {found.subject: size(found.weights_bytes) for found in results.finished if found.weights_bytes is not None}
    configs = {each.name: each.config for each in results.benchmark.subjects}
    names = list(dict.fromkeys(found.subject for found in results.finished))
    return {
        "model": names,
        "blocks x width": [f"{configs[name].n_blocks} x {configs[name].d_model}" for name in names],
        "weights": [weights.get(name, NOT_THERE) for name in names],
    }


def _facts(results: Results) -> str:
    machine = results.machine
    device = machine["gpu"] if machine["device"] == "cuda" else f"{machine['cpu']}, {threads_in_words(machine['threads'])}"
    lines = [f"machine: {device}, torch {machine['torch']}, Python {machine['python']}", f"started: {results.started}"]
    if results.benchmark.precision:
        lines.append(f"precision: {results.benchmark.precision}")
    for dtype, runs in results.peaks.items():
        operations = " and ".join(f"{run / 1e9:,.1f}" for run in runs)
        lines.append(
            f"peak of matrix products in {dtype}: {operations} GFLOP/s at the beginning and the end; the larger counts"
        )
    return "\n".join(f"- {line}" for line in lines)


def _notes(results: Results, columns: set[str]) -> list[str]:
    notes = [f"{name}: {meaning}." for name, meaning in LEGEND.items() if name in columns]
    if any(found.alone for found in results.finished):
        notes.append("\\*: measured after the others, because all together did not fit into memory.")
    if results.options.get("memory") and results.benchmark.device.type != "cuda":
        notes.append("The memory of steps is measured on a GPU alone.")
    wanted = results.options["tokens_per_batch"]
    batched = [found.length for found in results.finished if found.measure in ("train", "forward")]
    if longer := sorted({length for length in batched if length > wanted}):
        lengths = ", ".join(f"{length:,}" for length in longer)
        notes.append(f"Batches have {wanted:,} tokens; with context {lengths}, a batch is one sequence, which has more.")
    return notes
