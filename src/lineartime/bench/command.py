"""Run a benchmark: plan it, measure every case, and write the results. Every case is saved as soon as it is measured."""

import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lineartime.bench import memory
from lineartime.bench.config import RESULTS_FILE, BenchConfig
from lineartime.bench.measure import (
    forget,
    interleaved,
    peak_flops,
    release,
    repetitions,
    separate_compilations,
    synchronized,
    timed,
)
from lineartime.bench.plan import Plan, make_plan
from lineartime.bench.plots import draw_plots
from lineartime.bench.quality import read_quality
from lineartime.bench.report import print_results, write_report
from lineartime.bench.results import Entry, Results
from lineartime.bench.subjects import Case, Subject, forward_flops_per_token, prefill_flops_per_token, prepare
from lineartime.errors import Argument, LineartimeError, spell, typed_first_line
from lineartime.host import freed_memory_kept
from lineartime.machine import is_out_of_memory, using_threads
from lineartime.screen import SCREEN

OUT_OF_MEMORY = "out of memory"


def run_benchmark(config: BenchConfig) -> None:
    """Measure what the options ask for, print it, and write results.json, results.md and plots.

    Raises:
        LineartimeError: for options that cannot be measured, or files that cannot be written.
        KeyboardInterrupt: after saving what was measured.
    """
    plan = make_plan(config)
    with using_threads(config.threads):
        _run_plan(config, plan)


def _run_plan(config: BenchConfig, plan: Plan) -> None:
    quality, strangers = read_quality(config.metrics, {subject.name: subject.config for subject in plan.subjects})
    folder = config.folder()
    results = Results(folder, config.to_dict(), plan.device, plan.precision)
    results.save()
    with _Progress(plan) as progress:
        if strangers:
            progress.say(f"{spell(Argument('metrics'))} also has results of {', '.join(strangers)}, not measured here")
        try:
            with _quiet(), separate_compilations(), freed_memory_kept():  # freed memory is kept as in training
                _Run(config, plan, results, progress).all_cells()
        except KeyboardInterrupt:
            progress.say(f"interrupted: what was measured is in {folder / RESULTS_FILE}")
            raise
        finally:
            results.save()
            write_report(results)
            try:
                draw_plots(results, quality)
            except LineartimeError as error:
                progress.say(f"no plots: {error}")
    print_results(results)
    print(f"results: {folder}")


class _Progress(Progress):
    """A progress bar on standard error, or a line for each case if that is not a terminal."""

    def __init__(self, plan: Plan) -> None:
        console = Console(file=SCREEN, highlight=False, markup=False)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        super().__init__(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self.add_task("", total=sum(len(subjects) for _, subjects in plan.cells))

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, soft_wrap=True)

    def doing(self, entry: Entry, what: str) -> None:
        """Show the current activity."""
        self.update(self._task, description=f"{entry.case}: {entry.subject}, {what}")

    def done(self, case: Case, subjects: Sequence[Subject]) -> None:
        """Advance the bar by the subjects of a measured case."""
        self.advance(self._task, len(subjects))
        if not self.console.is_terminal:
            self.say(f"measured {case}")


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


class _Run:
    """Measures all cases of a plan, one after another."""

    def __init__(self, config: BenchConfig, plan: Plan, results: Results, progress: _Progress) -> None:
        self._config, self._plan, self._results, self._progress = config, plan, results, progress
        self._device = plan.device
        self._clock = partial(synchronized, plan.device)

    def all_cells(self) -> None:
        """Measure the peaks, then every case, then the peaks again."""
        if any(subject.mode == "compiled" for subject in self._plan.subjects):
            torch.compile(lambda x: x + 1)(torch.zeros(2, device=self._device))  # the first compilation has a fixed cost
        self._measure_peaks()
        for case, subjects in self._plan.cells:
            self._cell(case, subjects)
            self._results.save()
            write_report(self._results)
            self._progress.done(case, subjects)
        self._measure_peaks()

    def _measure_peaks(self) -> None:
        for dtype in dict.fromkeys(case.dtype for case, _ in self._plan.cells):
            self._results.peaks.setdefault(dtype, []).append(peak_flops(self._device, dtype))

    def _cell(self, case: Case, subjects: Sequence[Subject]) -> None:
        entries = [Entry(case, subject, flops_per_token=self._flops_per_token(subject, case)) for subject in subjects]
        self._results.entries += entries  # added now, so that an interrupt keeps the finished rounds
        if self._config.memory and case.measure != "decode" and self._device.type == "cpu":
            for entry in entries:
                self._memory_in_process(entry)
        left = [entry for entry in entries if entry.problem is None]
        self._together(left)
        for entry in left if len(left) > 1 else []:  # retry alone what did not fit beside the others
            if entry.problem == OUT_OF_MEMORY:
                entry.problem, entry.alone = None, True
                self._together([entry])

    def _together(self, entries: Sequence[Entry]) -> None:
        """Time several entries in turn, round by round."""
        steps = {index: (step, entry.calls) for index, entry in enumerate(entries) if (step := self._warm(entry)) is not None}
        for index, seconds in interleaved(steps, self._config.rounds, self._clock):
            entry = entries[index]
            if isinstance(seconds, Exception):
                self._failed(entry, seconds)
            else:
                entry.seconds.append(seconds)
                self._progress.doing(entry, f"round {len(entry.seconds)}")
        steps.clear()
        forget(self._device)

    def _warm(self, entry: Entry) -> Callable[[], object] | None:
        """Prepare a step, warm it up and set `entry.calls`; return None if the step fails."""
        self._progress.doing(entry, "warming up")
        try:
            ready = prepare(entry.subject, entry.case, self._device)
            entry.state_bytes = ready.state_bytes
            entry.first_seconds = seconds = timed(ready.step, 1, self._clock)
            for _ in range(self._config.warmup):
                seconds = timed(ready.step, 1, self._clock)
            entry.calls = repetitions(seconds, self._config.min_seconds)
            if self._config.memory and entry.case.measure != "decode" and self._device.type == "cuda":
                entry.memory = memory.of_ready(ready, self._device)
        except Exception as error:
            self._failed(entry, error)
            return None
        return ready.step

    def _failed(self, entry: Entry, error: Exception) -> None:
        """Record why an entry has no numbers."""
        entry.seconds.clear()
        entry.problem = OUT_OF_MEMORY if is_out_of_memory(error) else f"failed: {typed_first_line(error)}"
        release(self._device)

    def _memory_in_process(self, entry: Entry) -> None:
        self._progress.doing(entry, "memory")
        try:
            entry.memory = memory.in_process(entry.subject, entry.case)
        except memory.OutOfMemoryError:
            entry.problem = OUT_OF_MEMORY
        except RuntimeError as error:
            self._progress.say(f"{entry.case}: cannot measure the memory of {entry.subject}: {error}")

    def _flops_per_token(self, subject: Subject, case: Case) -> float | None:
        """FLOPs of the model per token; a backward pass counts as two forward passes."""
        if case.measure == "decode":
            return None
        eager = dataclasses.replace(subject, mode="eager")
        if case.measure == "prefill":
            return prefill_flops_per_token(eager, case.length)
        forward = forward_flops_per_token(eager, case.length)
        return forward if forward is None or case.measure != "train" else 3 * forward
