"""A benchmark: its cases, the measurements, and its results: results.json and results.md, saved after every case, and plots."""

import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from lineartime.bench.config import RESULTS_FILE, STREAMED, BenchConfig, Dtype, Measure
from lineartime.bench.measure import (
    Case,
    Subject,
    check_peer,
    flops_per_token,
    forget,
    interleaved,
    median_and_spread,
    peak_flops,
    prepare,
    release,
    repetitions,
    separate_compilations,
    step_memory,
    synchronized,
    timed,
)
from lineartime.errors import ArgumentError, LineartimeError, did_you_mean, typed_first_line
from lineartime.files import write_file
from lineartime.host import freed_memory_kept, installed_version, processor_name, threads_in_words
from lineartime.machine import (
    choose_device,
    compiler_missing,
    faster_precision,
    is_out_of_memory,
    shapes_only,
    supports_bf16,
    using_threads,
)
from lineartime.models.config import LAYERS, ModelConfig
from lineartime.models.language_model import build_model
from lineartime.models.systems import resolve
from lineartime.plots import Panel, curves_of, draw_panels, looks_of, save_figure
from lineartime.runs.record import locked
from lineartime.screen import SCREEN, print_markdown
from lineartime.training.config import TrainConfig
from lineartime.units import cell, column_table, size, three_digits

OUT_OF_MEMORY = "out of memory"
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


