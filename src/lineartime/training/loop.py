"""Training, from top to bottom: options, processes, set-up, steps, evaluations, checkpoints."""

import dataclasses
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lineartime import checkpoint as checkpoints
from lineartime.data import evaluation_batch, merge_states, read_window, spread_windows, text_length
from lineartime.errors import DivergedError, LineartimeError, require_packages
from lineartime.files import removed_on_failure
from lineartime.host import freed_memory_kept, stop_signals
from lineartime.machine import autocast, choose_compile, choose_device, choose_precision, faster_precision, using_threads
from lineartime.models.language_model import CausalLM, MaskedLM
from lineartime.ops.cross_entropy import IGNORED
from lineartime.runs.metrics import NullReporter, Reporter, draw_curve, losses, read_metrics
from lineartime.runs.record import RunRecord, locked
from lineartime.training import setup
from lineartime.training.config import TrainConfig, learning_rate, warmup_steps
from lineartime.training.optimizers import build_optimizer
from lineartime.training.parallel import Objective, Parallel, World, join_world, part_of, read_environment


@dataclass(frozen=True)
class TrainingResult:
    """A run that has ended, read from its folder `run`. `step` counts the steps taken so far.

    After an interrupt, it is not `finished`: it is saved, and `resume=True` continues it.
    """

    run: Path
    step: int
    finished: bool

    @property
    def training_losses(self) -> dict[int, float]:
        """The loss of each step, in nats per token. Raises LineartimeError if the metrics cannot be read."""
        return losses(read_metrics(self.run), "loss")

    @property
    def validation_losses(self) -> dict[int, float]:
        """The loss of each evaluation on held-out text by step, in nats per token. Raises LineartimeError."""
        return losses(read_metrics(self.run), "validation_loss")

    @property
    def checkpoint(self) -> Path:
        """The checkpoint with the lowest validation loss."""
        return checkpoints.best_checkpoint(self.run)

    @cached_property
    def model(self) -> CausalLM | MaskedLM:
        """The model of that checkpoint, on the CPU in evaluation mode; loaded at first use."""
        return checkpoints.load_with_tokenizer(self.checkpoint).model

    def draw_curve(self) -> Path:
        """Plot the losses into the run's folder and return the path of the image. Raises LineartimeError without matplotlib."""
        return draw_curve(self.run)


def train(config: TrainConfig | None = None, /, **options: Any) -> TrainingResult:
    """Train a model, or resume a run from its last checkpoint: `train(preset="flash-tiny", data="books/", steps=1000)`.

    Several processes started by torchrun share the work. An interrupt (SIGINT, SIGTERM, SIGHUP) ends training after the current
    step, which is saved; the result is then not `finished`. A resumed run has the same losses as an uninterrupted one. On a CPU
    with the same number of processes and threads, they are bitwise equal.

    Args:
        config: options; the default is `TrainConfig()`.
        **options: fields of `TrainConfig`; they replace those of the config. `preset` may be a `ModelConfig`. `recipe` and
            `resume` set the defaults of all options that are not given, as on the command line. In a config, the options that
            differ from `TrainConfig()` count as given.

    Raises:
        LineartimeError: for errors that the user can fix. Existing checkpoints are kept.
        TypeError: for an option that does not exist.
    """
    if config is not None:
        usual = TrainConfig()
        given = {name: value for name, value in vars(config).items() if value != getattr(usual, name)}
        if config.resume or options.get("resume"):  # a config also records where its defaults came from
            given = {name: value for name, value in given.items() if name not in ("recipe", "init_from")}
        options = {**given, **options}
    if not isinstance(options.get("preset", ""), str):  # a `ModelConfig` sets several options
        described = TrainConfig(**options)
        options |= {name: getattr(described, name) for name in ("preset", "task", "override")}
    return train_completed(setup.complete(options))


