"""The results of a benchmark: results.json, which is replaced as a whole after every case, results.md and plots."""

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from lineartime.bench.config import RESULTS_FILE, Dtype, Measure, Mode
from lineartime.bench.measure import median_and_spread
from lineartime.bench.subjects import Benchmark, Case
from lineartime.fields import AtLeastOne, Count
from lineartime.files import write_file
from lineartime.host import installed_version, processor_name, threads_in_words
from lineartime.plots import Panel, draw_panels, looks_of, save_figure
from lineartime.units import NOT_THERE, cell, column_table, size, three_digits, without_empty

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


@dataclass(kw_only=True)
class Entry:
    """What was measured of one subject in one case: an entry of results.json. `Results.save` adds what follows from others."""

    measure: Measure
    length: Count  # tokens of the context, or the position for decode
    dtype: Dtype
    batch: Count  # sequences, or streams
    tokens: AtLeastOne  # of one step
    subject: str  # the name of the preset or the peer
    mode: Mode
    problem: str | None = None  # why there are no numbers: "out of memory", or what failed
    alone: bool = False  # whether it was measured after the others, because they did not all fit into memory together
    seconds: tuple[float, ...] = ()  # per step, one value for each round
    calls: Count = 1  # the number of steps that each of these values averages
    median_seconds: float | None = None
    spread_seconds: float | None = None  # the interquartile range
    tokens_per_second: float | None = None  # of all sequences together
    ratio_to_first: float | None = None  # to the first subject of the case: the median over the rounds that both have
    flops_per_token: float | None = None  # of the model, for train including the backward pass; None if unknown
    use_of_peak: float | None = None  # the FLOP/s of the model as a share of the highest measured peak of matrix products
    peak_bytes: Count | None = None  # the most memory that a step holds above the weights, including gradients
    weights_bytes: Count | None = None  # all parameters
    gradients_bytes: Count | None = None  # the gradients that a step leaves
    state_bytes: Count | None = None  # of the state of a stream, for decode
    first_seconds: float | None = None  # of the very first step, which compiles
    compile_seconds: float | None = None  # by how much the first step of a compiled model exceeds the median

    @property
    def case(self) -> Case:
        """What is compared with each other."""
        return Case(self.measure, self.length, self.dtype, self.batch)

    @property
    def microseconds_per_token(self) -> float | None:
        """The median time of a token in a step."""
        return None if self.median_seconds is None else 1e6 * self.median_seconds / self.tokens

    @property
    def milliseconds(self) -> float | None:
        """The median time of a step."""
        return None if self.median_seconds is None else 1e3 * self.median_seconds

    @property
    def label(self) -> str:
        """The subject and its mode, unless that is eager."""
        return self.subject if self.mode == "eager" else f"{self.subject} {self.mode}"


class Results:
    """All entries of a benchmark, the machine they were made on and the peaks they are compared with."""

    def __init__(self, folder: Path, options: dict[str, Any], benchmark: Benchmark) -> None:
        self.folder = folder
        self.options = options
        self.benchmark = benchmark
        self.machine = describe_machine(benchmark.device)
        self.started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.entries: list[Entry] = []
        self.peaks: dict[str, list[float]] = {}

    @property
    def finished(self) -> list[Entry]:
        """The entries with timings or a problem."""
        return [found for found in self.entries if found.seconds or found.problem]

    def save(self) -> Path:
        """Complete the entries, and write results.json."""
        finished = self.finished
        for found in finished:
            if found.seconds:
                self._complete(found, next(other for other in finished if other.case == found.case))
        measured = {found.label for found in finished}
        content = {
            "options": self.options,
            "precision": self.benchmark.precision,
            "machine": self.machine,
            "started": self.started,
            "lineartime": installed_version("lineartime"),
            "peak_flops": {dtype: {"runs": runs, "taken": max(runs)} for dtype, runs in self.peaks.items()},
            "subjects": [each.to_dict() for each in self.benchmark.subjects if str(each) in measured],
            "entries": [asdict(found) for found in finished],
        }
        return write_file(self.folder / RESULTS_FILE, json.dumps(content, indent=1) + "\n")

    def _complete(self, found: Entry, first: Entry) -> None:
        """Add what follows from the seconds of an entry, of the first one of its case, and from the peaks."""
        found.median_seconds, found.spread_seconds = median_and_spread(found.seconds)
        found.tokens_per_second = found.tokens / found.median_seconds
        if first.seconds and not (found.alone or first.alone):
            ratios = [own / other for own, other in zip(found.seconds, first.seconds, strict=False)]
            found.ratio_to_first = statistics.median(ratios)
        if found.flops_per_token is not None and (peaks := self.peaks.get(found.dtype)):
            found.use_of_peak = found.flops_per_token * found.tokens_per_second / max(peaks)
        if found.mode != "eager" and found.first_seconds is not None:
            found.compile_seconds = max(0.0, found.first_seconds - found.median_seconds)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The properties of the machine that the numbers depend on."""
    products = (torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn).matmul.fp32_precision
    facts: dict[str, Any] = {
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device.type,
        "fp32_products": "highest" if products in ("none", "ieee") else products,
    }
    if device.type == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, "triton": installed_version("triton")}
    return facts


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
    """The columns of a table of the sizes of the models."""
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
    return notes


def draw_plots(results: Results) -> list[Path]:
    """Draw latency.png, memory.png and decode.png, except those without data, and return the files.

    Raises LineartimeError if matplotlib is missing, or a file cannot be written.
    """
    streams = [found for found in results.finished if found.measure == "decode"]
    batches = [found for found in results.finished if found.measure != "decode"]
    figures = {
        "latency": _by_length(batches, "tokens of context", "µs per token", lambda found: found.microseconds_per_token),
        "memory": _by_length(
            [found for found in batches if not found.problem],
            "tokens of context",
            "MB of a step, above the weights",
            lambda found: None if found.peak_bytes is None else max(found.peak_bytes, 1) / 1e6,
        ),
        "decode": _by_length(streams, "tokens read before", "ms per token", lambda found: found.milliseconds),
    }
    return [save_figure(figure, results.folder / f"{name}.png", 130) for name, figure in figures.items() if figure is not None]


def _by_length(entries: Sequence[Entry], x: str, y: str, value: Callable[[Entry], float | None]) -> Any:
    """Curves by length: a panel for each measure and precision. None if there are no values."""
    panels: dict[tuple[Measure, Dtype], Panel] = {}
    for found in entries:
        if (number := value(found)) is not None:
            panel = panels.setdefault((found.measure, found.dtype), Panel(f"{found.measure}, {found.dtype}", y))
            panel.add(found.label, found.length, number)
    measures = dict.fromkeys(measure for measure, _ in panels)
    dtypes = dict.fromkeys(dtype for _, dtype in panels)
    shown = [panels[measure, dtype] for dtype in dtypes for measure in measures if (measure, dtype) in panels]
    looks = looks_of(found.label for found in entries)
    return draw_panels(shown, x, looks, columns=len(measures) if len(measures) > 1 else None, log=True, share_y=True)
