"""One run in a process of its own: `python -m lineartime.experiments.worker`, with a job as a line of JSON on standard input.

It ends as its parent does: when standard input is closed, it stops after the current step, which is saved.
Shapes: B rows, T tokens.
"""

import json
import math
import os
import shutil
import signal
import statistics
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import Tensor

from lineartime.bench.command import run_benchmark
from lineartime.bench.config import BenchConfig
from lineartime.bench.measure import synchronized
from lineartime.checkpoint import last_checkpoint, list_checkpoints, load_with_tokenizer, read_training_state
from lineartime.data import Batch, ByteTokenizer, TokenStream, load_corpus, token_stream
from lineartime.errors import DivergedError, LineartimeError, reporting_file_errors, typed_first_line
from lineartime.evaluation import evaluate_windowed
from lineartime.experiments.catalogue import INTERRUPTED, Job, Setting
from lineartime.experiments.memory_tasks import TASKS, needle
from lineartime.experiments.runner import OUTCOME_FILE, PROGRESS_FILE, FinalResult, Outcome
from lineartime.files import decoded, write_atomically, write_file
from lineartime.host import cache_folder
from lineartime.machine import autocast, choose_device, using_threads
from lineartime.models.cost import stream_bytes
from lineartime.models.language_model import CausalLM, build_model
from lineartime.models.systems import SIZES
from lineartime.ops.cross_entropy import IGNORED
from lineartime.runs.metrics import MetricsLog
from lineartime.runs.record import RunRecord
from lineartime.screen import SCREEN
from lineartime.training.config import TrainConfig, learning_rate
from lineartime.training.loop import interrupts, memory_of_steps, train
from lineartime.training.optimizers import build_optimizer, matrices_of

DECODED = 32
"""The tokens whose decoding is timed, at most half of the text."""
SEEDS = {"validation": 2**62, "test": 2**62 + 1}
"""The seeds of held-out texts, which are the same for all runs."""

Part = Literal["train", "validation", "test"]


def main() -> int:
    """Read a job, do it, and return the exit status: 0, also for a run that failed; 1 to be tried again; 130 if interrupted."""
    with suppress(OSError, AttributeError):
        os.setpgrp()  # Ctrl-C reaches the parent alone, which passes it on once
    job = decoded(Job, json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_parent, args=(sys.stdin.fileno(),), daemon=True).start()
    try:
        return INTERRUPTED if perform(job) is None else 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # whatever it is, the other runs continue, and the report tells it
        print(typed_first_line(error), file=SCREEN)
        return 1


def _end_with_parent(parent: int) -> None:
    while os.read(parent, 1024):  # not by sys.stdin, whose lock this thread would still hold when Python ends
        pass
    os.kill(os.getpid(), signal.SIGINT)


def perform(job: Job) -> Outcome | None:
    """Do a job, and write and return its outcome; None if it was interrupted.

    That training diverges is an outcome: the same steps would diverge again. After any other error, such as a full disk, which
    is raised, the next call tries again.
    """
    do = {"latency": _latency, "memory": _train_on_task}.get(job.kind, _train)
    try:
        outcome = do(job)
    except DivergedError as error:
        outcome = Outcome(job.kind, str(error))
        print(error, file=SCREEN)
    if outcome is not None:
        content = {name: value for name, value in asdict(outcome).items() if value}
        write_file(job.folder / OUTCOME_FILE, json.dumps(content, indent=1) + "\n")
        (job.folder / PROGRESS_FILE).unlink(missing_ok=True)  # no longer needed
    return outcome


def _latency(job: Job) -> Outcome:
    """Measure all systems at a context, in turn. An interrupted measurement leaves no results."""
    out = job.folder / "bench"
    shutil.rmtree(out, ignore_errors=True)
    results = run_benchmark(BenchConfig(**job.options, out=out))
    return Outcome(job.kind, time=results.started, machine=results.machine, entries=tuple(results.finished))


def _train(job: Job) -> Outcome | None:
    """Train on text, or resume, and measure the model; None if it was interrupted."""
    if list_checkpoints(job.folder):
        trained = train(out=job.folder, resume=True)
    else:
        trained = train(TrainConfig.from_dict({**job.options, "out": str(job.folder)}))
    if not trained.finished:
        return None
    outcome = Outcome(job.kind, tests=tuple(_measured(job)))
    for checkpoint in list_checkpoints(job.folder)[: -1 if job.kind == "run" else None]:  # no longer needed
        shutil.rmtree(checkpoint, ignore_errors=True)
    return outcome