def train_completed(config: TrainConfig) -> TrainingResult:
    """Train with a complete set of options, as `complete` returns it."""
    device = choose_device(config.device, read_environment().local_rank)
    run, record = config.run_directory, RunRecord(config.run_directory)
    together = join_world(device, timeout=config.timeout, context_parallel=config.context_parallel)
    kept = torch.random.fork_rng([device] if device.type == "cuda" else [])  # a step seeds the generators of the caller
    own_precision = autocast(device, bf16=False)  # an autocast of the caller would change backward passes and optimisers
    with (
        record.errors(),
        kept,
        using_threads(config.threads),
        own_precision,
        together as world,
        locked(run, keep=True) if world.is_main else nullcontext(),
    ):
        start = world.share(lambda: setup.starting_point(config))
        # The trainer gets no name: it must be freed before the processes disconnect, which could deadlock (`join_world`).
        return Trainer(config, world, start, record).run()


class Trainer:
    """A model with its optimiser and its text, and the steps taken so far. The folder of the run is not touched before `run`.

    `start` is the checkpoint to resume from; without it, the run is new. `notes` are printed before training starts. Raises
    LineartimeError for options that are incompatible with each other, the text or this machine.
    """

    def __init__(
        self, config: TrainConfig, world: World | None = None, start: Path | None = None, record: RunRecord | None = None
    ) -> None:
        config.check()
        if "wandb" in config.track:
            require_packages("wandb", extra="wandb", purpose="The tracker wandb")
        self.world = world = world or World()
        self.resumed = start is not None
        self.device = choose_device(config.device, world.local_rank)
        self._record = record or RunRecord(config.run_directory)

        rows = config.rows(world.data_rank, world.data_ranks)
        if start is None and config.init_from is not None:
            setup.check_start(config, config.init_from)
        corpus = world.local_main_first("the corpus", lambda: setup.read_corpus(config, start))
        self.tokenizer = setup.make_tokenizer(config, world, start, corpus)
        self.model = model = setup.make_model(config, world, start, self.tokenizer.vocab_size, rows, self.device)
        objective = Objective(model, world.context_group)
        self.text = world.local_main_first("the text", lambda: setup.Text(corpus, self.tokenizer, config, rows))
        setup.check_same_run(config, self.text, world)

        self.tokens_per_step = rows.per_step * config.context_length
        tokens = self.tokens_per_step * config.steps
        precision, (compiled, why_not_compiled) = world.share(
            lambda: (
                choose_precision(config.precision, self.device),
                choose_compile(config.compile, self.device, model.n_parameters, tokens),
            )
        )
        if config.recompute:
            model.recompute_blocks()
        if compiled:
            model.compile_blocks()
        # Checkpoints store the resolved options, so that a resumed run computes the same.
        self.config = config = dataclasses.replace(
            config, precision=precision, compile="on" if compiled else "off", tokens_per_batch=self.tokens_per_step
        )
        self.parallel = Parallel(objective, config, world)  # copies the weights, so they must be final by now
        self.optimizer = build_optimizer(model, config)
        self.writer = setup.CheckpointWriter(config, model, self.optimizer, self.tokenizer, world)
        self._window_length, self._window_starts = self._spread_windows()

        self.step = 0
        self.skipped = 0
        self._skipped_in_a_row = 0
        self._validation_loss: float | None = None  # at the current step
        if start is not None:
            self._restore(start)
        self.notes = [*self._notes(start), *self.text.splits, self._summary(why_not_compiled)]

    def _restore(self, start: Path) -> None:
        """Restore the position of a checkpoint. Raises LineartimeError if the text has changed."""
        state = checkpoints.read_training_state(start)
        if state.text != self.text.identity:
            raise LineartimeError(
                f"The text of the run in {self.config.run_directory} has changed: it was {state.text}, and now it is "
                f"{self.text.identity}; restore the old text, or start another run in another folder. What an earlier version "
                "began on records, and held out by their numbers, goes on with that version alone."
            )
        self.step, self.skipped, self._validation_loss = state.step, state.skipped, checkpoints.read_validation_loss(start)
        self.text.loader.restore(state.data)
        setup.restore_moments(start, self.optimizer, self.step - self.skipped)

    def _notes(self, start: Path | None) -> list[str]:
        """What the user may not expect."""
        config = self.config
        before = None if start is None else setup.saved_config(start).precision
        faster, reason = faster_precision(self.device)
        notes = []
        if before not in (None, config.precision):
            notes.append(f"Computing in {config.precision}, and no longer in {before}.")
        elif config.precision != faster and (config.precision == "bf16" or start is not None):
            notes.append(f"Computing in {config.precision}; {faster} would be faster here, because {reason}.")
        if start is None:
            notes += self.world.share(lambda: setup.start_notes(config, self.tokenizer, self.model.config))
        else:
            notes.append(f"Resuming from {start.name}.")
        if self.resumed and config.max_time is not None:
            notes.append(f"Training stops after {config.max_time:g} minutes (max_time).")
        if self.text.is_lossy:
            notes.append(
                "The tokenizer does not restore the text exactly: bits per byte and perplexity per word leave out what it "
                "loses, and do not compare with those of other tokenizers."
            )
        return notes

    def _summary(self, why_not_compiled: str) -> str:
        """The run in one line."""
        config, world = self.config, self.world
        shared = f", {world.context_parallel} per sequence" if world.context_parallel > 1 else ""
        processes = f" x {world.size} processes ({config.parallel}){shared}" if world.size > 1 else ""
        compiled = f"not compiled because {why_not_compiled}" if why_not_compiled else f"compile {config.compile}"
        return (
            f"{config.preset}: {self.model.n_parameters:,} parameters, vocabulary of {self.tokenizer.vocab_size:,}; "
            f"{self.device.type}{processes}, {config.precision}, {compiled}; {config.optimizer}, peak learning rate "
            f"{config.learning_rate:g}, {config.schedule} schedule after {warmup_steps(config):,} steps of warm-up; "
            f"{config.steps:,} steps of {self.tokens_per_step:,} tokens, from {self.text.name}, to {config.run_directory}"
        )

    def run(self) -> TrainingResult:
        """Take the remaining steps, with evaluations and checkpoints in between."""
        config, run = self.config, self.config.run_directory
        minutes = math.inf if config.max_time is None else config.max_time
        interruptible = interrupts(alone=self.world.size == 1, seconds=60 * minutes)
        try:
            with memory_of_steps(self.device), self._reporter() as report, interruptible as stop:
                for note in self.notes:
                    report.say(note)
                if not self.resumed:
                    self._evaluate(report, stop)
                    self.save()  # so that a checkpoint exists from the start
                elif self._evaluation_is_due and self._validation_loss is None:  # the run ended before it was measured
                    self._evaluate_saved(report)
                if self.step >= config.steps:
                    report.say(f"The run in {run} has already taken all of its {config.steps} steps.")
                stopped = False
                while self.step < config.steps and not stopped:
                    stopped = self.take_step(report, stop)
                    if self._evaluation_is_due and not stopped:
                        stopped = not self._evaluate(report, stop)
                    if self._evaluation_is_due or stopped:
                        self.save()
                self.writer.finish()
                if stopped:  # the step is saved before it is evaluated, since there may be little time
                    late = not stop.signalled and time.monotonic() >= stop.deadline
                    why = f" (max_time is over: {minutes:g} minutes)" if late else ""
                    report.say(f"Stopped after step {self.step}, which is saved{why}. It is now evaluated.")
                    self._evaluate_saved(report)
        finally:
            self.text.loader.close()
            self.writer.wait()  # finish writing the current checkpoint even after an error
        return TrainingResult(run, self.step, finished=self.step >= config.steps)

    def _reporter(self) -> NullReporter:
        if not self.world.is_main:
            return NullReporter()
        config, run = self.config, self.config.run_directory
        with nullcontext() if self.resumed else removed_on_failure(run):  # without a reporter, a new run leaves no files
            self._record.begin(config.to_dict(), sys.argv)
            return Reporter(run, self.step, config.steps, config.track, record=config.to_dict(), resumed=self.resumed)

    def take_step(self, report: NullReporter, stop: "Stop") -> bool:
        """Take one optimiser step, or skip it if its gradient is not finite; return whether any process was asked to stop."""
        self.writer.raise_failure()
        start = time.perf_counter()
        batches = self.text.loader.next_step()
        waiting = time.perf_counter() - start
        # The seed of dropout is derived from the step, so that checkpoints need not store a state.
        seeds = np.random.SeedSequence((self.config.seed, self.step, self.world.rank)).generate_state(1, np.uint64)
        torch.manual_seed(int(seeds[0] >> np.uint64(1)))
        losses, norms, targets = self.parallel.gradient(batches)
        # Copy to the host once, at the end: a copy waits for the device, which then idles until the next pass is queued.
        copied = torch.stack([x.to(losses[0].dtype) for x in (*losses, *norms)]).tolist()
        loss, norm = sum(copied[: len(losses)]), sum(copied[len(losses) :]) / len(norms)
        finite = math.isfinite(loss) and math.isfinite(norm)
        loss, norm, infinite, stopped = self.world.sum(loss, norm, not finite, stop.requested)
        loss = loss / targets if targets else math.nan  # a masked model may have nothing to predict
        rates = self.optimizer.set_learning_rate(learning_rate(self.step, self.config))
        self.step += 1
        self._validation_loss = None
        if infinite:
            self.skipped += 1
            self._skipped_in_a_row += 1
        else:
            self._skipped_in_a_row = 0
            self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = max(time.perf_counter() - start, 1e-9)
        numbers = {"loss": loss, **rates, "gradient_norm": norm / self.world.size}
        numbers |= {"tokens_per_second": self.tokens_per_step / seconds, "waiting": waiting / seconds}
        if self.skipped:
            numbers["skipped"] = self.skipped
        report.step(self.step, self.tokens_per_step, numbers)
        if infinite:
            self._report_skipped(loss, report)
        return stopped > 0

    def _report_skipped(self, loss: float, report: NullReporter) -> None:
        """Say why the step was skipped. Raises DivergedError after too many in a row."""
        reason = "its gradient was not finite" if math.isfinite(loss) else f"its loss was {loss}"
        if self._skipped_in_a_row < self.config.max_skipped:
            report.say(f"step {self.step} was skipped ({self.skipped} so far in this run): {reason}")
            return
        self.writer.finish()
        raise self._diverged(
            f"Step {self.step} is the last of {self._skipped_in_a_row} consecutive skipped steps (`max_skipped`), because "
            f"{reason}; the last checkpoint is {checkpoints.last_checkpoint(self.config.run_directory)}"
        )

    @property
    def _evaluation_is_due(self) -> bool:
        return self.step > 0 and (self.step % self.config.eval_every == 0 or self.step == self.config.steps)

    def _evaluate(self, report: NullReporter, stop: "Stop | None" = None) -> bool:
        """Measure the validation loss, and report it after a step; False if a process is asked to stop before it is known."""
        loss = self._validation_loss = self.validation_loss(stop)
        if loss is None:
            return False
        if not math.isfinite(loss):
            raise self._diverged(f"The validation loss became {loss} at step {self.step}")
        if self.step > 0:
            report.validation(self.step, loss, self.text.bits_per_byte(loss))
        return True

    def _evaluate_saved(self, report: NullReporter) -> None:
        """Report the validation loss of this step and add it to the step's checkpoint; an interrupt skips this."""
        try:
            self._evaluate(report)
        except KeyboardInterrupt:
            report.say(f"Step {self.step} is not evaluated.")
        if self.world.is_main and self._validation_loss is not None:
            checkpoint = checkpoints.checkpoint_path(self.config.run_directory, self.step)
            checkpoints.add_validation_loss(checkpoint, self._validation_loss)

    def _spread_windows(self) -> tuple[int, list[int]]:
        """The length of the windows in which the held-out text is measured, and their starts: the same ones every time.

        A text that is shorter than a window is read as one shorter window. Raises LineartimeError if processes share sequences
        and the text is too short for a whole chunk for each of them.
        """
        config, text = self.config, self.text.validation
        length = config.context_length
        if self.world.context_parallel > 1 and len(text) <= length:  # the longest window that can be sliced
            unit = setup.slice_unit(self.model.config, self.world)
            length = (len(text) - 1) // unit * unit
            if length <= 0:
                few = f"The held-out text has {len(text)} tokens, too few for slices of whole chunks ({unit} + 1)"
                raise LineartimeError(f"{few}: give more text, or a smaller `context_parallel`.")
        length = text_length(length, config.task, self.tokenizer, config.packed)
        return length, spread_windows(text, config.eval_windows, length)

    @torch.no_grad()
    def validation_loss(self, stop: "Stop | None" = None) -> float | None:
        """The mean loss over all held-out targets, in nats; None if any process is asked to stop before the end."""
        world, config, text, objective = self.world, self.config, self.text.validation, self.parallel.objective
        total, count, stopped = 0.0, 0, False
        objective.eval()
        together = config.batch_size * world.data_ranks
        for first in range(0, len(self._window_starts), together):
            stopped = stop is not None and world.sum(stop.requested) != [0]
            if stopped:
                break
            own = list(range(first, min(first + together, len(self._window_starts))))[world.data_rank :: world.data_ranks]
            read = own or [first]  # FSDP needs every process in each forward pass
            windows = torch.stack([read_window(text, self._window_starts[index], self._window_length + 1) for index in read])
            batch = evaluation_batch(config.task, windows, self.tokenizer, read, packed=config.packed)
            if not own:
                batch = batch._replace(targets=torch.full_like(batch.targets, IGNORED))
            # These shapes are too rare to be worth compiling.
            with torch.compiler.set_stance("force_eager"), autocast(self.device, config.precision == "bf16"):
                total += float(objective(*part_of(batch, world, self.device)))
            count += int((batch.targets != IGNORED).sum())
        objective.train()
        if stopped:
            return None
        total, targets = world.sum(total, count / world.context_parallel)
        if not targets:
            raise LineartimeError(f"The held-out text, {text.name}, has no token to predict: give more text to hold out.")
        return total / targets

    def _diverged(self, what: str) -> DivergedError:
        rate = f"`learning_rate` below {self.config.learning_rate:g}"
        return DivergedError(f"{what}: start another run in another folder, with {rate} or more `warmup_steps`.")

    def save(self) -> None:
        """Start writing a checkpoint of this step. All processes must call this together."""
        position = merge_states(self.world.gather(self.text.loader.state()))
        self.writer.begin(
            checkpoints.TrainingState(
                step=self.step,
                text=self.text.identity,
                data=position,
                config=self.config.to_dict(),
                skipped=self.skipped,
                validation_loss=self._validation_loss,
            )
        )


