"""Fine-tuning: from a trained model to one that does a task, best of several learning rates.

The heads are those of `lineartime.hf`, so `Trainer` of transformers trains them: it has what fine-tuning needs beside a loop
(checkpoints that resume, the best by a metric, early stopping, adapters of PEFT), and what it saves is a model of transformers.
"""

import dataclasses
import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lineartime.checkpoint import load_with_tokenizer
from lineartime.errors import ArgumentError, require_packages
from lineartime.files import removed_on_failure
from lineartime.finetuning.answering import Answering
from lineartime.finetuning.config import FinetuneConfig
from lineartime.finetuning.labelling import Labelling, find_texts
from lineartime.finetuning.model import optimizer_for, paired_tokenizer, tuned_config, with_head
from lineartime.finetuning.questions import find_questions
from lineartime.finetuning.trainer import PREDICTIONS, Evaluated, begun, plain_options, train, write_result
from lineartime.finetuning.windows import WindowEncoder
from lineartime.hf.convert import quietly
from lineartime.models.language_model import LanguageModel

MODEL, RESULT, WINDOWS = "model", "finetune.json", "windows"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Trial(Evaluated):
    """The best evaluation of one peak learning rate."""

    learning_rate: float


@dataclass(frozen=True)
class FinetuneResult:
    """What fine-tuning found.

    Attributes:
        config: the options.
        trials: the learning rates that are done.
        best: the place of the best trial; None until all are done.
        max_answer_tokens: the longest answer to a question that is given; None for another task.
    """

    config: dict[str, Any]
    trials: tuple[Trial, ...]
    best: int | None
    max_answer_tokens: int | None

    def best_trial(self) -> Trial:
        """The best of the trials, of a fine-tuning that is done."""
        assert self.best is not None
        return self.trials[self.best]


def finetune(config: FinetuneConfig, say: Say = print) -> FinetuneResult:
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
    done = begun(config, RESULT, FinetuneResult)
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
    longest = task.max_answer_tokens if isinstance(task, Answering) else None
    result = done or FinetuneResult(plain_options(config), (), None, longest)
    write_result(config.out / RESULT, result)
    for rate in config.learning_rates[len(result.trials) :]:
        folder = config.out / f"rate-{rate:g}"
        trial = _train(config, loaded.model, task, rate, folder, say)
        best = max((each.metrics[task.metric] for each in result.trials), default=-math.inf)
        if trial.metrics[task.metric] > best:
            tokenizer.save_pretrained(folder / MODEL)
            for name in (MODEL, PREDICTIONS):
                _replace(folder / name, config.out / name)
        result = dataclasses.replace(result, trials=(*result.trials, trial))
        write_result(config.out / RESULT, result)
        shutil.rmtree(folder)
    place = max(range(len(result.trials)), key=lambda each: result.trials[each].metrics[task.metric])
    result = dataclasses.replace(result, best=place)
    write_result(config.out / RESULT, result)
    shutil.rmtree(config.out / WINDOWS)
    return result


def _task(config: FinetuneConfig, encoder: WindowEncoder) -> Answering | Labelling:
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


def _replace(source: Path, destination: Path) -> None:
    if destination.is_dir():
        shutil.rmtree(destination)
    source.replace(destination)


def _train(
    config: FinetuneConfig, pretrained: LanguageModel, task: Answering | Labelling, rate: float, folder: Path, say: Say
) -> Trial:
    """Train with one learning rate, or go on with that, and save the best model without its adapters."""
    advanced = config.advanced
    torch.manual_seed(config.seed)
    model = with_head(pretrained, advanced, task.head, task.peft_task)
    trained = train(
        task,
        model,
        folder,
        say,
        about=f"rate {rate:g}, ",
        device=advanced.device,
        precision=advanced.precision,
        patience=advanced.patience,
        optimizer=optimizer_for(model, rate, advanced.weight_decay),
        learning_rate=rate,
        num_train_epochs=config.epochs,
        per_device_train_batch_size=config.batch_size,
        warmup_steps=advanced.warmup,
        max_grad_norm=advanced.clip_norm,
        seed=config.seed,
        train_sampling_strategy="group_by_length",
    )
    best = trained.model.merge_and_unload() if advanced.lora_rank else trained.model
    if isinstance(task, Labelling):
        task.unscale(best)
    with quietly():
        best.save_pretrained(folder / MODEL)
    task.write(folder)
    return Trial(trained.metrics, trained.epoch, trained.losses, rate)
