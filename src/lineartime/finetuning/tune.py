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
from typing import Any, get_args

import torch
import transformers
from torch import nn
from transformers import EarlyStoppingCallback, PreTrainedTokenizerFast, Trainer, TrainingArguments

from lineartime.checkpoint import load_with_tokenizer
from lineartime.data.tokenizers import FRAME, Tokenizer
from lineartime.errors import ArgumentError, reporting_file_errors, require_packages
from lineartime.fields import shown
from lineartime.files import read_file, removed_on_failure, write_file
from lineartime.finetuning.answering import Answering
from lineartime.finetuning.config import Advanced, FinetuneConfig, OfFLASH
from lineartime.finetuning.labelling import Labelling
from lineartime.finetuning.windows import WINDOWS, WindowEncoder
from lineartime.hf.config import LineartimeConfig
from lineartime.hf.convert import quietly
from lineartime.hf.tokenizer import fast_tokenizer
from lineartime.machine import choose_device, choose_precision
from lineartime.models.config import LayerConfig, ModelConfig
from lineartime.models.language_model import LanguageModel
from lineartime.training.optimizers import matrices_of

MODEL, PREDICTIONS, RESULT = "model", "predictions.json", "finetune.json"
PAPER_CHUNK = 128
"""The tokens in a chunk when the paper fine-tunes FLASH (section 4.3)."""
FEW_STEPS = 500  # of a small set, 28 steps gave 52 to 64 % accuracy, and 560 gave 91 %
TABLE = "bias.table"
"""The relative biases within a chunk, which has 2 C - 1 of them."""
_SAME_RESULT = ("resume", "out", "device", "advanced")
"""Options that do not decide the result, and the place of more options."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Trial:
    """The best evaluation of one peak learning rate."""

    metrics: dict[str, float]  # on what is validated with
    epoch: float  # when they were measured
    losses: tuple[float, ...]  # the mean training loss since the evaluation before, for each evaluation
    learning_rate: float  # the peak


@dataclass(frozen=True)
class FinetuneResult:
    """What fine-tuning found."""

    config: dict[str, Any]
    trials: tuple[Trial, ...]  # the learning rates that are done
    best: int | None  # the place of the best trial; None until all are done
    max_answer_tokens: int | None  # the longest answer to a question that is given; None for another task

    def best_trial(self) -> Trial:
        """The best of the trials, of a fine-tuning that is done."""
        assert self.best is not None
        return self.trials[self.best]

    def write(self, folder: Path) -> None:
        """Write finetune.json."""
        write_file(folder / RESULT, json.dumps(dataclasses.asdict(self), indent=1) + "\n")


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
    require_packages("accelerate", "peft", "scipy", "sklearn", extra="finetune", purpose="Fine-tuning")
    done = _begun(config)
    if done is not None and done.best is not None:
        return done
    loaded = load_with_tokenizer(config.run)
    if loaded.model.config.task != "mlm":
        problem = f"is {config.run}, a causal language model, which does not see what follows a token"
        raise ArgumentError("run", f"{problem}: give a masked one, as `task='mlm'` trains it.")
    tuned_config(loaded.model.config, config.advanced)  # before the data is read
    tokenizer = paired_tokenizer(loaded.tokenizer)
    encoder = WindowEncoder.of(tokenizer, config.context_length, config.advanced.stride)
    tokenizer.backend_tokenizer.post_processor = encoder.backend.post_processor
    with removed_on_failure(config.out) if done is None else nullcontext():
        task = (Labelling if config.task == "classify" else Answering)(config, encoder)
    say(task.describe())
    steps = math.ceil(math.ceil(len(task.train) / config.batch_size) * config.epochs)
    say(f"{steps:,} steps with each rate" + (f"; below {FEW_STEPS}, more epochs may help" if steps < FEW_STEPS else ""))
    longest = task.max_answer_tokens if isinstance(task, Answering) else None
    result = done or FinetuneResult(_plain_options(config), (), None, longest)
    result.write(config.out)
    for rate in config.learning_rates[len(result.trials) :]:
        folder = config.out / f"rate-{rate:g}"
        trial = _train(config, loaded.model, task, rate, folder, say)
        best = max((each.metrics[task.metric] for each in result.trials), default=-math.inf)
        if trial.metrics[task.metric] > best:
            tokenizer.save_pretrained(folder / MODEL)
            shutil.rmtree(config.out / MODEL, ignore_errors=True)
            for name in (MODEL, PREDICTIONS):
                (folder / name).replace(config.out / name)
        result = dataclasses.replace(result, trials=(*result.trials, trial))
        result.write(config.out)
        shutil.rmtree(folder)
    place = max(range(len(result.trials)), key=lambda each: result.trials[each].metrics[task.metric])
    result = dataclasses.replace(result, best=place)
    result.write(config.out)
    shutil.rmtree(config.out / WINDOWS)
    return result


def _begun(config: FinetuneConfig) -> FinetuneResult | None:
    """What a fine-tuning that is resumed has found; None for a new one, for whose folder it makes room.

    Raises ArgumentError for a folder that is not empty or, to resume, holds no fine-tuning that has begun with these options.
    """
    out = config.out
    if not config.resume:
        with reporting_file_errors("write", out):
            out.mkdir(parents=True, exist_ok=True)
            if any(out.iterdir()):
                what = f"is {out}, which is not empty: give `resume=True` to go on there, or choose another folder."
                raise ArgumentError("out", what)
        return None
    if not (out / RESULT).is_file():
        raise ArgumentError("resume", f"is True, but {out} holds no training that has begun: leave it out.")
    found = read_file(out / RESULT, FinetuneResult)
    for option, value in _plain_options(config).items():
        before = found.config.get(option)
        if value != before:
            was = f"{out} was begun with {shown(before)}"
            raise ArgumentError(option, f"is {shown(value)}, but {was}: resume with the same options.")
    return found


def _plain_options(config: FinetuneConfig) -> dict[str, Any]:
    """The options that decide the result, with advanced ones among them, as plain data."""
    options = dataclasses.asdict(config)
    options |= options["advanced"]
    decisive = {name: value for name, value in options.items() if name not in _SAME_RESULT}
    plain: dict[str, Any] = json.loads(json.dumps(decisive, default=str))
    return plain


def paired_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer of transformers for pairs of texts; the end of a document serves as [CLS] and [SEP] where there are none."""
    made = fast_tokenizer(tokenizer)
    known, end = made.get_vocab(), made.pad_token
    made.cls_token, made.sep_token = (name if name in known else end for name in FRAME)
    made.padding_side, made.chat_template = "right", None
    return made


