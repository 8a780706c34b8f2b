"""Fine-tuning: from a trained model to one that does a task, best of several learning rates.

The heads are those of `lineartime.hf`, so `Trainer` of transformers trains them: it has what fine-tuning needs beside a loop
(checkpoints that resume, the best by a metric, early stopping, adapters of PEFT), and what it saves is a model of transformers.
"""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from lineartime.checkpoint import load_with_tokenizer
from lineartime.errors import ArgumentError, reporting_file_errors, require_packages
from lineartime.fields import shown
from lineartime.files import removed_on_failure, write_file
from lineartime.finetuning.answering import PREDICTIONS, Answering, Questions
from lineartime.finetuning.config import FinetuneConfig
from lineartime.finetuning.labelling import Labelling, Labels, find_texts
from lineartime.finetuning.model import optimizer_for, paired_tokenizer, tuned_config, with_head
from lineartime.finetuning.questions import find_questions
from lineartime.finetuning.windows import WindowEncoder
from lineartime.hf.convert import quietly
from lineartime.json_files import read_file
from lineartime.machine import choose_device, choose_precision
from lineartime.models.language_model import LanguageModel

MODEL, RESULT, WINDOWS = "model", "finetune.json", "windows"
Task = Answering | Labelling
TRAINER: dict[str, Any] = {
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 1,
    "load_best_model_at_end": True,
    "greater_is_better": True,
    "logging_strategy": "epoch",
    "disable_tqdm": True,
    "report_to": "none",
    "remove_unused_columns": False,
    "dataloader_pin_memory": False,
    "log_level": "error",  # else it warns of what it chooses itself
}
"""The arguments of `Trainer` that every task has."""
Begun = TypeVar("Begun")


@dataclass(frozen=True)
class Trial:
    """The best evaluation of one learning rate.

    Attributes:
        learning_rate: the peak rate.
        metrics: the metrics on the held-out examples.
        epoch: when they were measured.
        losses: the mean training loss since the evaluation before, for each evaluation.
    """

    learning_rate: float
    metrics: dict[str, float]
    epoch: float
    losses: tuple[float, ...]


@dataclass(frozen=True)
class FinetuneResult:
    """What fine-tuning found.

    Attributes:
        config: the options.
        trials: the learning rates that are done.
        best: the place of the best trial; None until all are done.
        questions: how questions are answered; None for another task.
        labels: what the labels are; None for another task.
    """

    config: dict[str, Any]
    trials: tuple[Trial, ...]
    best: int | None
    questions: Questions | None = None
    labels: Labels | None = None

    def best_trial(self) -> Trial:
        """The best of the trials, of a fine-tuning that is done."""
        assert self.best is not None
        return self.trials[self.best]


