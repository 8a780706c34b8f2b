"""Training, from top to bottom: options, processes, set-up, steps, evaluations, checkpoints."""

import dataclasses
import math
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lineartime import checkpoint as checkpoints
from lineartime.choices import Precision
from lineartime.data import Batch, evaluation_batch, merge_states, read_window, spread_windows, text_length
from lineartime.errors import DivergedError, LineartimeError, did_you_mean, require_packages
from lineartime.fields import decode
from lineartime.files import removed_on_failure
from lineartime.host import freed_memory_kept, stop_signals
from lineartime.machine import autocast, choose_device, using_threads
from lineartime.models.language_model import CausalLM, MaskedLM
from lineartime.ops.cross_entropy import IGNORED
from lineartime.runs.curve import draw_curve
from lineartime.runs.metrics import NullReporter, Reporter, StepMetrics, losses, read_metrics
from lineartime.runs.record import RunRecord
from lineartime.training.config import TrainConfig, learning_rate
from lineartime.training.optimizers import build_optimizer
from lineartime.training.parallel import World, join_world, parallelize, part_of, read_environment
from lineartime.training.saving import (
    CheckpointWriter,
    check_shared,
    complete,
    locked_run,
    restore_moments,
    resumed_config,
    saved_config,
    starting_point,
)
from lineartime.training.setup import Setup, precision_notes, set_up, start_notes


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
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    for name in options:
        if name not in names:
            raise TypeError(f"train has no option {name!r}{did_you_mean(name, names)}.")
    if not isinstance(options.get("preset", ""), str):  # a `ModelConfig` sets several options
        described = TrainConfig(**options)
        options |= {name: getattr(described, name) for name in ("preset", "task", "override")}
    return train_completed(complete(options), options)


def train_completed(config: TrainConfig, given: Collection[str]) -> TrainingResult:
    """Train with a complete set of options. `given` names those that were given; the others are defaults."""
    environment = read_environment()
    device = choose_device(config.device, environment.local_rank)
    together = join_world(device, timeout=config.timeout, context_parallel=config.context_parallel)
    record = RunRecord(config.run_directory)
    kept = torch.random.fork_rng([device] if device.type == "cuda" else [])  # a step seeds the generators of the caller
    own_precision = autocast(device, bf16=False)  # an autocast of the caller would change backward passes and optimisers
    threads = using_threads(config.threads)
    with record.errors(), kept, threads, own_precision, together as world, locked_run(config, world):
        # The trainer gets no name: it must be freed before the processes disconnect, which could deadlock (`join_world`).
        if environment.torchelastic_restart_count > 0:  # torchrun has replaced a lost process: resume if there is a checkpoint
            exists = bool(checkpoints.list_checkpoints(config.run_directory))
            config = dataclasses.replace(config, resume=config.resume or exists)
        start = world.share(lambda: starting_point(config))
        check_shared(config.run_directory, world)
        return prepare(config, world, start, given, record).run()


def prepare(
    config: TrainConfig,
    world: World | None = None,
    start: Path | None = None,
    given: Collection[str] = (),
    record: RunRecord | None = None,
) -> "Trainer":
    """The trainer of a new run, or of a run that starts from a checkpoint; its folder is not touched. Raises as `train`."""
    world = world or World()
    before: Precision | None = None  # the precision of the run that is resumed
    with world.raise_on_all_ranks():
        config.check()
        if "wandb" in config.track:
            require_packages("wandb", extra="wandb", purpose="The tracker wandb")
        if start is not None:
            started = saved_config(start)
            taken = checkpoints.read_training_state(start).step
            config = resumed_config(config, started, given, taken)
            config.check()
            before = started.precision
    setup = set_up(config, world, start)
    notes = precision_notes(setup.config.precision, before, setup.device)
    return Trainer(setup, world, record or RunRecord(config.run_directory), start, notes)