def tuned_config(pretrained: ModelConfig, advanced: Advanced) -> ModelConfig:
    """The model to fine-tune, with the weights of the pre-trained one. Raises ArgumentError if these do not fit."""
    changed, kinds = pretrained.override(dropout=advanced.dropout), [each.kind for each in pretrained.mixers]
    chunks = [each.options["chunk_size"] for each in pretrained.mixers if "chunk_size" in each.options]
    before, mixer, chunk_size = min(chunks, default=0), advanced.mixer, advanced.chunk_size
    if chunk_size is not None and not chunk_size <= before:
        what = f"is {chunk_size}, but the model was trained with {before or 'none'}: give at most that."
        raise ArgumentError("chunk_size", what)
    if set(kinds) & set(get_args(OfFLASH)):
        chunk_size = chunk_size or min(before, PAPER_CHUNK)
        others = {each.options.get("memory", "sum") for each in pretrained.mixers} - {"sum"}
        if others and mixer not in (None, "flash"):
            raise ArgumentError("mixer", f"is {mixer}, but the model has the memory {others.pop()}: leave it out.")
        mixer = mixer or ("flash-cls" if "flash" in kinds and not others else None)
    elif mixer is not None:
        raise ArgumentError("mixer", f"is {mixer}, but the model is one of {kinds[0]}: leave it out.")
    if chunk_size is not None:
        changed = changed.override(chunk_size=chunk_size)
    layers = {}
    for name, each in changed.layers.items():
        if each.kind in get_args(OfFLASH):
            kind, options = mixer or each.kind, dict(each.options)
            if kind != "flash":
                options.pop("memory", None)  # an option of flash alone
            layers[name] = LayerConfig(kind, **options)
    return changed.with_layers(layers)


