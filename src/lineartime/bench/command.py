"""A benchmark: its cases, the measurements, and its results: results.json and results.md, saved after every case, and plots."""

import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lineartime.bench.config import RESULTS_FILE, STREAMED, BenchConfig, Dtype, Measure, Mode
from lineartime.bench.measure import (
    Case,
    Subject,
    interleaved,
    median_and_spread,
    prepare,
    release,
    repetitions,
    separate_compilations,
    step_memory,
    synchronized,
    timed,
)
from lineartime.errors import ArgumentError, LineartimeError, typed_first_line
from lineartime.files import write_file
from lineartime.host import freed_memory_kept
from lineartime.machine import (
    choose_device,
    compiler_missing,
    faster_precision,
    is_out_of_memory,
    shapes_only,
    supports_bf16,
    using_threads,
)
from lineartime.models.config import ModelConfig
from lineartime.models.language_model import build_model
from lineartime.models.systems import resolve
from lineartime.plots import Panel, curves_of, draw_panels, looks_of, save_figure
from lineartime.runs.record import Process, locked, this_process
from lineartime.screen import SCREEN, print_markdown
from lineartime.training.config import TrainConfig
from lineartime.units import cell, column_table, size, three_digits

TITLES: dict[Measure, str] = {
    "train": "Train: one step, forward and backward",
    "forward": "Forward: all positions at once",
    "prefill": "Prefill: reading a prompt",
    "decode": "Decode: one more token of each stream",
}