class Trainer:
    """A model with its optimiser and its text, and the steps taken so far.

    `start` is the checkpoint to resume from; the model already holds its weights. `notes` are printed before training starts.
    """

    def __init__(
        self, setup: Setup, world: World, record: RunRecord, start: Path | None = None, notes: Sequence[str] = ()
    ) -> None:
        self.config = config = setup.config
        self.setup = setup
        self.world = world
        self.record = record
        self.model = setup.model
        self.text = setup.text
        self.parallel = parallelize(setup.objective, config, world)  # copies the weights, so they must be final by now
        self.optimizer = build_optimizer(self.model, config)
        self.writer = CheckpointWriter(
            config.run_directory, self.model, self.optimizer, setup.tokenizer, world, config.keep_every
        )
        self.step = 0
        self.skipped = 0
        self._skipped_in_a_row = 0
        self._validation_loss: float | None = None  # at the current step
        self.resumed = start is not None
        with world.raise_on_all_ranks():
            self.validation = Validation(self.parallel.objective, setup, world)
            if start is not None:
                self._restore(start)
        if start is None:
            notes = [*notes, *world.share(lambda: start_notes(config, setup.tokenizer, self.model.config))]
        else:
            with world.raise_on_all_ranks():
                restore_moments(start, self.optimizer, self.step - self.skipped, world)
        self.notes = [*notes, *self.text.splits, setup.summary(world), self.optimizer.summary(config), *self._more_notes(start)]

    def _more_notes(self, start: Path | None) -> list[str]:
        """What the user may want to know before training starts."""
        config = self.config
        notes = []
        if start is not None:
            notes.append(f"Resuming from {start.name}.")
            if config.max_time is not None:
                notes.append(f"Training stops after {config.max_time:g} minutes (max_time).")
        if config.task == "prefix-lm":
            each = "document" if config.packed else "sequence"
            notes.append(f"Validation reads the first half of each {each} as its prefix and measures what follows.")
        if self.text.is_lossy:
            notes.append(
                "The tokenizer does not restore the text exactly: bits per byte and perplexity per word leave out what it "
                "loses, and do not compare with those of other tokenizers."
            )
        return notes

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
        self.text.loader.restore(state.data.to_dict())

    def run(self) -> TrainingResult:
        """Take the remaining steps, with evaluations and checkpoints in between."""
        steps, run = self.config.steps, self.config.run_directory
        try:
            with self.world.raise_on_all_ranks():
                reporter = self._reporter()
            minutes = math.inf if self.config.max_time is None else self.config.max_time
            interruptible = interrupts(alone=self.world.size == 1, seconds=60 * minutes)
            with memory_of_steps(self.setup.device), reporter as report, interruptible as stop:
                for note in self.notes:
                    report.say(note)
                if not self.resumed:
                    self._validate(stop)
                    self.save()  # so that a checkpoint exists from the start
                elif self._evaluation_is_due and self._validation_loss is None:  # the run ended before it was measured
                    self._evaluate_saved(report)
                if self.step >= steps:
                    report.say(f"The run in {run} has already taken all of its {steps} steps.")
                stopped = False
                while self.step < steps and not stopped:
                    stopped = self.take_step(report, stop)
                    if self._evaluation_is_due and not stopped:
                        stopped = not self._evaluate(report, stop)
                    if self._evaluation_is_due or stopped:
                        self.save()
                self.writer.finish()
                if stopped:  # the step is saved before it is evaluated, since there may be little time
                    late = stop.is_late and not stop.signalled
                    why = f" (max_time is over: {minutes:g} minutes)" if late else ""
                    report.say(f"Stopped after step {self.step}, which is saved{why}. It is now evaluated.")
                    self._evaluate_saved(report)
        finally:
            self.text.loader.close()
            self.writer.wait()  # finish writing the current checkpoint even after an error
        return TrainingResult(run, self.step, finished=self.step >= steps)

    def _reporter(self) -> NullReporter:
        if not self.world.is_main:
            return NullReporter()
        config, run = self.config, self.config.run_directory
        with nullcontext() if self.resumed else removed_on_failure(run):  # without a reporter, a new run leaves no files
            self.record.begin(config.to_dict(), sys.argv)
            return Reporter(run, self.step, config.steps, config.track, record=config.to_dict(), resumed=self.resumed)

    def take_step(self, report: NullReporter, stop: "Stop") -> bool:
        """Take one optimiser step, or skip it if its gradient is not finite; return whether any process was asked to stop."""
        start = time.perf_counter()
        batches, failure = self._read()
        waiting = time.perf_counter() - start
        own_targets, targets = self._count_targets(batches, failure)
        loss, norm = self._compute_gradient(batches, own_targets, targets)
        finite = math.isfinite(loss) and math.isfinite(norm)
        loss, norm, infinite, failed, stopped = self.world.sum(loss, norm, not finite, self.writer.failed, stop.requested)
        if failed:
            self.writer.finish()  # raises the error
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
        seconds, norm = time.perf_counter() - start, norm / self.world.size
        report.step(self.step, StepMetrics(loss, rates, norm, self.setup.tokens_per_step, seconds, waiting, self.skipped))
        if infinite:
            self._report_skipped(loss, report)
        return stopped > 0

    def _read(self) -> tuple[list[Batch], Exception | None]:
        """This process's micro-batches of the next step, or none and the error, which is to end all processes."""
        try:
            return self.text.loader.next_step(), None
        except Exception as error:
            return [], error

    def _count_targets(self, batches: Sequence[Batch], failure: Exception | None) -> tuple[list[int], float]:
        """The targets in each micro-batch, and all of the step. If one process could not read, all raise its `failure`."""
        own = [int((batch.targets != IGNORED).sum()) for batch in batches]
        # Processes that share a sequence have the same batches.
        total, failed = self.world.sum(sum(own) / self.world.context_parallel, failure is not None)
        if failed:
            with self.world.raise_on_all_ranks():
                if failure is not None:
                    raise failure
        return own, total

    def _compute_gradient(self, batches: Sequence[Batch], own_targets: list[int], targets: float) -> tuple[float, float]:
        """Run both passes of a step and clip the gradient; return the sum of this process's losses, in nats.

        Also return the norm of the gradient before clipping; if groups of micro-batches are clipped separately, their mean.
        """
        # The seed of dropout is derived from the step, so that checkpoints need not store a state.
        seeds = np.random.SeedSequence((self.config.seed, self.step, self.world.rank)).generate_state(1, np.uint64)
        torch.manual_seed(int(seeds[0] >> np.uint64(1)))
        device, bf16 = self.setup.device, self.config.precision == "bf16"
        losses: list[Tensor] = []
        norms: list[Tensor] = []
        size = len(batches) // self.parallel.groups
        for start in range(0, len(batches), size):
            weight = self.parallel.loss_weight(sum(own_targets[start : start + size]), max(1.0, targets))
            for index in range(start, start + size):
                with self.parallel.accumulate(last=index == len(batches) - 1):
                    with autocast(device, bf16):
                        loss = self.parallel.objective(*part_of(batches[index], self.world, device))
                    (loss * weight).backward()
                losses.append(loss.detach())
            norms.append(self.parallel.clip(self.config.clip_norm or math.inf))
        self.parallel.finish()
        # Copy to the host once, at the end: a copy waits for the device, which then idles until the next pass is queued.
        numbers = torch.stack([x.to(losses[0].dtype) for x in (*losses, *norms)]).tolist()
        return sum(numbers[: len(losses)]), sum(numbers[len(losses) :]) / len(norms)

    def _report_skipped(self, loss: float, report: NullReporter) -> None:
        """Say why the step was skipped. Raises LineartimeError after too many in a row."""
        reason = "its gradient was not finite" if math.isfinite(loss) else f"its loss was {loss}"
        if self._skipped_in_a_row < self.config.max_skipped:
            report.say(f"step {self.step} was skipped ({self.skipped} so far in this run): {reason}")
            return
        self.writer.finish()
        raise self._diverged(
            f"Step {self.step} is the last of {self._skipped_in_a_row} consecutive skipped steps (",
            "`max_skipped`",
            f"), because {reason}; the last checkpoint is {checkpoints.last_checkpoint(self.config.run_directory)}",
        )

    @property
    def _evaluation_is_due(self) -> bool:
        return self.step > 0 and (self.step % self.config.eval_every == 0 or self.step == self.config.steps)

    def _evaluate(self, report: NullReporter, stop: "Stop | None" = None) -> bool:
        """Report the validation loss of this step; return False if any process is asked to stop before it is known."""
        loss = self._validate(stop)
        if loss is None:
            return False
        report.validation(self.step, loss, self.text.bits_per_byte(loss))
        return True

    def _evaluate_saved(self, report: NullReporter) -> None:
        """Report the validation loss of this step and add it to the step's checkpoint; an interrupt skips this."""
        try:
            self._evaluate(report)
        except KeyboardInterrupt:
            report.say(f"Step {self.step} is not evaluated.")
            return
        loss, checkpoint = self._validation_loss, checkpoints.checkpoint_path(self.config.run_directory, self.step)
        with self.world.raise_on_all_ranks():
            if self.world.is_main and loss is not None:
                checkpoints.add_validation_loss(checkpoint, loss)

    def _validate(self, stop: "Stop | None" = None) -> float | None:
        loss = self._validation_loss = self.validation.loss(stop)
        if loss is not None and not math.isfinite(loss):
            raise self._diverged(f"The validation loss became {loss} at step {self.step}")
        return loss

    def _diverged(self, *what: str) -> LineartimeError:
        rate = ("`learning_rate`", f" below {self.config.learning_rate:g}")
        advice = (": start another run in another folder, with ", *rate, " or more ", "`warmup_steps`", ".")
        return self.world.reported_by_main(DivergedError(*what, *advice))

    def save(self) -> None:
        """Start writing a checkpoint of this step. All processes must call this together."""
        position = merge_states(self.world.gather(self.text.loader.state()))
        self.writer.begin(
            checkpoints.TrainingState(
                step=self.step,
                text=self.text.identity,
                data=decode(checkpoints.TextPosition, position),
                config=self.config.to_dict(),
                skipped=self.skipped,
                validation_loss=self._validation_loss,
            )
        )


