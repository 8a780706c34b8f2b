"""The training loop: batches in, checkpoints and metrics out.

Shapes: B batch, T tokens of context.
"""

import dataclasses
import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from lineartime import checkpoint as checkpoints
from lineartime.data import Corpus, Tokenizer, default_cache, load_corpus, load_tokenizer, merge_states, tokenizer_for
from lineartime.errors import LineartimeError
from lineartime.machine import autocast, choose_compile, choose_device, choose_precision
from lineartime.models import set_context_parallel
from lineartime.models.config import ModelConfig
from lineartime.models.heads import LanguageModel, build_model
from lineartime.ops.cross_entropy import IGNORED
from lineartime.runs.metrics import Reporter, Silent
from lineartime.runs.record import write_record
from lineartime.training.config import TrainConfig
from lineartime.training.distributed import World, join_world, local_rank, started_again
from lineartime.training.folder import check_shared, claimed, starting_point
from lineartime.training.interrupts import Stop, interrupts
from lineartime.training.optim import build_optimizer, learning_rate
from lineartime.training.parallel import parallelize, part_of
from lineartime.training.resuming import resumed_config, saved_config
from lineartime.training.saving import CheckpointWriter, restore_moments
from lineartime.training.text import Text
from lineartime.training.validation import Validation


def train(config: TrainConfig, left_out: TrainConfig | None = None) -> Path:
    """Train a model as the options say, or go on with the run in their folder, and return that folder.

    Started by torchrun in several processes, they share the work. An interrupt (SIGINT, SIGTERM) ends training after the
    current step, which is saved. Resumed, a run gives the losses of an uninterrupted one: to the bit on a CPU with the same
    number of processes and threads.

    Args:
        config: the options.
        left_out: for a run that is resumed, what an option is that nobody asked for; the default is `TrainConfig()`.

    Raises:
        LineartimeError: for whatever the user can mend; checkpoints written before stay.
    """
    device = choose_device(config.device, local_rank())
    together = join_world(device, timeout=config.timeout, context_parallel=config.context_parallel)
    with together as world, claimed(config, world):
        prepare(config, world, left_out).run()
    return config.run_directory


def prepare(config: TrainConfig, world: World | None = None, left_out: TrainConfig | None = None) -> "Trainer":
    """The trainer of a new run, or that of the run in the folder, back at its last checkpoint; raises as `train`."""
    world = world or World()
    world.share(config.check)
    if started_again():  # by torchrun, after one of its processes was lost: what there is, is gone on with
        config = dataclasses.replace(config, resume=config.resume or bool(checkpoints.list_checkpoints(config.run_directory)))
    last, notes = world.share(lambda: starting_point(config))
    check_shared(config.run_directory, world)
    if last is None:
        return Trainer(config, world)
    config = resumed_config(config, saved_config(last), left_out or TrainConfig())
    world.share(config.check)
    return Trainer(config, world, last, notes)


