"""The training loop: batches in, checkpoints and metrics out.

Shapes: B batch, T tokens of context.
"""

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from lineartime.data import (
    Rows,
    Tokenizer,
    TokenStream,
    cached_loader,
    default_cache,
    load_corpus,
    load_tokenizer,
    token_stream,
)
from lineartime.data.batches import check_long_enough
from lineartime.errors import LineartimeError
from lineartime.evaluation.perplexity import autocast, bits_per_byte, mean_loss
from lineartime.models.heads import LanguageModel, build_model
from lineartime.training import checkpoint as checkpoints
from lineartime.training.config import TrainConfig, resumed_config, saved_config
from lineartime.training.machine import choose_compile, choose_device, choose_precision
from lineartime.training.optim import build_optimizer, learning_rate
from lineartime.training.reporting import Reporter


def train(config: TrainConfig) -> Path:
    """Train a model as the options say, or go on with the run in their folder, and return that folder.

    Resumed, a run gives the losses of an uninterrupted one: to the bit on a CPU with the same number of threads.

    Raises:
        LineartimeError: for whatever the user can mend; checkpoints written before stay.
        KeyboardInterrupt: after an interrupt (Ctrl-C), once the current step is taken and saved.
    """
    prepare(config).run()
    return config.run_directory


def prepare(config: TrainConfig) -> "Trainer":
    """The trainer of a new run, or that of the run in the folder, back at its last checkpoint; raises as `train`."""
    config.check()
    run = config.run_directory
    if checkpoints.is_checkpoint(run):
        raise LineartimeError(f"--out {run} is a checkpoint: give the folder of the run, or a new one.")
    if run.exists() and not run.is_dir():
        raise LineartimeError(f"--out {run} is a file: give a folder.")
    if not config.resume:
        if checkpoints.list_checkpoints(run):
            raise LineartimeError(f"{run} already holds a run: go on with it by --resume, or choose another folder with --out.")
        trainer = Trainer(config, load_tokenizer(config.tokenizer))
    else:
        last = checkpoints.last_checkpoint(run)
        saved = checkpoints.read_training_state(last)
        trainer = Trainer(resumed_config(config, saved_config(last), left_out=TrainConfig()), load_tokenizer(last))
        tokens = len(trainer.train_stream)
        if tokens != saved.training_tokens:
            raise LineartimeError(
                f"The text of the run in {run} has changed: there were {saved.training_tokens:,} tokens to learn from, and now "
                f"there are {tokens:,}; bring back the old text, or start another run in another --out."
            )
        trainer.restore(last, saved)
    checkpoints.remove_partial(run)
    return trainer


@dataclass
class _Stop:
    """Whether an interrupt has asked the run to end."""

    requested: bool = False