def memory_of_steps(device: torch.device) -> AbstractContextManager[None]:
    """A context in which steps on a CPU keep the memory that they free."""
    return freed_memory_kept() if device.type == "cpu" else nullcontext()


class Validation:
    """Evaluates on windows spread evenly over held-out text, the same ones every time.

    `objective` computes the sum of a batch's losses. A text that is shorter than a window is read as one shorter window. Raises
    LineartimeError if processes share sequences and the text is too short for a whole chunk for each of them.
    """

    def __init__(self, objective: nn.Module, setup: Setup, world: World) -> None:
        self._objective = objective
        self._setup = setup
        self._world = world
        self._length = setup.config.context_length
        available, unit = len(setup.text.validation), setup.slice_unit
        if world.context_parallel > 1 and available <= self._length:  # the longest window that can be sliced
            self._length = (available - 1) // unit * unit
            if self._length <= 0:
                raise LineartimeError(
                    f"The held-out text has {available} tokens, too few for slices of whole chunks ({unit} + 1): "
                    "give more text, or a smaller `context_parallel`.",
                )
        self._length = text_length(self._length, setup.config.task, setup.tokenizer, setup.config.packed)
        self._starts = spread_windows(setup.text.validation, setup.config.eval_windows, self._length)

    @torch.no_grad()
    def loss(self, stop: "Stop | None" = None) -> float | None:
        """The mean over all targets, in nats; None if any process is asked to stop before the end."""
        setup, world = self._setup, self._world
        total, count, stopped = 0.0, 0, False
        self._objective.eval()
        with torch.compiler.set_stance("force_eager"):  # these shapes are too rare to be worth compiling
            for batch in self._batches():
                stopped = stop is not None and world.sum(stop.requested) != [0]
                if stopped:
                    break
                with autocast(setup.device, setup.config.precision == "bf16"):
                    total += float(self._objective(*part_of(batch, world, setup.device)))
                count += int((batch.targets != IGNORED).sum())
        self._objective.train()
        if stopped:
            return None
        total, targets = world.sum(total, count / world.context_parallel)
        if not targets:
            raise LineartimeError(
                f"The held-out text, {setup.text.validation.name}, has no token to predict: give more text to hold out."
            )
        return total / targets

    def _batches(self) -> list[Batch]:
        """This process's batches. All processes have equally many, since FSDP needs every process in each forward pass."""
        world, text = self._world, self._setup.text.validation
        together = self._setup.config.batch_size * world.data_ranks
        batches = []
        for first in range(0, len(self._starts), together):
            indices = list(range(first, min(first + together, len(self._starts))))
            own = indices[world.data_rank :: world.data_ranks]
            windows = [read_window(text, self._starts[index], self._length + 1) for index in own or indices[:1]]
            config = self._setup.config
            batch = evaluation_batch(
                config.task, torch.stack(windows), self._setup.tokenizer, own or indices[:1], packed=config.packed
            )
            batches.append(batch if own else batch._replace(targets=torch.full_like(batch.targets, IGNORED)))
        return batches


@dataclass
class Stop:
    """Whether a signal has asked the run to stop, or its deadline has passed, a time of `time.monotonic`."""

    signalled: bool = False
    deadline: float = math.inf

    @property
    def requested(self) -> bool:
        """Whether the run has to stop."""
        return self.signalled or self.is_late

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.deadline


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