@dataclass
class Entry:
    """What was measured of one subject in one case: an entry of results.json. `complete` adds what follows from others."""

    case: Case
    subject: Subject
    problem: str | None = None  # why there are no numbers: "out of memory", or what failed
    seconds: tuple[float, ...] = ()  # per step, one value for each round
    calls: int = 1  # the number of steps that each of these values averages
    first_seconds: float | None = None  # of the very first step, which compiles
    peak_bytes: int | None = None  # the most memory that a step holds above the weights, including gradients; on a GPU
    state_bytes: int | None = None  # of the state of a stream, for decode
    median_seconds: float | None = None
    spread_seconds: float | None = None  # the interquartile range
    tokens_per_second: float | None = None  # of all sequences together
    ratio_to_first: float | None = None  # to the first subject of the case: the median over the rounds
    compile_seconds: float | None = None  # by how much the first step of a compiled model exceeds the median

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary for JSON, with the fields of the case and the name of the subject."""
        of_case = {**asdict(self.case), "tokens": self.case.tokens, "subject": self.subject.name, "mode": self.subject.mode}
        return of_case | {name: value for name, value in vars(self).items() if name not in ("case", "subject")}

    def complete(self, first: "Entry") -> None:
        """Add what follows from the seconds, and from those of the first entry of the case."""
        self.median_seconds, self.spread_seconds = median_and_spread(self.seconds)
        self.tokens_per_second = self.case.tokens / self.median_seconds
        if first.seconds:
            self.ratio_to_first = statistics.median(a / b for a, b in zip(self.seconds, first.seconds, strict=False))
        if self.subject.mode != "eager" and self.first_seconds is not None:
            self.compile_seconds = max(0.0, self.first_seconds - self.median_seconds)


@dataclass
class Benchmark:
    """What is measured, cases with the subjects that take turns in each, and the results so far."""

    options: BenchConfig
    device: torch.device
    entries: Sequence[Entry]  # case by case
    precision: str = ""  # which precision "auto" chose, and why; empty without "auto"
    process: Process = field(default_factory=this_process)

    @property
    def finished(self) -> list[Entry]:
        """The entries with timings or a problem."""
        return [found for found in self.entries if found.seconds or found.problem]

    def save(self, folder: Path) -> None:
        """Complete the entries, and write results.json and results.md."""
        finished = self.finished
        for found in finished:
            if found.seconds:
                found.complete(next(other for other in finished if other.case == found.case))
        content = {
            "options": self.options.to_dict(),
            "precision": self.precision,
            "process": asdict(self.process),
            "subjects": {found.subject.name: found.subject.config.to_dict() for found in finished},
            "entries": [found.to_dict() for found in finished],
        }
        write_file(folder / RESULTS_FILE, json.dumps(content, indent=1) + "\n")
        write_file(folder / "results.md", report(self))


def run_benchmark(config: BenchConfig) -> Benchmark:
    """Measure what the options ask for, print it, write results.json, results.md and plots, and return the results.

    Raises:
        LineartimeError: for options that cannot be measured, or files that cannot be written.
        KeyboardInterrupt: after saving what was measured.
    """
    with using_threads(config.threads):
        benchmark, folder = make_benchmark(config), config.folder()
        apart = separate_compilations() if "compiled" in config.modes else nullcontext()
        with locked(folder), freed_memory_kept():  # as in training
            benchmark.save(folder)
            try:
                with apart:
                    _measure(benchmark, folder)
            except KeyboardInterrupt:
                print(f"interrupted: what was measured is in {folder / RESULTS_FILE}", file=SCREEN)
                raise
            finally:
                benchmark.save(folder)
                try:
                    draw_plots(benchmark, folder)
                except LineartimeError as error:
                    print(f"no plots: {error}", file=SCREEN)
    print_markdown(report(benchmark))
    print(f"results: {folder}")
    return benchmark


def make_benchmark(options: BenchConfig) -> Benchmark:
    """The benchmark that the options describe; raises LineartimeError if it cannot be measured."""
    options.check()
    configs = {item: _model_config(item, options) for item in options.presets}
    device = choose_device(options.device)
    if "bf16" in options.dtypes and not supports_bf16(device):
        raise ArgumentError("dtypes", "has bf16, which this GPU does not support: leave it out.")
    if "compiled" in options.modes and (missing := compiler_missing(device)):
        raise ArgumentError("modes", f"has compiled, but {missing}: install g++, or leave it out.")
    chosen, reason = faster_precision(device) if "auto" in options.dtypes else ("fp32", "")
    dtypes: dict[Dtype, None] = dict.fromkeys(chosen if dtype == "auto" else dtype for dtype in options.dtypes)
    entries = []
    for measure in dict.fromkeys(options.measure):
        subjects = []
        for name, config in configs.items():
            compiles = measure not in STREAMED or (measure == "decode" and config.constant_state)  # in place
            modes: tuple[Mode, ...] = tuple(dict.fromkeys(options.modes)) if compiles else ("eager",)
            subjects += [Subject(name, mode, config) for mode in modes]
        for dtype in dtypes:
            for length in dict.fromkeys(options.lengths(measure)):
                batch = options.decode_batch if measure in STREAMED else max(1, options.tokens_per_batch // length)
                entries += [Entry(Case(measure, length, dtype, batch), each) for each in subjects]
    return Benchmark(options, device, entries, f"{chosen}, because {reason}" if reason else "")


def _model_config(item: str, options: BenchConfig) -> ModelConfig:
    """The model of PRESET or PRESET:OPTION=VALUE, with any number of options. Raises ArgumentError if it cannot be measured."""
    name, *override = item.split(":")
    usual = resolve(name, options.task)  # an error names the preset
    try:  # the values are parsed as in training, to raise the same errors
        training = TrainConfig(preset=name, override=tuple(override), task=options.task, context_length=1)
        config = training.model_config(options.vocab_size or usual.vocab_size)
        with shapes_only():
            build_model(config.first_round)
    except ValueError as error:
        raise ArgumentError("presets", f"has {item!r}, but {error}") from None
    read, longest = max(map(options.longest, options.measure)), config.longest_sequence
    if longest is not None and read > longest:
        field = "max_positions" if longest == config.max_positions else "max_length"
        found = f"has {item}, which reads at most {longest:,} tokens, but is asked to read {read:,}"
        advice = f"use shorter `context_lengths` or `positions`, or {item}:{field}={read}"
        raise ArgumentError("presets", f"{found}: {advice}.")
    return config


def _measure(benchmark: Benchmark, folder: Path) -> None:
    """Measure every case."""
    device, cases = benchmark.device, dict.fromkeys(found.case for found in benchmark.entries)
    if "compiled" in benchmark.options.modes:
        torch.compile(lambda x: x + 1)(torch.zeros(2, device=device))  # the first compilation has a fixed cost
    for case in cases:
        _take_turns(benchmark.options, [found for found in benchmark.entries if found.case == case], device)
        benchmark.save(folder)
        print(f"measured {case}", file=SCREEN)


def _take_turns(config: BenchConfig, entries: Sequence[Entry], device: torch.device) -> None:
    """Time several subjects of a case in turn, round by round."""
    clock = partial(synchronized, device)
    steps: dict[int, tuple[Callable[[], object], int]] = {}
    for place, found in enumerate(entries):
        try:
            ready = prepare(found.subject, found.case, device)
            found.state_bytes = ready.state_bytes
            found.first_seconds = timed(ready.step, 1, clock)
            found.calls = repetitions(timed(ready.step, 1, clock), config.min_seconds)
            if found.case.measure != "decode" and device.type == "cuda":
                found.peak_bytes = step_memory(ready.model, ready.step, device)
            steps[place] = ready.step, found.calls
        except Exception as error:
            _failed(found, error, device)
    for place, seconds in interleaved(steps, config.rounds, clock):
        if isinstance(seconds, Exception):
            _failed(entries[place], seconds, device)
        else:
            entries[place].seconds += (seconds,)
    steps.clear()
    torch.compiler.reset()  # which frees compiled code
    release(device)


def _failed(found: Entry, error: Exception, device: torch.device) -> None:
    """Record why there are no numbers."""
    found.seconds = ()
    found.problem = "out of memory" if is_out_of_memory(error) else f"failed: {typed_first_line(error)}"
    release(device)


def report(benchmark: Benchmark) -> str:
    """The tables, one for each measure and precision, with what one has to know to read them."""
    facts = [f"machine: {benchmark.process}", f"started: {benchmark.process.time}"]
    facts += [f"precision: {benchmark.precision}"] if benchmark.precision else []
    tables: dict[str, list[dict[str, str]]] = {}
    for found in benchmark.finished:
        row = {
            "position" if found.case.measure == "decode" else "context": f"{found.case.length:,}",
            "batch": f"{found.case.batch:,}",
            "model": str(found.subject),
            "ms": found.problem or cell(found.median_seconds, three_digits, 1e3),
            "spread": cell(found.spread_seconds, three_digits, 1e3),
            "tokens/s": cell(found.tokens_per_second, three_digits),
            "x first": cell(found.ratio_to_first, ".2f"),
            "peak": cell(found.peak_bytes, size),
            "state": cell(found.state_bytes, size),
            "compile": cell(found.compile_seconds, ".1f", unit=" s"),
        }
        tables.setdefault(f"{TITLES[found.case.measure]}, {found.case.dtype}", []).append(row)
    blocks = ["# Benchmark", "\n".join(f"- {fact}" for fact in facts)]
    for title, rows in tables.items():
        blocks.append(f"## {title}\n\n{column_table({name: [row[name] for row in rows] for name in rows[0]}, left=3)}")
    return "\n\n".join([*blocks, "docs/experiments.md of lineartime says what the columns mean."]) + "\n"


def draw_plots(benchmark: Benchmark, folder: Path) -> None:
    """Draw latency.png, memory.png and decode.png by length, a panel for each measure and precision, if there are numbers.

    Raises LineartimeError if matplotlib is missing, or a file cannot be written.
    """
    pictures: dict[str, tuple[str, str, Callable[[Entry], float | None]]] = {
        "latency": ("tokens of context", "µs per token", lambda found: 1e6 / (found.tokens_per_second or 0)),
        "memory": ("tokens of context", "MB of a step, above the weights", lambda found: (found.peak_bytes or 0) / 1e6 or None),
        "decode": ("tokens read before", "ms per token", lambda found: 1e3 * (found.median_seconds or 0)),
    }
    for name, (x, y, value) in pictures.items():
        panels: dict[str, list[tuple[str, float | None, float | None]]] = {}
        for found in benchmark.finished:
            if found.seconds and (found.case.measure == "decode") == (name == "decode"):
                title = f"{found.case.measure}, {found.case.dtype}"
                panels.setdefault(title, []).append((str(found.subject), found.case.length, value(found)))
        drawn = [Panel(title, x, y, curves_of(points), "xy") for title, points in panels.items()]
        if shown := [panel for panel in drawn if panel.curves]:
            looks = looks_of(str(found.subject) for found in benchmark.finished)
            save_figure(draw_panels(shown, looks), folder / f"{name}.png", 130)
