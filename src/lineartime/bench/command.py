"""Run a benchmark: choose its cases, measure each, and write the results, which are saved after every case."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from itertools import chain

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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
from lineartime.bench.results import REPORT_FILE, Entry, Results, draw_plots, report
from lineartime.bench.subjects import Benchmark, Case, Subject, check_peer, flops_per_token, prepare
from lineartime.errors import ArgumentError, LineartimeError, did_you_mean, typed_first_line
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
from lineartime.models.config import LAYERS, ModelConfig
from lineartime.models.language_model import build_model
from lineartime.models.systems import resolve
from lineartime.runs.record import locked
from lineartime.screen import print_markdown, progress_bar
from lineartime.training.config import TrainConfig

OUT_OF_MEMORY = "out of memory"
LAYER_OPTIONS = tuple(f"{part}." for part in LAYERS)


def run_benchmark(config: BenchConfig) -> Results:
    """Measure what the options ask for, print it, write results.json, results.md and plots, and return the results.

    Raises:
        LineartimeError: for options that cannot be measured, or files that cannot be written.
        KeyboardInterrupt: after saving what was measured.
    """
    benchmark, folder = make_benchmark(config), config.folder()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with locked(folder), using_threads(config.threads), progress_bar(*columns) as progress:
        results = Results(folder, config.to_dict(), benchmark)
        results.save()
        separate = separate_compilations() if benchmark.compiled else nullcontext()
        try:
            with separate, freed_memory_kept():  # freed memory is kept as in training
                _Measuring(config, results, progress).all_cases()
        except KeyboardInterrupt:
            progress.console.print(f"interrupted: what was measured is in {folder / RESULTS_FILE}")
            raise
        finally:
            _save(results)
            try:
                draw_plots(results)
            except LineartimeError as error:
                progress.console.print(f"no plots: {error}")
    print_markdown(report(results))
    print(f"results: {folder}")
    return results


def _save(results: Results) -> None:
    results.save()
    write_file(results.folder / REPORT_FILE, report(results))


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
    """The models of the presets, with what `override` changes in all of them or in one."""
    presets = {name: resolve(name, options.task) for name in options.presets}
    fields = {
        name: [field for field in preset.override_names if field not in ("vocab_size", "task")]
        for name, preset in presets.items()
    }
    known = list(dict.fromkeys(chain(*fields.values())))
    for item in options.override:
        key = item.partition("=")[0]
        if key not in known and key.partition(".")[0] not in (*presets, *LAYERS):
            raise ArgumentError(
                "override", f"has {key!r}, which is no field of these models{did_you_mean(key, known)}: use {', '.join(known)}."
            )
    configs = {}
    for name, preset in presets.items():
        shared = [item for item in options.override if item.partition("=")[0] in fields[name] or item.startswith(LAYER_OPTIONS)]
        own = [item.removeprefix(f"{name}.") for item in options.override if item.startswith(f"{name}.")]
        # Parse the values as training does, to raise the same errors.
        training = TrainConfig(preset=name, override=(*shared, *own), task=options.task, context_length=1)
        configs[name] = training.model_config(options.vocab_size or preset.vocab_size)
        _check_lengths(options, name, configs[name])
    return configs


def _check_lengths(options: BenchConfig, name: str, config: ModelConfig) -> None:
    """Raise ArgumentError for lengths that a model cannot read."""
    try:
        with shapes_only():
            build_model(config.first_round)
    except ValueError as error:
        raise ArgumentError("override", f"does not make a model of {name}: {error}") from None
    longest = config.longest_sequence
    for measure in options.measure:
        length = max(options.lengths(measure)) + (2 if measure == "decode" else 0)
        if longest is not None and length > longest:
            field = "max_positions" if longest == config.max_positions else "max_length"
            found = f"make {name} read {length} tokens, but it reads at most {longest}: use shorter ones, or "
            argument = "positions" if measure == "decode" else "context_lengths"
            raise ArgumentError(argument, found, f"`override` {field}={length}.")


def _subjects(options: BenchConfig, measure: Measure, configs: dict[str, ModelConfig]) -> tuple[Subject, ...]:
    """The models that take part in a measure, in all their modes, and the peers, which have no streams."""
    modes = tuple(dict.fromkeys(options.modes))
    subjects = []
    for name, config in configs.items():
        steps_in_place = measure == "decode" and config.constant_state
        for mode in modes if measure not in STREAMED or steps_in_place else ("eager",):
            subjects.append(Subject(name, mode, config))
    for peer in dict.fromkeys(options.peers) if measure not in STREAMED else ():
        gated = [config for config in configs.values() if {"d_qk", "chunk_size"} <= config.mixer.options.keys()]
        if not gated:
            sizes = "which takes its sizes from a preset with d_qk and chunk_size"
            raise ArgumentError("peers", f"has {peer}, {sizes}: add flash-tiny.")
        check_peer()
        subjects += [Subject(peer, mode, gated[0], is_peer=True) for mode in modes]
    return tuple(subjects)


class _Measuring:
    """Measures all cases of a benchmark, one after another."""

    def __init__(self, config: BenchConfig, results: Results, progress: Progress) -> None:
        self._config, self._results, self._progress = config, results, progress
        self._benchmark = benchmark = results.benchmark
        self._device = benchmark.device
        self._subjects = {str(each): each for each in benchmark.subjects}
        self._clock = partial(synchronized, benchmark.device)
        self._task = progress.add_task("", total=len(benchmark.cases))

    def all_cases(self) -> None:
        """Measure the peaks, then every case, then the peaks again."""
        if self._benchmark.compiled:
            torch.compile(lambda x: x + 1)(torch.zeros(2, device=self._device))  # the first compilation has a fixed cost
        self._measure_peaks()
        for case, subjects in self._benchmark.cases:
            self._case(case, subjects)
            _save(self._results)
            self._progress.advance(self._task)
            if self._progress.disable:
                self._progress.console.print(f"measured {case}")
        self._measure_peaks()

    def _measure_peaks(self) -> None:
        for dtype in dict.fromkeys(case.dtype for case, _ in self._benchmark.cases):
            self._results.peaks.setdefault(dtype, []).append(peak_flops(self._device, dtype))

    def _case(self, case: Case, subjects: Sequence[Subject]) -> None:
        of_case = {**asdict(case), "tokens": case.tokens}
        entries = [
            Entry(**of_case, subject=each.name, mode=each.mode, flops_per_token=flops_per_token(each, case))
            for each in subjects
        ]
        self._results.entries += entries  # added now, so that an interrupt keeps the finished rounds
        self._together(entries)
        for found in entries if len(entries) > 1 else []:  # retry alone what did not fit beside the others
            if found.problem == OUT_OF_MEMORY:
                found.problem, found.alone = None, True
                self._together([found])

    def _together(self, entries: Sequence[Entry]) -> None:
        """Time several subjects in turn, round by round."""
        steps = {at: (step, found.calls) for at, found in enumerate(entries) if (step := self._warm(found)) is not None}
        for at, seconds in interleaved(steps, self._config.rounds, self._clock):
            if isinstance(seconds, Exception):
                self._failed(entries[at], seconds)
            else:
                entries[at].seconds += (seconds,)
        steps.clear()
        forget(self._device)

    def _warm(self, found: Entry) -> Callable[[], object] | None:
        """Prepare a step, warm it up and set `calls`; return None if the step fails."""
        self._progress.update(self._task, description=f"{found.case}: {found.label}")
        try:
            ready = prepare(self._subjects[found.label], found.case, self._device)
            found.state_bytes = ready.state_bytes
            found.first_seconds = timed(ready.step, 1, self._clock)
            found.calls = repetitions(timed(ready.step, 1, self._clock), self._config.min_seconds)
            if self._config.memory and found.measure != "decode":
                found.weights_bytes = sum(weight.nbytes for weight in ready.model.parameters())
                if self._device.type == "cuda":
                    found.peak_bytes, found.gradients_bytes = step_memory(ready.model, ready.step, self._device)
        except Exception as error:
            self._failed(found, error)
            return None
        return ready.step

    def _failed(self, found: Entry, error: Exception) -> None:
        """Record why there are no numbers."""
        found.seconds = ()
        found.problem = OUT_OF_MEMORY if is_out_of_memory(error) else f"failed: {typed_first_line(error)}"
        release(self._device)