class Trainer:
    """A model, its optimiser and its data, and the steps they have taken together."""

    def __init__(self, config: TrainConfig, tokenizer: Tokenizer) -> None:
        self.device = choose_device(config.device)
        self.tokenizer = tokenizer
        model_config = config.model_config(self.tokenizer.vocab_size)
        corpus = load_corpus(config.data)
        cache = config.cache or default_cache()
        self.train_stream: TokenStream = token_stream(corpus, "train", self.tokenizer, cache)
        self.validation_stream: TokenStream = token_stream(corpus, "validation", self.tokenizer, cache)
        self.loader = cached_loader(
            self.train_stream,
            self.tokenizer,
            task=config.task,
            context_length=config.context_length,
            rows=Rows(config.batch_size * config.accumulate, config.batch_size),
            seed=config.seed,
        )
        check_long_enough(self.validation_stream, 1)  # a shorter window than in training does to measure on

        torch.manual_seed(config.seed)
        try:
            self.model: LanguageModel = build_model(model_config).to(self.device)
        except ValueError as error:  # what a layer does not allow
            raise LineartimeError(f"--override: {error}") from None
        self.optimizer = build_optimizer(self.model, config)
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.tokens_per_step = config.batch_size * config.context_length * config.accumulate
        compiled = choose_compile(config.compile, self.device, parameters, self.tokens_per_step * config.steps)
        # What "auto" came to is kept in the checkpoints, so that a resumed run computes the same.
        precision = choose_precision(config.precision, self.device)
        self.config = replace(config, precision=precision, compile="on" if compiled else "off")
        if compiled:
            self.model.compile_blocks()
        self.step = 0
        self.summary = (
            f"{config.preset}: {parameters:,} parameters, {self.device.type}, {precision}"
            f"{', compiled' if compiled else ''}; {config.steps:,} steps of {self.tokens_per_step:,} tokens, "
            f"from {len(self.train_stream):,} tokens of {corpus.name}, to {config.run_directory}"
        )

    def restore(self, path: Path, saved: checkpoints.TrainingState) -> None:
        """Go back to a checkpoint."""
        self.model.load_state_dict(checkpoints.load(path).state_dict())
        self.step = saved.step
        self.loader.restore({"rows": saved.step * self.config.batch_size * self.config.accumulate})
        for name, parameter in self.model.named_parameters():
            kept = {key: saved.tensors.get(f"optimizer.{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
            moments = {key: value.to(self.device) for key, value in kept.items() if value is not None}
            if moments:  # none before the first step
                self.optimizer.state[parameter] = moments
        torch.set_rng_state(saved.tensors["random.cpu"])
        if self.device.type == "cuda" and "random.cuda" in saved.tensors:
            torch.cuda.set_rng_state(saved.tensors["random.cuda"])

    def run(self) -> None:
        """Take all steps that are left, evaluating and writing checkpoints on the way."""
        config = self.config
        run = config.run_directory
        if not checkpoints.list_checkpoints(run):  # so that there is one from the first moment
            self._save(self._validation_loss())
        trackers = ("tensorboard",) if config.tensorboard else ()
        with Reporter(run, self.step, config.steps, trackers, record=config.to_dict()) as report, _interrupts() as stop:
            report.say(self.summary)
            if self.step >= config.steps:
                report.say(f"The run in {run} has already taken all of its {config.steps} steps.")
            while self.step < config.steps:
                loss, gradient_norm, rate = self._take_step()
                numbers = {"loss": loss, "learning_rate": rate, "gradient_norm": gradient_norm, "waiting": 0.0}
                report.step(self.step, **numbers, tokens=self.tokens_per_step, skipped=0)
                interrupted = stop.requested and self.step < config.steps
                if self.step % config.eval_every == 0 or self.step == config.steps or interrupted:
                    validation_loss = self._validation_loss()
                    report.validation(self.step, validation_loss, self._bits_per_byte(validation_loss))
                    self._save(validation_loss)
                if interrupted:
                    report.say(f"Interrupted after step {self.step}, which is saved: go on by --resume --out {run}.")
                    raise KeyboardInterrupt

    def _take_step(self) -> tuple[float, float, float]:
        """One optimiser step: its loss, the norm of its gradient and its learning rate."""
        config = self.config
        self.model.train()
        total = 0.0
        for batch in self.loader.next_step():
            with autocast(self.device, config.precision == "bf16"):
                loss = self.model.loss(batch.inputs.to(self.device), batch.targets.to(self.device)) / config.accumulate
            loss.backward()
            total += loss.item()
        limit = config.clip_norm or math.inf
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise self._diverged(total)
        rate = learning_rate(self.step, config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return total, norm, rate

    def _diverged(self, loss: float) -> LineartimeError:
        last = checkpoints.last_checkpoint(self.config.run_directory)
        what = f"The loss became {loss}" if not math.isfinite(loss) else "The gradient became infinite"
        return LineartimeError(
            f"{what} at step {self.step + 1}, and training stopped; {last} is the last good checkpoint: start another run in "
            f"another --out with a --learning-rate below {self.config.learning_rate:g} or more --warmup-steps."
        )

    def _validation_loss(self) -> float:
        config = self.config
        with torch.compiler.set_stance("force_eager"):  # other shapes, and no gradients: not worth a compilation of their own
            loss = mean_loss(
                self.model,
                self.validation_stream,
                self.tokenizer,
                task=config.task,
                context_length=config.context_length,
                windows=config.eval_windows,
                batch_size=config.batch_size,
                bf16=config.precision == "bf16",
            )
        if not math.isfinite(loss):
            raise self._diverged(loss)
        return loss

    def _bits_per_byte(self, loss: float) -> float | None:
        stream = self.validation_stream
        return bits_per_byte(loss, len(stream), stream.n_bytes) if self.config.task == "clm" else None

    def _save(self, validation_loss: float) -> None:
        tensors = {"random.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state()
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value
        tokens = len(self.train_stream)
        state = checkpoints.TrainingState(self.step, validation_loss, tokens, self.config.to_dict(), tensors)
        checkpoints.save_checkpoint(self.config.run_directory, self.model, self.tokenizer, state)


@contextmanager
def _interrupts() -> Iterator[_Stop]:
    """Turn the first Ctrl-C, or a polite request to end, into a flag; the second one acts as always."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield stop
        return
    numbers: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.getsignal(number) for number in numbers}

    def request(number: int, _frame: object) -> None:
        stop.requested = True
        signal.signal(number, previous[number])

    for number in previous:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
