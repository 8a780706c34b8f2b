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
from pathlib import Path
from typing import Any, get_args
from zipfile import BadZipFile, ZipFile

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import EarlyStoppingCallback, PreTrainedTokenizerFast, Trainer, TrainingArguments
from transformers.modeling_outputs import ModelOutput

from lineartime.checkpoint import load_with_tokenizer
from lineartime.checkpoint.format import WEIGHTS, all_finite
from lineartime.data.tokenizers import FRAME, Tokenizer
from lineartime.errors import ArgumentError, DivergedError, LineartimeError
from lineartime.files import read_plain, removed_on_failure, write_file
from lineartime.finetuning.answering import Answering
from lineartime.finetuning.config import Advanced, FinetuneConfig, OfFLASH
from lineartime.finetuning.folder import MODEL, PREDICTIONS, RESULT, FinetuneResult, Trial, begun, check_finetuning
from lineartime.finetuning.labelling import Labelling
from lineartime.finetuning.windows import WINDOWS, WindowEncoder
from lineartime.hf.config import LineartimeConfig
from lineartime.hf.convert import quietly
from lineartime.hf.tokenizer import fast_tokenizer
from lineartime.machine import choose_device, choose_precision
from lineartime.models.config import LayerConfig, ModelConfig
from lineartime.models.language_model import LanguageModel
from lineartime.runs.record import locked
from lineartime.training.optimizers import matrices_of

_STATE = "trainer_state.json"
PAPER_CHUNK = 128
"""The tokens in a chunk when the paper fine-tunes FLASH (section 4.3)."""
FEW_STEPS = 500  # of a small set, 28 steps gave 52 to 64 % accuracy, and 560 gave 91 %
TABLE = "bias.table"
"""The relative biases within a chunk, which has 2 C - 1 of them."""
Say = Callable[[str], None]


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
    check_finetuning(config)
    with locked(config.out):
        return _finetune(config, begun(config), say)


def _finetune(config: FinetuneConfig, result: FinetuneResult, say: Say) -> FinetuneResult:
    """Go on from what was found, in a folder that no other process writes to."""
    if result.best is not None:
        return result
    loaded = load_with_tokenizer(config.run)
    if loaded.model.config.task != "mlm":
        problem = f"is {config.run}, a causal language model, which does not see what follows a token"
        raise ArgumentError("run", f"{problem}: give a masked one, as `task='mlm'` trains it.")
    tuned_config(loaded.model.config, config.advanced)  # before the data is read
    tokenizer = paired_tokenizer(loaded.tokenizer)
    encoder = WindowEncoder.of(tokenizer, config.context_length, config.advanced.stride)
    tokenizer.backend_tokenizer.post_processor = encoder.backend.post_processor
    with nullcontext() if config.resume else removed_on_failure(config.out):
        task = (Labelling if config.task == "classify" else Answering)(config, encoder)
    say(task.describe())
    steps = math.ceil(math.ceil(len(task.train) / config.batch_size) * config.epochs)
    say(f"{steps:,} steps with each rate" + (f"; below {FEW_STEPS}, more epochs may help" if steps < FEW_STEPS else ""))
    if not config.resume:
        result = dataclasses.replace(result, max_answer_tokens=getattr(task, "max_answer_tokens", None))
    result.write(config.out)
    for rate in config.learning_rates[len(result.trials) :]:
        folder = config.out / f"rate-{rate:g}"
        trial = _train(config, loaded.model, task, rate, folder, say)
        if trial.score(task.metric) > max((each.score(task.metric) for each in result.trials), default=-math.inf):
            tokenizer.save_pretrained(folder / MODEL)
            shutil.rmtree(config.out / MODEL, ignore_errors=True)
            for name in (MODEL, PREDICTIONS):
                (folder / name).replace(config.out / name)
        result = dataclasses.replace(result, trials=(*result.trials, trial))
        result.write(config.out)
        shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(config.out / WINDOWS)
    place = max(range(len(result.trials)), key=lambda each: result.trials[each].score(task.metric))
    if not result.trials[place].metrics:
        (config.out / RESULT).unlink()
        rates = " and ".join(f"{each:g}" for each in config.learning_rates)
        raise ArgumentError("learning_rates", f"is {rates}, with which training diverged: give smaller ones.")
    result = dataclasses.replace(result, best=place)
    result.write(config.out)
    return result


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
        recalls = any(each.options.get("memory") == "mesa" for each in pretrained.mixers)
        if recalls and mixer not in (None, "flash"):
            raise ArgumentError("mixer", f"is {mixer}, but the model has the memory mesa: leave it out.")
        mixer = mixer or ("flash-cls" if "flash" in kinds and not recalls else None)
    elif mixer is not None:
        raise ArgumentError("mixer", f"is {mixer}, but the model is one of {kinds[0]}: leave it out.")
    if chunk_size is not None:
        changed = changed.override(chunk_size=chunk_size)
    layers = {}
    for name, each in changed.layers.items():
        if each.kind in get_args(OfFLASH):
            kind, options = mixer or each.kind, each.options
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
    model.register_forward_hook(check_outputs)
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
    except DivergedError:
        losses = tuple(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
        trainer.say(f"epoch {trainer.state.epoch:.3g}: diverged: the loss, the logits or the weights are not finite")
        return Trial({}, trainer.state.epoch, losses, rate)
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
        model = self.accelerator.unwrap_model(self.model)
        found = self.task.evaluate(model, self.args.bf16)
        if not all(all_finite(each) for each in model.parameters()):
            raise DivergedError("The weights are not finite.")
        self.evaluated = self.state.global_step
        losses = [f"loss {entry['loss']:.4f}" for entry in self.state.log_history if "loss" in entry]
        first = [f"{name.replace('_', ' ')} {value:.2f}" for name, value in list(found.items())[:2]]
        self.say(f"epoch {self.state.epoch:g}: {', '.join([*losses[-1:], *first])}")
        metrics = {f"eval_{name}": value for name, value in found.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def check_outputs(_model: nn.Module, _inputs: Any, outputs: ModelOutput) -> None:
    """A forward hook that raises DivergedError unless what a model returns is finite."""
    if not all(all_finite(each) for each in outputs.values() if isinstance(each, Tensor)):
        raise DivergedError("What the model returns is not finite: train it again, with a lower rate.")


def _last_whole(folder: Path) -> str | None:
    """The last checkpoint of `Trainer` that was written to its end and is whole; others are deleted.

    The best one, which `Trainer` loads at the end, must be there too, wherever the folder was when it was written.
    """
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    whole = {each: state for each in found if (state := _state(each)) is not None}
    for checkpoint in reversed(found):
        state = whole.get(checkpoint, {})
        best = folder / Path(state.get("best_model_checkpoint") or "").name
        if best in whole:
            write_file(checkpoint / _STATE, json.dumps({**state, "best_model_checkpoint": str(best)}))
            return str(checkpoint)
        shutil.rmtree(checkpoint)
    return None


def _state(checkpoint: Path) -> dict[str, Any] | None:
    """The state of `Trainer` in a checkpoint; None if any of its files is missing or damaged."""
    try:
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            with ZipFile(checkpoint / name) as archive:
                if archive.testzip() is not None:
                    return None
        [weights] = checkpoint.glob(f"*{WEIGHTS}")  # or those of an adapter
        with safe_open(weights, framework="pt"):
            return read_plain(checkpoint / _STATE)
    except (OSError, ValueError, LineartimeError, SafetensorError, BadZipFile):
        return None