def finetune(config: FinetuneConfig, say: Callable[[str], None] = print) -> FinetuneResult:
    """Fine-tune a masked language model with each learning rate, and keep the model that is best by the metric.

    The folder `config.out` gets the model of transformers with its tokenizer in `model`, the predictions on the held-out data,
    and finetune.json with the metrics of all rates.

    Args:
        config: the options.
        say: called with each line about what is done.

    Raises:
        ArgumentError: for options that do not fit the model or the data.
        LineartimeError: if a file cannot be read or written, or a package is missing.
    """
    require_packages("accelerate", extra="finetune", purpose="Fine-tuning")
    done = begun(config, RESULT, FinetuneResult, _plain(config))
    if done is not None and done.best is not None:
        return done
    loaded = load_with_tokenizer(config.run)
    if loaded.model.config.task != "mlm":
        problem = f"is {config.run}, a causal language model, which does not see what follows a token"
        raise ArgumentError("run", f"{problem}: give a masked one, as `task='mlm'` trains it.")
    tuned_config(loaded.model.config, config.advanced)  # before the data is read
    tokenizer = paired_tokenizer(loaded.tokenizer)
    definition, names = tokenizer.backend_tokenizer.to_str(), (tokenizer.cls_token, tokenizer.sep_token)
    encoder = WindowEncoder(definition, *names, config.context_length, config.advanced.stride)
    tokenizer.backend_tokenizer.post_processor = encoder.backend.post_processor
    with removed_on_failure(config.out) if done is None else nullcontext():
        task = _task(config, encoder)
    say(task.describe())
    kind = {"questions": task.questions} if isinstance(task, Answering) else {"labels": task.labels}
    result = done or FinetuneResult(_plain(config), (), None, **kind)
    _write(config.out, result)
    for rate in config.learning_rates[len(result.trials) :]:
        folder = config.out / f"rate-{rate:g}"
        trial = _train(config, task, _new_model(loaded.model, config, task), rate, folder, say)
        best = max((each.metrics[task.metric] for each in result.trials), default=-math.inf)
        if trial.metrics[task.metric] > best:
            tokenizer.save_pretrained(folder / MODEL)
            for name in (MODEL, PREDICTIONS):
                _replace(folder / name, config.out / name)
        result = dataclasses.replace(result, trials=(*result.trials, trial))
        _write(config.out, result)
        shutil.rmtree(folder)
    place = max(range(len(result.trials)), key=lambda each: result.trials[each].metrics[task.metric])
    result = dataclasses.replace(result, best=place)
    _write(config.out, result)
    shutil.rmtree(config.out / WINDOWS)
    return result


def _task(config: FinetuneConfig, encoder: WindowEncoder) -> Task:
    """What is trained with and validated with."""
    advanced, cache = config.advanced, config.out / WINDOWS
    if config.task == "classify":
        files = find_texts(config.data, advanced)
        return Labelling(files, encoder, cache, batch_size=config.batch_size, kind=advanced.labels)
    return Answering(
        find_questions(config.data, advanced.domain),
        encoder,
        cache,
        batch_size=config.batch_size,
        seed=config.seed,
        max_answer_tokens=advanced.max_answer_tokens,
        null_threshold=advanced.null_threshold,
    )


def begun(config: Any, name: str, content: type[Begun], given: dict[str, Any]) -> Begun | None:
    """What a training that is resumed has found; None for a new one, for whose folder it makes room.

    Raises:
        ArgumentError: for a folder that is not empty or, to resume, holds no training that has begun with these options.
    """
    out, file = config.out, config.out / name
    if not config.resume:
        with reporting_file_errors("write", out):
            out.mkdir(parents=True, exist_ok=True)
            if any(out.iterdir()):
                what = f"is {out}, which is not empty: give `resume=True` to go on there, or choose another folder."
                raise ArgumentError("out", what)
        return None
    if not file.is_file():
        raise ArgumentError("resume", f"is True, but {out} holds no fine-tuning that has begun: leave it out.")
    found = read_file(file, content)
    before: dict[str, Any] = vars(found)["config"]
    for name, value in given.items():
        if value != before.get(name):
            was = shown(before.get(name))
            raise ArgumentError(name, f"is {shown(value)}, but {out} was begun with {was}: resume with the same options.")
    return found


def _plain(config: FinetuneConfig) -> dict[str, Any]:
    """The options that decide the result, as plain data."""
    fields = {**dataclasses.asdict(config), **dataclasses.asdict(config.advanced)}
    kept = {name: value for name, value in fields.items() if name not in ("resume", "out", "device", "advanced")}
    plain: dict[str, Any] = json.loads(json.dumps(kept, default=str))
    return plain


def _write(folder: Path, result: FinetuneResult) -> None:
    write_file(folder / RESULT, json.dumps(dataclasses.asdict(result), indent=1) + "\n")


def _replace(source: Path, destination: Path) -> None:
    if destination.is_dir():
        shutil.rmtree(destination)
    source.replace(destination)