@dataclass
class Entry:
    """What was measured of one subject in one case: an entry of results.json. `complete` adds what follows from others."""

    case: Case
    subject: Subject
    flops_per_token: float | None = None  # of the model, for train including the backward pass; None if unknown
    problem: str | None = None  # why there are no numbers: "out of memory", or what failed
    alone: bool = False  # whether it was measured after the others, because they did not all fit into memory together
    seconds: tuple[float, ...] = ()  # per step, one value for each round
    calls: int = 1  # the number of steps that each of these values averages
    first_seconds: float | None = None  # of the very first step, which compiles
    peak_bytes: int | None = None  # the most memory that a step holds above the weights, including gradients
    state_bytes: int | None = None  # of the state of a stream, for decode
    median_seconds: float | None = None
    spread_seconds: float | None = None  # the interquartile range
    tokens_per_second: float | None = None  # of all sequences together
    ratio_to_first: float | None = None  # to the first subject of the case: the median over the rounds that both have
    use_of_peak: float | None = None  # the FLOP/s of the model as a share of the highest measured peak of matrix products
    compile_seconds: float | None = None  # by how much the first step of a compiled model exceeds the median

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary for JSON, with the fields of the case and the name of the subject."""
        of_case = {**asdict(self.case), "tokens": self.case.tokens, "subject": self.subject.name, "mode": self.subject.mode}
        return of_case | {name: value for name, value in vars(self).items() if name not in ("case", "subject")}

    def complete(self, first: "Entry", peaks: Sequence[float]) -> None:
        """Add what follows from the seconds, from those of the first entry of the case, and from the peaks."""
        self.median_seconds, self.spread_seconds = median_and_spread(self.seconds)
        self.tokens_per_second = self.case.tokens / self.median_seconds
        if first.seconds and not (self.alone or first.alone):
            ratios = [own / other for own, other in zip(self.seconds, first.seconds, strict=False)]
            self.ratio_to_first = statistics.median(ratios)
        if self.flops_per_token is not None and peaks:
            self.use_of_peak = self.flops_per_token * self.tokens_per_second / max(peaks)
        if self.subject.mode != "eager" and self.first_seconds is not None:
            self.compile_seconds = max(0.0, self.first_seconds - self.median_seconds)


class Benchmark:
    """What is measured, cases with the subjects that take turns in each, and the results so far."""

    def __init__(self, options: BenchConfig, device: torch.device, entries: Sequence[Entry], precision: str = "") -> None:
        self.options = options
        self.device = device
        self.entries = entries  # case by case
        self.precision = precision  # which precision "auto" chose, and why; empty without "auto"
        self.machine = describe_machine(device)
        self.started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.peaks: dict[str, list[float]] = {}  # of matrix products, in FLOP/s, by precision

    @property
    def finished(self) -> list[Entry]:
        """The entries with timings or a problem."""
        return [found for found in self.entries if found.seconds or found.problem]

    def save(self, folder: Path) -> None:
        """Complete the entries, and write results.json and results.md."""
        finished = self.finished
        for found in finished:
            if found.seconds:
                first = next(other for other in finished if other.case == found.case)
                found.complete(first, self.peaks.get(found.case.dtype, ()))
        subjects = dict.fromkeys(found.subject for found in finished)
        content = {
            "options": self.options.to_dict(),
            "precision": self.precision,
            "machine": self.machine,
            "started": self.started,
            "lineartime": installed_version("lineartime"),
            "peak_flops": {dtype: {"runs": runs, "taken": max(runs)} for dtype, runs in self.peaks.items()},
            "subjects": [{**asdict(each), "config": each.config.to_dict()} for each in subjects],
            "entries": [found.to_dict() for found in finished],
        }
        write_file(folder / RESULTS_FILE, json.dumps(content, indent=1) + "\n")
        write_file(folder / REPORT_FILE, report(self))


def run_benchmark(config: BenchConfig) -> Benchmark:
    """Measure what the options ask for, print it, write results.json, results.md and plots, and return the results.

    Raises:
        LineartimeError: for options that cannot be measured, or files that cannot be written.
        KeyboardInterrupt: after saving what was measured.
    """
    benchmark, folder = make_benchmark(config), config.folder()
    with locked(folder), using_threads(config.threads):
        benchmark.save(folder)
        compiled = any(found.subject.mode == "compiled" for found in benchmark.entries)
        try:
            with separate_compilations() if compiled else nullcontext(), freed_memory_kept():  # as in training
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
    configs = _model_configs(options)
    device = choose_device(options.device)
    if "bf16" in options.dtypes and not supports_bf16(device):
        raise ArgumentError("dtypes", "has bf16, which this GPU does not support: leave it out.")
    if "compiled" in options.modes and (missing := compiler_missing(device)):
        raise ArgumentError("modes", f"has compiled, but {missing}: install g++, or leave it out.")
    chosen, reason = faster_precision(device) if "auto" in options.dtypes else ("fp32", "")
    dtypes: dict[Dtype, None] = dict.fromkeys(chosen if dtype == "auto" else dtype for dtype in options.dtypes)
    entries = []
    for measure in dict.fromkeys(options.measure):
        subjects = _subjects(options, measure, configs)
        for dtype in dtypes:
            for length in dict.fromkeys(options.lengths(measure)):
                batch = options.decode_batch if measure in STREAMED else max(1, options.tokens_per_batch // length)
                case = Case(measure, length, dtype, batch)
                entries += [Entry(case, each, flops_per_token(each, case)) for each in subjects]
    return Benchmark(options, device, entries, f"{chosen}, because {reason}" if reason else "")


def _model_configs(options: BenchConfig) -> dict[str, ModelConfig]:
    """The models of the presets, with what `override` changes in all of them or in one.

    Raises ArgumentError for a field that none has, and for lengths that a model cannot read.
    """
    presets = {name: resolve(name, options.task) for name in options.presets}
    fields = {
        name: [field for field in preset.override_names if field not in ("vocab_size", "task")]
        for name, preset in presets.items()
    }
    known = list(dict.fromkeys(chain(*fields.values())))
    for item in options.override:
        key = item.partition("=")[0]
        if key not in known and key.partition(".")[0] not in (*presets, *LAYERS):
            found = f"has {key!r}, which is no field of these models{did_you_mean(key, known)}: use {', '.join(known)}."
            raise ArgumentError("override", found)
    configs = {}
    for name, preset in presets.items():
        parts = tuple(f"{part}." for part in LAYERS)
        shared = [item for item in options.override if item.partition("=")[0] in fields[name] or item.startswith(parts)]
        own = [item.removeprefix(f"{name}.") for item in options.override if item.startswith(f"{name}.")]
        # Parse the values as training does, to raise the same errors.
        training = TrainConfig(preset=name, override=(*shared, *own), task=options.task, context_length=1)
        configs[name] = config = training.model_config(options.vocab_size or preset.vocab_size)
        try:
            with shapes_only():
                build_model(config.first_round)
        except ValueError as error:
            raise ArgumentError("override", f"does not make a model of {name}: {error}") from None
        for measure in options.measure:
            length = max(options.lengths(measure)) + (2 if measure == "decode" else 0)
            if config.longest_sequence is not None and length > config.longest_sequence:
                field = "max_positions" if config.longest_sequence == config.max_positions else "max_length"
                found = f"make {name} read {length} tokens, but it reads at most {config.longest_sequence}"
                argument = "positions" if measure == "decode" else "context_lengths"
                raise ArgumentError(argument, f"{found}: use shorter ones, or `override` {field}={length}.")
    return configs


def _subjects(options: BenchConfig, measure: Measure, configs: dict[str, ModelConfig]) -> tuple[Subject, ...]:
    """The models that take part in a measure, in all their modes, and the peers, which have no streams."""
    modes = tuple(dict.fromkeys(options.modes))
    subjects = []
    for name, config in configs.items():
        compiles = measure not in STREAMED or (measure == "decode" and config.constant_state)  # in place
        subjects += [Subject(name, mode, config) for mode in (modes if compiles else ("eager",))]
    for peer in dict.fromkeys(options.peers) if measure not in STREAMED else ():
        gated = [config for config in configs.values() if {"d_qk", "chunk_size"} <= config.mixer.options.keys()]
        if not gated:
            sizes = "which takes its sizes from a preset with d_qk and chunk_size"
            raise ArgumentError("peers", f"has {peer}, {sizes}: add flash-tiny.")
        check_peer()
        subjects += [Subject(peer, mode, gated[0], is_peer=True) for mode in modes]
    return tuple(subjects)


def _measure(benchmark: Benchmark, folder: Path) -> None:
    """Measure the peaks, then every case, then the peaks again."""
    device, cases = benchmark.device, dict.fromkeys(found.case for found in benchmark.entries)

    def measure_peaks() -> None:
        for dtype in dict.fromkeys(case.dtype for case in cases):
            benchmark.peaks.setdefault(dtype, []).append(peak_flops(device, dtype))

    if "compiled" in benchmark.options.modes:
        torch.compile(lambda x: x + 1)(torch.zeros(2, device=device))  # the first compilation has a fixed cost
    measure_peaks()
    for case in cases:
        entries = [found for found in benchmark.entries if found.case == case]
        _take_turns(benchmark.options, entries, device)
        for found in entries if len(entries) > 1 else ():  # retry alone what did not fit beside the others
            if found.problem == OUT_OF_MEMORY:
                found.problem, found.alone = None, True
                _take_turns(benchmark.options, [found], device)
        benchmark.save(folder)
        print(f"measured {case}", file=SCREEN)
    measure_peaks()


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
            if config.memory and found.case.measure != "decode" and device.type == "cuda":
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
    forget(device)


def _failed(found: Entry, error: Exception, device: torch.device) -> None:
    """Record why there are no numbers."""
    found.seconds = ()
    found.problem = OUT_OF_MEMORY if is_out_of_memory(error) else f"failed: {typed_first_line(error)}"
    release(device)


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


def report(benchmark: Benchmark) -> str:
    """The tables, one for each measure and precision, with what one has to know to read them."""
    machine = benchmark.machine
    device = machine.get("gpu") or f"{machine['cpu']}, {threads_in_words(machine['threads'])}"
    facts = [f"machine: {device}, torch {machine['torch']}, Python {machine['python']}", f"started: {benchmark.started}"]
    facts += [f"precision: {benchmark.precision}"] if benchmark.precision else []
    for dtype, runs in benchmark.peaks.items():
        both = " and ".join(f"{run / 1e9:,.1f}" for run in runs)
        facts.append(f"peak of matrix products in {dtype}: {both} GFLOP/s at the beginning and the end; the larger counts")
    tables: dict[str, list[dict[str, str]]] = {}
    for found in benchmark.finished:
        row = {
            "position" if found.case.measure == "decode" else "context": f"{found.case.length:,}",
            "batch": f"{found.case.batch:,}",
            "model": f"{found.subject}{'*' if found.alone else ''}",
            "ms": found.problem or cell(found.median_seconds, three_digits, 1e3),
            "spread": cell(found.spread_seconds, three_digits, 1e3),
            "tokens/s": cell(found.tokens_per_second, three_digits),
            "x first": cell(found.ratio_to_first, ".2f"),
            "MFU": cell(found.use_of_peak, ".1%"),
            "peak": cell(found.peak_bytes, size),
            "state": cell(found.state_bytes, size),
            "compile": cell(found.compile_seconds, ".1f", unit=" s"),
        }
        tables.setdefault(f"{TITLES[found.case.measure]}, {found.case.dtype}", []).append(row)
    blocks = ["# Benchmark", "\n".join(f"- {fact}" for fact in facts)]
    for title, rows in tables.items():
        blocks.append(f"## {title}\n\n{column_table({name: [row[name] for row in rows] for name in rows[0]}, left=3)}")
    return "\n\n".join([*blocks, LEGEND]) + "\n"


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
