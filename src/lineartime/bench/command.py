"""Run a benchmark: choose its cases, measure each, and write the results, which are saved after every case."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from itertools import chain

import torch

from lineartime.bench.config import RESULTS_FILE, STREAMED, BenchConfig, Dtype, Measure
from lineartime.bench.measure import (
    forget,
    interleaved,
    peak_flops,
    release,
    repetitions,
    separate_compilations,
    step_memory,
    synchronized,
    timed,
)
from lineartime.bench.results import Entry, Results, draw_plots, report
from lineartime.bench.subjects import Benchmark, Case, Subject, check_peer, flops_per_token, prepare
from lineartime.errors import ArgumentError, LineartimeError, did_you_mean, typed_first_line
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
from lineartime.models.config import LAYERS, ModelConfig
from lineartime.models.language_model import build_model
from lineartime.models.systems import resolve
from lineartime.runs.record import locked
from lineartime.screen import SCREEN, print_markdown
from lineartime.training.config import TrainConfig

OUT_OF_MEMORY = "out of memory"


def run_benchmark(config: BenchConfig) -> Results:
    """Measure what the options ask for, print it, write results.json, results.md and plots, and return the results.

    Raises:
        LineartimeError: for options that cannot be measured, or files that cannot be written.
        KeyboardInterrupt: after saving what was measured.
    """
    benchmark, folder = make_benchmark(config), config.folder()
    with locked(folder), using_threads(config.threads):
        results = Results(folder, config.to_dict(), benchmark)
        results.save()
        separate = separate_compilations() if benchmark.compiled else nullcontext()
        try:
            with separate, freed_memory_kept():  # freed memory is kept as in training
                _measure(config, results)
        except KeyboardInterrupt:
            print(f"interrupted: what was measured is in {folder / RESULTS_FILE}", file=SCREEN)
            raise
        finally:
            results.save()
            try:
                draw_plots(results)
            except LineartimeError as error:
                print(f"no plots: {error}", file=SCREEN)
    print_markdown(report(results))
    print(f"results: {folder}")
    return results


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
    cases = []
    for measure in dict.fromkeys(options.measure):
        subjects = _subjects(options, measure, configs)
        for dtype in dtypes:
            for length in dict.fromkeys(options.lengths(measure)):
                batch = options.decode_batch if measure in STREAMED else max(1, options.tokens_per_batch // length)
                cases.append((Case(measure, length, dtype, batch), subjects))
    return Benchmark(device, tuple(cases), f"{chosen}, because {reason}" if reason else "")


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
                found = (
                    f"make {name} read {length} tokens, but it reads at most {config.longest_sequence}: use shorter ones, or "
                )
                argument = "positions" if measure == "decode" else "context_lengths"
                raise ArgumentError(argument, found, f"`override` {field}={length}.")
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


def _measure(config: BenchConfig, results: Results) -> None:
    """Measure the peaks, then every case, then the peaks again."""
    benchmark, device = results.benchmark, results.benchmark.device

    def measure_peaks() -> None:
        for dtype in dict.fromkeys(case.dtype for case, _ in benchmark.cases):
            results.peaks.setdefault(dtype, []).append(peak_flops(device, dtype))

    if benchmark.compiled:
        torch.compile(lambda x: x + 1)(torch.zeros(2, device=device))  # the first compilation has a fixed cost
    measure_peaks()
    for case, subjects in benchmark.cases:
        of_case = {**asdict(case), "tokens": case.tokens}
        entries = {
            each: Entry(**of_case, subject=each.name, mode=each.mode, flops_per_token=flops_per_token(each, case))
            for each in subjects
        }
        results.entries += entries.values()  # added now, so that an interrupt keeps the finished rounds
        _take_turns(config, entries, device)
        for each, found in entries.items() if len(entries) > 1 else ():  # retry alone what did not fit beside the others
            if found.problem == OUT_OF_MEMORY:
                found.problem, found.alone = None, True
                _take_turns(config, {each: found}, device)
        results.save()
        print(f"measured {case}", file=SCREEN)
    measure_peaks()


def _take_turns(config: BenchConfig, entries: dict[Subject, Entry], device: torch.device) -> None:
    """Time several subjects of a case in turn, round by round."""
    clock = partial(synchronized, device)
    steps: dict[Subject, tuple[Callable[[], object], int]] = {}
    for subject, found in entries.items():
        try:
            ready = prepare(subject, found.case, device)
            found.state_bytes = ready.state_bytes
            found.first_seconds = timed(ready.step, 1, clock)
            found.calls = repetitions(timed(ready.step, 1, clock), config.min_seconds)
            if config.memory and found.measure != "decode" and device.type == "cuda":
                found.peak_bytes = step_memory(ready.model, ready.step, device)
            steps[subject] = ready.step, found.calls
        except Exception as error:
            _failed(found, error, device)
    for subject, seconds in interleaved(steps, config.rounds, clock):
        if isinstance(seconds, Exception):
            _failed(entries[subject], seconds, device)
        else:
            entries[subject].seconds += (seconds,)
    steps.clear()
    forget(device)


def _failed(found: Entry, error: Exception, device: torch.device) -> None:
    """Record why there are no numbers."""
    found.seconds = ()
    found.problem = OUT_OF_MEMORY if is_out_of_memory(error) else f"failed: {typed_first_line(error)}"
    release(device)