def _measured(job: Job) -> Iterator[FinalResult]:
    """Measure the last model of a run on the beginning of its test split."""
    if not job.tests:
        return
    checkpoint = last_checkpoint(job.folder)
    config = TrainConfig.from_dict(read_training_state(checkpoint).config)
    _, model, tokenizer = load_with_tokenizer(checkpoint, choose_device(config.device))
    corpus = load_corpus(config.data, config.text_column, config.include, config.exclude)
    with using_threads(config.threads):
        for test in job.tests:
            length = config.context_length * test.times_context
            tokens = None if job.test_tokens is None else max(job.test_tokens, length)
            result = evaluate_windowed(
                model,
                token_stream(corpus, "test", tokenizer, config.cache or cache_folder(), tokens),
                tokenizer,
                context_length=length,
                stride=length,
                batch_size=max(1, config.batch_size * config.context_length // length),
                bf16=config.precision == "bf16",
                max_tokens=tokens,
            )
            yield FinalResult(
                name=test.name,
                context_length=length,
                loss=result.loss,
                bits_per_byte=result.bits_per_byte,
                word_perplexity=result.word_perplexity,
                tokens=result.tokens,
                text=result.text,
                by_position=tuple((each.first, each.last, each.loss) for each in result.by_position),
            )


def _train_on_task(job: Job) -> Outcome | None:
    """Train a model on the task of a job, or go on from its last evaluation, and measure it; None if it was interrupted.

    Raises:
        DivergedError: if a loss is not finite.
        LineartimeError: if the text for needles is shorter than a row.
    """
    device, file, record = choose_device(job.options["device"]), job.folder / PROGRESS_FILE, RunRecord(job.folder)
    with record.errors(), using_threads(job.options.get("threads")), memory_of_steps(device), interrupts(alone=True) as stop:
        with reporting_file_errors("read", file):
            saved = load(file.read_bytes()) if file.exists() else {}
        trainer = make_trainer(job, device)
        first = trainer.restore(saved) if saved else 0
        config = trainer.config
        record.begin(config.to_dict(), sys.argv)
        with closing(MetricsLog(job.folder, first)) as log:
            for step in range(first, config.steps):
                log.tokens = (step + 1) * job.options["tokens_per_batch"]
                log.write(step + 1, trainer.take_step(step))
                due = (step + 1) % config.eval_every == 0 or step + 1 == config.steps
                if due:
                    length = config.context_length
                    loss, accuracy, _ = trainer.score(length, config.eval_windows * length, "validation")
                    log.write(step + 1, {"validation_loss": loss, "validation_accuracy": accuracy})
                if due or stop.requested:
                    with reporting_file_errors("write", file):
                        write_atomically(file, trainer.saved(step + 1))
                if stop.requested:
                    return None
        return Outcome(
            job.kind,
            tests=tuple(trainer.results(job)),
            state_bytes=stream_bytes(trainer.model.config, config.context_length),
            decode_seconds=trainer.decode_seconds(),
        )


def make_trainer(job: Job, device: torch.device) -> "TaskTrainer":
    """The model of a job before its first step.

    Weights of N(0, 0.02) become as large for the width of the model as they are in the paper's largest models: small ones would
    need most of a short run to wake up.
    """
    setting = job.setting
    assert setting is not None
    assert setting.task is not None
    config = TrainConfig.from_dict({**job.options, "out": str(job.folder)})
    model_config = config.model_config(TASKS[setting.task].vocab_size(setting.pairs))
    torch.manual_seed(config.seed)
    model = build_model(model_config)
    assert isinstance(model, CausalLM)
    with torch.no_grad():
        for matrix in matrices_of(model):
            if abs(float(matrix.std()) - 0.02) < 0.005:
                matrix.mul_((SIZES["large"].d_model / model_config.d_model) ** 0.5)
    if config.compile == "on":
        model.compile_blocks()
    return TaskTrainer(config, setting, device, model.to(device))


@dataclass
class TaskTrainer:
    """A model that is trained on a task."""

    config: TrainConfig
    setting: Setting
    device: torch.device
    model: CausalLM

    def __post_init__(self) -> None:
        self._optimizer = build_optimizer(self.model, self.config)
        self._streams: dict[Part, TokenStream] = {}

    def take_step(self, step: int) -> dict[str, float]:
        """Take a step on fresh texts, which follow from the seed and the step; return its numbers for metrics.jsonl."""
        config, begin = self.config, synchronized(self.device)
        batch = self._draw(config.rows(0, 1).per_step, config.context_length, _generator(config.seed, step), "train")
        self._optimizer.set_learning_rate(learning_rate(step, config))
        with autocast(self.device, config.precision == "bf16"):
            loss = self.model.loss(batch.inputs.to(self.device), batch.targets.to(self.device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm or math.inf)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if not math.isfinite(value := float(loss.detach())):
            raise DivergedError(f"The loss became {value} at step {step + 1}: a lower rate helps.")
        return {"loss": value, "tokens_per_second": batch.inputs.numel() / max(synchronized(self.device) - begin, 1e-9)}

    @torch.no_grad()
    def score(self, length: int, tokens: int, part: Part, depth: float | None = None) -> tuple[float, float, int]:
        """The mean loss in nats, the share of right answers and their number, on held-out texts of a length."""
        generator, rows = _generator(SEEDS[part]), max(1, tokens // length)
        at_once = max(1, self.config.batch_size * self.config.context_length // length)
        loss, right, count = 0.0, 0, 0
        self.model.eval()
        for begin in range(0, rows, at_once):
            batch = self._draw(min(at_once, rows - begin), length, generator, part, depth)
            targets = batch.targets.to(self.device)
            asked = targets != IGNORED
            with autocast(self.device, self.config.precision == "bf16"):
                logits = self.model.logits(self.model.backbone(batch.inputs.to(self.device))[asked]).float()
            loss += float(F.cross_entropy(logits, targets[asked], reduction="sum"))
            right += int((logits.argmax(-1) == targets[asked]).sum())
            count += int(asked.sum())
        self.model.train()
        return loss / count, right / count, count

    def results(self, job: Job) -> list[FinalResult]:
        """The tests of a job, except those on texts that the model cannot read."""
        found, longest = [], self.model.config.longest_sequence
        for test in job.tests:
            length = self.setting.context * test.times_context
            if longest is None or length <= longest:
                loss, accuracy, count = self.score(length, job.test_tokens or length, "test", test.depth)
                task = str(self.setting)
                found.append(FinalResult(test.name, length, loss, None, None, count, task, (), accuracy, test.depth))
        return found

    @torch.no_grad()
    def decode_seconds(self) -> float:
        """The median seconds of one more token of one stream, at the end of a text."""
        length = self.config.context_length
        ids = self._draw(1, length, _generator(0), "test").inputs.to(self.device)
        (first, last), times = ids.split(length - min(DECODED, length // 2), 1), []
        decoder = self.model.eval().compile_for_decoding()
        _, state = self.model.extend(first)
        for token in last.unbind(1):
            begin = synchronized(self.device)
            _, state = decoder.extend(token, state)
            times.append(synchronized(self.device) - begin)
        return statistics.median(times)

    def saved(self, step: int) -> bytes:
        """What `restore` needs after a step."""
        return save({**self.model.state_dict(), **self._optimizer.moments(), "step": torch.tensor(step)})

    def restore(self, saved: dict[str, Tensor]) -> int:
        """Continue with what was saved, and return the steps that were taken."""
        step = int(saved["step"])
        self._optimizer.start_at(step)
        for name, values in {**self.model.state_dict(), **self._optimizer.moments()}.items():
            values.copy_(saved[name])
        return step

    def _draw(self, rows: int, length: int, generator: torch.Generator, part: Part, depth: float | None = None) -> Batch:
        setting, config = self.setting, self.config
        assert setting.task is not None
        texts = TASKS[setting.task]
        draw = (texts.training if part == "train" else None) or texts.draw
        if draw is not None:
            return draw(rows, length, setting.pairs, generator)
        if part not in self._streams:
            corpus = load_corpus(config.data, config.text_column, config.include, config.exclude)
            self._streams[part] = token_stream(corpus, part, ByteTokenizer(), config.cache or cache_folder())
        stream = self._streams[part]
        if len(stream) < length:
            found = f"There are {len(stream):,} bytes in {stream.name}, fewer than a text of {length:,}"
            raise LineartimeError(f"{found}: give more text, or smaller `lengths`.")
        return needle(rows, length, generator, stream, depth)


def _generator(*key: int) -> torch.Generator:
    """A generator for a key."""
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))
    return torch.Generator().manual_seed(seed)


if __name__ == "__main__":
    sys.exit(main())