def with_head(pretrained: LanguageModel, advanced: Advanced, make: Callable[[LineartimeConfig], Any], peft_task: str) -> Any:
    """A model of transformers that `make` makes, with the pre-trained backbone and a new head; with adapters, one of PEFT."""
    weights = pretrained.backbone.state_dict()
    model = make(LineartimeConfig.from_model_config(tuned_config(pretrained.config, advanced)))
    for name, tensor in model.model.backbone.state_dict().items():
        excess = weights[name].shape[-1] - tensor.shape[-1] if name.endswith(TABLE) else 0
        tensor.copy_(weights[name].narrow(-1, excess // 2, tensor.shape[-1]) if excess else weights[name])
    if not advanced.lora_rank:
        return model
    import peft

    linear = {name.rpartition(".")[2] for name, part in model.model.named_modules() if isinstance(part, nn.Linear)}
    options: dict[str, Any] = {"r": advanced.lora_rank, "lora_alpha": 2 * advanced.lora_rank, "lora_dropout": advanced.dropout}
    return peft.get_peft_model(model, peft.LoraConfig(task_type=peft_task, target_modules=sorted(linear), **options))


def _train(
    config: FinetuneConfig, pretrained: LanguageModel, task: Answering | Labelling, rate: float, folder: Path, say: Say
) -> Trial:
    """Train with one learning rate, or go on with that, and save the best model without its adapters, and its predictions."""
    advanced = config.advanced
    torch.manual_seed(config.seed)
    model = with_head(pretrained, advanced, task.head, task.peft_task)
    verbosity = transformers.logging.get_verbosity()  # which `log_level` changes for the whole process
    try:
        trainer = TaskTrainer(
            model,
            _arguments(config, task.metric, rate, folder),
            data_collator=task.collate,
            train_dataset=task.train,
            eval_dataset=task.held_out,
            optimizers=(_optimizer(model, rate, advanced.weight_decay), None),
            callbacks=[] if advanced.patience is None else [EarlyStoppingCallback(advanced.patience)],
        )
        trainer.task, trainer.say = task, lambda line: say(f"rate {rate:g}, {line}")
        trainer.remove_callback(transformers.PrinterCallback)
        with quietly():
            trainer.train(resume_from_checkpoint=_last_whole(folder))
    finally:
        transformers.logging.set_verbosity(verbosity)
    steps, history = trainer.state.best_global_step, trainer.state.log_history
    if steps != trainer.evaluated:  # the last predictions are of another model
        task.evaluate(trainer.model, trainer.args.bf16)
    write_file(folder / PREDICTIONS, json.dumps(task.predictions, ensure_ascii=False, indent=1) + "\n")
    best = trainer.model.merge_and_unload() if advanced.lora_rank else trainer.model
    with quietly():
        best.save_pretrained(folder / MODEL)
    logged = next(entry for entry in history if entry["step"] == steps and f"eval_{task.metric}" in entry)
    metrics = {name.removeprefix("eval_"): value for name, value in logged.items() if name.startswith("eval_")}
    return Trial(metrics, logged["epoch"], tuple(entry["loss"] for entry in history if "loss" in entry), rate)


def _arguments(config: FinetuneConfig, metric: str, rate: float, folder: Path) -> TrainingArguments:
    """The options of `Trainer`, whose checkpoints are in the folder."""
    advanced = config.advanced
    place = choose_device(advanced.device)
    return TrainingArguments(
        str(folder),
        learning_rate=rate,
        num_train_epochs=config.epochs,
        per_device_train_batch_size=config.batch_size,
        warmup_steps=advanced.warmup,
        max_grad_norm=advanced.clip_norm,
        seed=config.seed,
        train_sampling_strategy="group_by_length",
        bf16=choose_precision(advanced.precision, place) == "bf16",
        use_cpu=place.type == "cpu",
        metric_for_best_model=metric,
        greater_is_better=True,
        load_best_model_at_end=True,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_strategy="epoch",
        log_level="error",  # else it warns of what it chooses itself
        disable_tqdm=True,
        report_to="none",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )


def _optimizer(model: nn.Module, rate: float, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW, which decays matrices alone, as in pre-training. Each parameter is a group, as in saved states."""
    matrices = {id(each) for each in matrices_of(model)}
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    groups = [{"params": [each], "weight_decay": weight_decay if id(each) in matrices else 0.0} for each in trained]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.999), eps=1e-6)


class TaskTrainer(Trainer):  # type: ignore[misc]  # transformers has no types here
    """A `Trainer` that evaluates by the metrics of a task, and says how each evaluation went."""

    task: Answering | Labelling
    say: Say
    control: Any
    evaluated = -1
    """The step of the last evaluation."""

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """The metrics on the held-out data. Says the last loss and the first two of them."""
        found = self.task.evaluate(self.accelerator.unwrap_model(self.model), self.args.bf16)
        self.evaluated = self.state.global_step
        losses = [f"loss {entry['loss']:.4f}" for entry in self.state.log_history if "loss" in entry]
        first = [f"{name.replace('_', ' ')} {value:.2f}" for name, value in list(found.items())[:2]]
        self.say(f"epoch {self.state.epoch:g}: {', '.join([*losses[-1:], *first])}")
        metrics = {f"eval_{name}": value for name, value in found.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def _last_whole(folder: Path) -> str | None:
    """The last checkpoint that was written to its end, which is the state of `Trainer`; others are deleted."""
    found: list[Path] = []
    for checkpoint in sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2])):
        try:
            json.loads((checkpoint / "trainer_state.json").read_text("utf-8"))
            found.append(checkpoint)
        except (OSError, ValueError):
            shutil.rmtree(checkpoint)
    return str(found[-1]) if found else None