def _new_model(pretrained: LanguageModel, config: FinetuneConfig, task: Task) -> Any:
    torch.manual_seed(config.seed)
    return with_head(pretrained, config.advanced, task.head, task.peft_task)


def _train(config: FinetuneConfig, task: Task, model: Any, rate: float, folder: Path, say: Callable[[str], None]) -> Trial:
    """Train with one learning rate, or go on with that, and save the best model without its adapters."""
    advanced, device, verbosity = config.advanced, choose_device(config.advanced.device), transformers.logging.get_verbosity()
    bf16 = choose_precision(advanced.precision, device) == "bf16"
    arguments = TrainingArguments(
        str(folder),
        learning_rate=rate,
        num_train_epochs=config.epochs,
        per_device_train_batch_size=config.batch_size,
        warmup_steps=advanced.warmup,
        max_grad_norm=advanced.clip_norm,
        bf16=bf16,
        use_cpu=device.type == "cpu",
        seed=config.seed,
        metric_for_best_model=task.metric,
        train_sampling_strategy="group_by_length",
        **TRAINER,
    )
    stopping = [] if advanced.patience is None else [EarlyStoppingCallback(advanced.patience)]
    trainer = TaskTrainer(
        model,
        arguments,
        data_collator=task.collate,
        train_dataset=task.train,
        eval_dataset=task.windows,
        optimizers=(optimizer_for(model, rate, advanced), None),
        callbacks=[Said(f"rate {rate:g}, ", say), *stopping],
    )
    trainer.task, trainer.bf16 = task, bf16
    trainer.remove_callback(transformers.PrinterCallback)
    with quietly():
        trainer.train(resume_from_checkpoint=last_whole(folder))
        best = trainer.model.merge_and_unload() if advanced.lora_rank else trainer.model
    transformers.logging.set_verbosity(verbosity)
    steps = trainer.state.best_global_step
    if steps != trainer.evaluated:  # the last predictions are of another model
        task.evaluate(best, bf16)
    task.finish(best)
    with quietly():
        best.save_pretrained(folder / MODEL)
    task.write(folder)
    logged = next(entry for entry in trainer.state.log_history if entry["step"] == steps and f"eval_{task.metric}" in entry)
    metrics = {name.removeprefix("eval_"): value for name, value in logged.items() if name.startswith("eval_")}
    losses = tuple(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return Trial(rate, metrics, logged["epoch"], losses)


class TaskTrainer(Trainer):  # type: ignore[misc]  # transformers has no types here
    """A `Trainer` that evaluates by the metrics of a task."""

    task: Task
    bf16: bool
    control: Any
    evaluated = -1
    """The step of the last evaluation."""

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """The metrics on the held-out data."""
        found = self.task.evaluate(self.accelerator.unwrap_model(self.model), self.bf16)
        self.evaluated = self.state.global_step
        metrics = {f"eval_{name}": value for name, value in found.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class Said(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Says how each evaluation went."""

    def __init__(self, about: str, say: Callable[[str], None]) -> None:
        self._about, self._say = about, say

    def on_evaluate(self, arguments: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        """Say the last loss and the first two metrics."""
        losses = [f"loss {entry['loss']:.4f}" for entry in state.log_history[-3:] if "loss" in entry]
        shown = [f"{name.removeprefix('eval_').replace('_', ' ')} {value:.2f}" for name, value in metrics.items()]
        self._say(f"{self._about}epoch {state.epoch:g}: {', '.join([*losses[-1:], *shown[:2]])}")


def last_whole(folder: Path) -> str | None:
    """The last checkpoint that was written to its end, which is the state of `Trainer`; others are deleted."""
    found: list[Path] = []
    for checkpoint in sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2])):
        try:
            json.loads((checkpoint / "trainer_state.json").read_text("utf-8"))
            found.append(checkpoint)
        except (OSError, ValueError):
            shutil.rmtree(checkpoint)
    return str(found[-1]) if found else None
