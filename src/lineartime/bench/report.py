"""The report of a benchmark, in Markdown: results.md, which is also what the command prints."""

from collections.abc import Iterator, Sequence

from lineartime.bench.config import Measure
from lineartime.bench.results import Measurement, Results
from lineartime.host import threads_in_words
from lineartime.markdown import NOT_THERE, column_table, three_digits, without_empty
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
    "peak": "memory of a step above the weights (on a CPU, accurate to some MB)",
    "state": "memory of a stream",
    "compile": "time of the first step above the median",
}


def report(results: Results) -> str:
    """The tables, one for each measure and precision, with what one has to know to read them."""
    tables = dict(_tables(results))
    blocks = ["# Benchmark", _facts(results)]
    for title, table in tables.items():
        blocks.append(f"## {title}\n\n{column_table(table, left=list(table).index('model') + 1)}")
    blocks.append(column_table(_models(results)))
    blocks += _notes(results, {name for table in tables.values() for name in table})
    return "\n\n".join(blocks) + "\n"


def _tables(results: Results) -> Iterator[tuple[str, dict[str, Sequence[str]]]]:
    """The titles of the tables, and the cells of their columns by the names of these."""
    for measure, dtype in dict.fromkeys(found.case.kind for found in results.finished):
        rows = [_row(results, found) for found in results.finished if found.case.kind == (measure, dtype)]
        yield f"{TITLES[measure]}, {dtype}", without_empty({name: [row[name] or NOT_THERE for row in rows] for name in rows[0]})


def _row(results: Results, found: Measurement) -> dict[str, str]:
    """The cells of a measurement by column; empty where there is nothing to show."""
    case, memory = found.case, found.memory
    ratio, use = results.ratio_to_first(found), results.use_of_peak(found)
    return {
        "position" if case.measure == "decode" else "context": f"{case.length:,}",
        "batch": f"{case.batch:,}",
        "model": str(found.subject) + ("*" if found.alone else ""),
        "ms": found.problem or ("" if found.median is None else three_digits(1e3 * found.median)),
        "spread": "" if found.spread is None else three_digits(1e3 * found.spread),
        "tokens/s": "" if found.tokens_per_second is None else three_digits(found.tokens_per_second),
        "x first": "" if ratio is None else f"{ratio:.2f}",
        "MFU": "" if use is None else f"{use:.1%}",
        "peak": "" if memory is None else size(memory.peak),
        "state": "" if found.state_bytes is None else size(found.state_bytes),
        "compile": "" if found.compile_seconds is None else f"{found.compile_seconds:.1f} s",
    }


def _models(results: Results) -> dict[str, list[str]]:
    """The sizes of the models, as the columns of a table."""
    weights = {found.subject.name: size(found.memory.weights) for found in results.finished if found.memory is not None}
    configs = {found.subject.name: found.subject.config for found in results.finished}
    return {
        "model": list(configs),
        "blocks x width": [f"{config.n_blocks} x {config.d_model}" for config in configs.values()],
        "weights": [weights.get(name, NOT_THERE) for name in configs],
    }


def _facts(results: Results) -> str:
    machine = results.machine
    device = machine["gpu"] if machine["device"] == "cuda" else f"{machine['cpu']}, {threads_in_words(machine['threads'])}"
    lines = [f"machine: {device}, torch {machine['torch']}, Python {machine['python']}", f"started: {results.started}"]
    if results.precision:
        lines.append(f"precision: {results.precision}")
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
    wanted = results.options["tokens_per_batch"]
    batched = [found.case.length for found in results.finished if found.case.measure in ("train", "forward")]
    if longer := sorted({length for length in batched if length > wanted}):
        lengths = ", ".join(f"{length:,}" for length in longer)
        notes.append(f"Batches have {wanted:,} tokens; with context {lengths}, a batch is one sequence, which has more.")
    return notes