def memory_of_steps(device: torch.device) -> AbstractContextManager[None]:
    """A context in which steps on a CPU keep the memory that they free."""
    return freed_memory_kept() if device.type == "cpu" else nullcontext()


@dataclass
class Stop:
    """Whether a signal has asked the run to stop, or its deadline has passed, a time of `time.monotonic`."""

    signalled: bool = False
    deadline: float = math.inf

    @property
    def requested(self) -> bool:
        """Whether the run has to stop."""
        return self.signalled or time.monotonic() >= self.deadline


@contextmanager
def interrupts(alone: bool, seconds: float = math.inf) -> Iterator[Stop]:
    """Turn SIGINT (Ctrl-C), SIGTERM, SIGHUP (a closed terminal) and the end of `seconds` into a request to stop.

    If the process is `alone`, a second SIGINT acts as usual. Otherwise, a signal may arrive many times, because it is sent to
    the process group and torchrun also forwards it to each of its processes.
    """
    stop = Stop(deadline=time.monotonic() + seconds)
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield stop
        return
    previous = {number: signal.getsignal(number) for number in stop_signals()}

    def request(number: int, _frame: object) -> None:
        stop.signalled = True
        if alone and number == signal.SIGINT:
            signal.signal(number, previous[number])

    for number in previous:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
