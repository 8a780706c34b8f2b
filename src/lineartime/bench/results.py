"""The results of a benchmark: results.json and results.md, which are replaced as a whole after every case, and plots."""

import json
import os
import platform
import statistics
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from lineartime.bench.config import RESULTS_FILE, Dtype, Measure, Mode
from lineartime.bench.measure import median_and_spread
from lineartime.bench.subjects import Benchmark, Case
from lineartime.files import write_file
from lineartime.host import installed_version, processor_name, threads_in_words
from lineartime.plots import Panel, curves_of, draw_panels, looks_of, save_figure
from lineartime.units import cell, column_table, size, three_digits

REPORT_FILE = "results.md"
TITLES: dict[Measure, str] = {
    "train": "Train: one step, forward and backward",
    "forward": "Forward: all positions at once",
    "prefill": "Prefill: reading a prompt",
    "decode": "Decode: one more token of each stream",
}
LEGEND = (
    "spread: distance between the quartiles of the rounds. x first: time over that of the first row of the same length, the "
    "median over the rounds. MFU: model FLOP/s as a share of the peak of matrix products. peak: memory of a step above the "
    "weights. state: memory of a stream. compile: time of the first step above the median. \\*: measured after the others, "
    "because all together did not fit into memory."
)


@dataclass(kw_only=True)
class Entry:
    """What was measured of one subject in one case: an entry of results.json. `Results.save` adds what follows from others."""

    measure: Measure
    length: int  # tokens of the context, or the position for decode
    dtype: Dtype
    batch: int  # sequences, or streams
    tokens: int  # of one step
    subject: str  # the name of the preset or the peer
    mode: Mode
    problem: str | None = None  # why there are no numbers: "out of memory", or what failed
    alone: bool = False  # whether it was measured after the others, because they did not all fit into memory together
    seconds: tuple[float, ...] = ()  # per step, one value for each round
    calls: int = 1  # the number of steps that each of these values averages
    median_seconds: float | None = None
    spread_seconds: float | None = None  # the interquartile range
    tokens_per_second: float | None = None  # of all sequences together
    ratio_to_first: float | None = None  # to the first subject of the case: the median over the rounds that both have
    flops_per_token: float | None = None  # of the model, for train including the backward pass; None if unknown
    use_of_peak: float | None = None  # the FLOP/s of the model as a share of the highest measured peak of matrix products
    peak_bytes: int | None = None  # the most memory that a step holds above the weights, including gradients
    state_bytes: int | None = None  # of the state of a stream, for decode
    first_seconds: float | None = None  # of the very first step, which compiles
    compile_seconds: float | None = None  # by how much the first step of a compiled model exceeds the median

    @property
    def case(self) -> Case:
        """What is compared with each other."""
        return Case(self.measure, self.length, self.dtype, self.batch)

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

    def save(self) -> None:
        """Complete the entries, and write results.json and results.md."""
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
            "subjects": [
                {**asdict(each), "config": each.config.to_dict()} for each in self.benchmark.subjects if str(each) in measured
            ],
            "entries": [asdict(found) for found in finished],
        }
        write_file(self.folder / RESULTS_FILE, json.dumps(content, indent=1) + "\n")
        write_file(self.folder / REPORT_FILE, report(self))

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
    machine = results.machine
    device = machine.get("gpu") or f"{machine['cpu']}, {threads_in_words(machine['threads'])}"
    facts = [f"machine: {device}, torch {machine['torch']}, Python {machine['python']}", f"started: {results.started}"]
    facts += [f"precision: {results.benchmark.precision}"] if results.benchmark.precision else []
    for dtype, runs in results.peaks.items():
        both = " and ".join(f"{run / 1e9:,.1f}" for run in runs)
        facts.append(f"peak of matrix products in {dtype}: {both} GFLOP/s at the beginning and the end; the larger counts")
    blocks = ["# Benchmark", "\n".join(f"- {fact}" for fact in facts)]
    for measure, dtype in dict.fromkeys((found.measure, found.dtype) for found in results.finished):
        rows = [_row(found) for found in results.finished if (found.measure, found.dtype) == (measure, dtype)]
        table = column_table({name: [row[name] for row in rows] for name in rows[0]}, left=3)
        blocks.append(f"## {TITLES[measure]}, {dtype}\n\n{table}")
    return "\n\n".join([*blocks, LEGEND]) + "\n"


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


def draw_plots(results: Results) -> None:
    """Draw latency.png, memory.png and decode.png by length, a panel for each measure and precision, if there are numbers.

    Raises LineartimeError if matplotlib is missing, or a file cannot be written.
    """
    pictures: dict[str, tuple[str, str, float]] = {  # the number of an entry, its unit and how many there are in one of ours
        "latency": ("tokens of context", "µs per token", 1e6),
        "memory": ("tokens of context", "MB of a step, above the weights", 1e-6),
        "decode": ("tokens read before", "ms per token", 1e3),
    }
    for name, (x, y, factor) in pictures.items():
        panels: dict[str, list[tuple[str, float, float | None]]] = {}
        for found in results.finished:
            if (found.measure == "decode") == (name == "decode"):
                value: float | None = found.peak_bytes if name == "memory" else found.median_seconds
                tokens = found.tokens if name == "latency" else 1
                points = panels.setdefault(f"{found.measure}, {found.dtype}", [])
                points.append((found.label, found.length, None if value is None else factor * max(value, 1e-9) / tokens))
        drawn = [Panel(title, x, y, curves_of(points), log="xy") for title, points in panels.items()]
        if shown := [panel for panel in drawn if panel.curves]:
            looks = looks_of(found.label for found in results.finished)
            save_figure(draw_panels(shown, looks), results.folder / f"{name}.png", 130)
