"""Run a benchmark: measure every case, and write the results. Every case is saved as soon as it is measured."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lineartime.bench.benchmark import Benchmark, make_benchmark
from lineartime.bench.config import RESULTS_FILE, BenchConfig
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
from lineartime.bench.plots import draw_plots
from lineartime.bench.report import REPORT_FILE, report
from lineartime.bench.results import Entry, Results
from lineartime.bench.subjects import Case, Subject, flops_per_token, prepare
from lineartime.errors import LineartimeError, typed_first_line
from lineartime.files import write_file
from lineartime.host import freed_memory_kept
from lineartime.machine import is_out_of_memory, using_threads
from lineartime.screen import print_markdown, progress_bar

OUT_OF_MEMORY = "out of memory"


def run_benchmark(config: BenchConfig) -> Results:
    """Measure what the options ask for, print it, write results.json, results.md and plots, and return the results.

    Raises:
        LineartimeError: for options that cannot be measured, or files that cannot be written.
        KeyboardInterrupt: after saving what was measured.
    """
    benchmark = make_benchmark(config)
    with using_threads(config.threads):
        return _run(config, benchmark)


def _run(config: BenchConfig, benchmark: Benchmark) -> Results:
    folder = config.folder()
    results = Results(folder, config.to_dict(), benchmark)
    results.save()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with progress_bar(*columns) as progress:
        try:
            with (
                _quiet(),
                separate_compilations() if benchmark.compiled else nullcontext(),
                freed_memory_kept(),
            ):  # freed memory is kept as in training
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


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of PyTorch and the peers about their own code, which the user cannot change."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


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
            found.first_seconds = seconds = timed(ready.step, 1, self._clock)
            for _ in range(self._config.warmup):
                seconds = timed(ready.step, 1, self._clock)
            found.calls = repetitions(seconds, self._config.min_seconds)
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