class Trainer:
    """A model, its optimiser and its data, and the steps they have taken together.

    Args:
        config: the options.
        world: the processes of the run.
        start: the checkpoint to go on from.
        notes: what there is to say about it.
    """

    def __init__(self, config: TrainConfig, world: World, start: Path | None = None, notes: Sequence[str] = ()) -> None:
        self.world = world
        self.device = choose_device(config.device, world.local_rank)
        corpus: Corpus = world.first_on_each_machine("the corpus", lambda: load_corpus(config.data))
        cache = config.cache or default_cache()
        self.tokenizer: Tokenizer = (
            load_tokenizer(start)
            if start is not None
            else world.first_on_each_machine("the tokenizer", lambda: tokenizer_for(config.tokenizer, corpus, cache))
        )
        model_config = world.share(lambda: config.model_config(self.tokenizer.vocab_size))
        world.share(lambda: config.rows(0, world.data_ranks))  # so that an error is said once
        rows = config.rows(world.data_rank, world.data_ranks)
        self.text: Text = world.first_on_each_machine("the text", lambda: Text(corpus, self.tokenizer, config, rows, cache))
        self.tokens_per_step = rows.per_step * config.context_length

        torch.manual_seed(config.seed)
        try:
            self.model: LanguageModel = build_model(model_config).to(self.device)
        except ValueError as error:  # what a layer does not allow
            raise LineartimeError(f"--override: {error}") from None
        slice_unit = world.share(lambda: self._set_context_parallel(model_config, config.context_length))
        if not world.is_main:  # for which an error has been said already
            self._set_context_parallel(model_config, config.context_length)
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        tokens = self.tokens_per_step * config.steps
        compiled = world.share(lambda: choose_compile(config.compile, self.device, parameters, tokens))
        # What "auto" and defaults came to is kept in the checkpoints, so that a resumed run computes the same.
        self.config = config = dataclasses.replace(
            config,
            precision=world.share(lambda: choose_precision(config.precision, self.device)),
            compile="on" if compiled else "off",
            tokens_per_batch=self.tokens_per_step,
        )
        if config.recompute:
            self.model.recompute_blocks()
        if compiled:
            self.model.compile_blocks()
        if start is not None:
            self.model.load_state_dict(checkpoints.load(start).state_dict())
        self.parallel = parallelize(self.model, config, world)  # by now the weights are what they are to be
        self.optimizer = build_optimizer(self.model, config)
        self.writer = CheckpointWriter(config.run_directory, self.model, self.optimizer, self.tokenizer, world)
        self.validation = Validation(self.parallel.objective, self.text.validation, self.tokenizer, config, world, slice_unit)
        self.step = 0
        self.skipped = 0
        self._skipped_in_a_row = 0
        self._validation_loss: float | None = None  # of this very step
        if start is not None:
            self._restore(start)
        self.resumed = start is not None
        self.notes = [*notes, self._summary(parameters)]
        if start is not None:
            self.notes.append(f"Going on from {start.name}.")
        if self.text.is_lossy:
            self.notes.append(
                "The tokenizer does not give back the text as it was: bits per byte and perplexity per word leave out what it "
                "loses, and do not compare with those of other tokenizers."
            )

    def _set_context_parallel(self, model_config: ModelConfig, context_length: int) -> int:
        """Have the processes share sequences; what the length of one has to be a multiple of for that."""
        try:
            set_context_parallel(self.model, self.world.context_group)
        except ValueError as error:  # another mixer than FLASH
            raise LineartimeError(f"--context-parallel: {error}") from None
        ranks, chunk_size = self.world.context_parallel, getattr(model_config.mixer, "chunk_size", 1)
        if ranks > 1 and context_length % (ranks * chunk_size):
            raise LineartimeError(
                f"--context-length is {context_length}, but must be a multiple of --context-parallel {ranks} x chunk_size "
                f"{chunk_size} = {ranks * chunk_size}."
            )
        return ranks * int(chunk_size)

    def _restore(self, start: Path) -> None:
        """Take up what a checkpoint holds besides weights; LineartimeError if the text is another one now."""
        facts = checkpoints.read_training_state(start)
        if facts.text != self.text.identity:
            raise LineartimeError(
                f"The text of the run in {self.config.run_directory} has changed: it was {facts.text}, and now it is "
                f"{self.text.identity}; bring back the old text, or start another run in another --out."
            )
        self.step, self.skipped = facts.step, facts.skipped
        restore_moments(start, self.model, self.optimizer, self.step - self.skipped, self.world)
        self.text.loader.restore(facts.data)

    def _summary(self, parameters: int) -> str:
        config, world = self.config, self.world
        together = "" if world.size == 1 else f" x {world.size} processes ({config.parallel})"
        if world.context_parallel > 1:
            together += f", {world.context_parallel} to a sequence"
        return (
            f"{config.preset}: {parameters:,} parameters, vocabulary of {self.tokenizer.vocab_size:,}, "
            f"{self.device.type}{together}, {config.precision}{', compiled' if config.compile == 'on' else ''}; "
            f"{config.steps:,} steps of {self.tokens_per_step:,} tokens, from {self.text.name}, to {config.run_directory}"
        )

    def run(self) -> None:
        """Take all steps that are left, evaluating and writing checkpoints on the way."""
        config, run = self.config, self.config.run_directory
        try:
            with self._reporter() as report, interrupts() as stop:
                for note in self.notes:
                    report.say(note)
                if not self.resumed:
                    self._validate()
                    self._save()  # so that there is one from the first moment
                if self.step >= config.steps:
                    report.say(f"The run in {run} has already taken all of its {config.steps} steps.")
                while self.step < config.steps:
                    stopped = self._take_step(report, stop)
                    if self.step % config.eval_every == 0 or self.step == config.steps:
                        loss = self._validate()
                        report.validation(self.step, loss, self.text.bits_per_byte(loss))
                        self._save()
                    elif stopped:
                        self._save()
                    if stopped and self.step < config.steps:
                        self.writer.finish()
                        report.say(f"Stopped after step {self.step}, which is saved: go on by {self._command()}")
                        break
                self.writer.finish()
        finally:
            self.text.loader.close()
            self.writer.wait()  # whatever has happened, the checkpoint that is being written is worth having

    def _reporter(self) -> Reporter | Silent:
        if not self.world.is_main:
            return Silent()
        config = self.config
        write_record(config.run_directory, config.to_dict(), sys.argv)
        return Reporter(config.run_directory, self.step, config.steps, config.track, record=config.to_dict())

    def _take_step(self, report: Reporter | Silent, stop: Stop) -> bool:
        """One step of the optimiser, unless a number in it is not finite; whether any process was asked to stop."""
        config, world = self.config, self.world
        start = time.perf_counter()
        batches = self.text.loader.next_step()
        waited = time.perf_counter() - start
        own_targets = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
        [targets] = world.sum(own_targets / world.context_parallel)  # those that share a sequence have the same batches
        targets = max(1.0, targets)
        # The mean over all processes of what they add up to is the gradient of the mean loss: of this replica, or of all.
        weight = world.context_parallel / max(1, own_targets) if self.parallel.local else world.size / targets

        torch.manual_seed(_dropout_seed(config.seed, self.step, world.rank))
        self.model.train()
        total = 0.0
        for index, batch in enumerate(batches):
            with self.parallel.accumulate(last=index == len(batches) - 1):
                with autocast(self.device, config.precision == "bf16"):
                    loss = self.parallel.objective(*part_of(batch, world, self.device))
                (loss * weight).backward()
            total += float(loss.detach())
        norm = self.parallel.clip(config.clip_norm or math.inf)
        finite = math.isfinite(total) and math.isfinite(norm)
        total, infinite, failed, stopped = world.sum(total, not finite, self.writer.failed, stop.requested)
        if failed:
            self.writer.finish()  # which says why

        rate = learning_rate(self.step, config)
        self.step += 1
        self._validation_loss = None
        if infinite:
            self._skip(total / targets, report)
        else:
            self._skipped_in_a_row = 0
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        self.optimizer.zero_grad()
        report.step(
            self.step,
            loss=total / targets,
            learning_rate=rate,
            gradient_norm=norm,
            tokens=self.tokens_per_step,
            waiting=waited,
            skipped=self.skipped,
        )
        return stopped > 0

    def _skip(self, loss: float, report: Reporter | Silent) -> None:
        """Count a step that changes nothing; LineartimeError if there were too many in a row."""
        self.skipped += 1
        self._skipped_in_a_row += 1
        what = "its gradient was not finite" if math.isfinite(loss) else f"its loss was {loss}"
        if self._skipped_in_a_row < self.config.max_skipped:
            report.skipped(self.step, what)
            return
        self.writer.finish()
        last = self.world.share(lambda: checkpoints.last_checkpoint(self.config.run_directory))
        raise LineartimeError(
            f"Step {self.step} is the last of {self._skipped_in_a_row} in a row that changed nothing (--max-skipped), because "
            f"{what}; {last} is the last checkpoint: start another run in another --out with a --learning-rate below "
            f"{self.config.learning_rate:g} or more --warmup-steps."
        )

    def _validate(self) -> float:
        loss = self._validation_loss = self.validation.loss()
        if not math.isfinite(loss):
            raise LineartimeError(
                f"The validation loss became {loss} at step {self.step}, and training stopped: start another run in another "
                f"--out with a --learning-rate below {self.config.learning_rate:g} or more --warmup-steps."
            )
        return loss

    def _save(self) -> None:
        data = merge_states(self.world.gather(self.text.loader.state()))
        self.writer.begin(
            checkpoints.TrainingState(
                self.step, self.skipped, self._validation_loss, self.text.identity, data, self.config.to_dict()
            )
        )

    def _command(self) -> str:
        start = "lineartime"
        if self.world.size > 1:
            start = f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE', self.world.size)} -m lineartime"
        return f"{start} train --resume --out {shlex.quote(str(self.config.run_directory))}"


def _dropout_seed(seed: int, step: int, rank: int) -> int:
    """A seed for what a step draws in the model: nothing of it has to be kept in checkpoints."""
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0] >> np.uint64(1))
