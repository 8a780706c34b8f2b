"""Fine-tuning: from a trained model to one that does a task, best of several learning rates.

The heads are those of `lineartime.hf`, so `Trainer` of transformers trains them: it has what fine-tuning needs beside a loop
(checkpoints that resume, the best by a metric, early stopping, adapters of PEFT), and what it saves is a model of transformers.
"""

import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import torch
import transformers
from torch import Tensor, nn
from transformers import EarlyStoppingCallback, PreTrainedTokenizerFast, Trainer, TrainingArguments
from transformers.modeling_outputs import ModelOutput

from lineartime.checkpoint import WEIGHTS, all_finite, find_checkpoint, load_with_tokenizer
from lineartime.data.tokenizers import FRAME, Tokenizer
from lineartime.errors import ArgumentError, DivergedError, LineartimeError, reporting_file_errors
from lineartime.fields import shown
from lineartime.files import is_there, read_file, read_plain, removed_on_failure, sha256, write_file
from lineartime.finetuning.answering import Answering
from lineartime.finetuning.config import Advanced, FinetuneConfig, OfFLASH
from lineartime.finetuning.data import WINDOWS, Windows
from lineartime.finetuning.labelling import Labelling
from lineartime.hf.convert import quietly
from lineartime.hf.model import LineartimeConfig
from lineartime.hf.tokenizer import fast_tokenizer, framing
from lineartime.machine import choose_device, choose_precision
from lineartime.models.config import LayerConfig, ModelConfig
from lineartime.models.language_model import LanguageModel
from lineartime.runs.record import LOCK_FILE, locked
from lineartime.training.optimizers import matrices_of

MODEL, PREDICTIONS, RESULT = "model", "predictions.json", "finetune.json"
_SAME_RESULT = ("resume", "out", "device", "advanced")
"""Options that do not decide the result, and the place of more options."""
PAPER_CHUNK = 128
"""The tokens in a chunk when the paper fine-tunes FLASH (section 4.3)."""
TABLE = "bias.table"
"""The relative biases within a chunk, which has 2 C - 1 of them."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Trial:
    """The best evaluation of one peak learning rate."""

    metrics: dict[str, float]  # on what is validated with; none if training diverged
    epoch: float  # when they were measured, or training diverged
    losses: tuple[float, ...]  # the mean training loss since the evaluation before, for each evaluation
    learning_rate: float  # the peak

    def score(self, metric: str) -> float:
        """A metric by which trials are compared: those that diverged come last."""
        return self.metrics.get(metric, -math.inf)


@dataclass(frozen=True)
class FinetuneResult:
    """What fine-tuning found: finetune.json."""

    config: dict[str, Any]
    trials: tuple[Trial, ...]  # the learning rates that are done
    best: int | None  # the place of the best trial; None until all are done
    max_answer_tokens: int | None  # the longest answer to a question that is given; None for another task
    inputs: dict[str, str] = field(default_factory=dict)  # digests of the data and the model; none in the first fine-tunings

    def changed(self, out: Path, **changes: Any) -> "FinetuneResult":
        """The result with other values for some fields, which is written into the folder of the fine-tuning."""
        result = replace(self, **changes)
        write_file(out / RESULT, json.dumps(dataclasses.asdict(result), indent=1) + "\n")
        return result


def finetune(config: FinetuneConfig, say: Say = print) -> FinetuneResult:
    """Fine-tune a masked language model with each learning rate, and keep the model that is best by the metric.

    The folder `config.out` gets the model of transformers with its tokenizer in `model`, the predictions on the held-out data,
    and finetune.json with the metrics of all rates. `say` is called with each line about what is done.

    Raises:
        ArgumentError: for options that do not fit the model or the data.
        LineartimeError: if a file cannot be read or written.
    """
    with locked(config.out):
        result = _begun(config)
        return result if result.best is not None else _tried(config, result, say)


def _begun(config: FinetuneConfig) -> FinetuneResult:
    """What a fine-tuning that is resumed has found, or one without trials.

    Raises ArgumentError for paths with which none can begin, and if what is resumed was begun with other options or inputs.
    """
    if config.resume and not (config.out / RESULT).is_file():
        raise ArgumentError("resume", f"is True, but {config.out} holds no training that has begun: leave it out.")
    if not config.resume and {each.name for each in config.out.iterdir()} > {LOCK_FILE}:
        what = f"is {config.out}, which is not empty: give `resume=True` to go on there, or choose another folder."
        raise ArgumentError("out", what)
    if not is_there(config.data):
        raise ArgumentError("data", f"is {config.data}, which does not exist: give a file, or a folder of two.")
    inputs = {"data": digest(config.data), "run": digest(find_checkpoint(config.run) / WEIGHTS)}
    options = dataclasses.asdict(config)
    options |= options["advanced"]
    plain = json.loads(json.dumps({name: value for name, value in options.items() if name not in _SAME_RESULT}, default=str))
    if not config.resume:
        return FinetuneResult(plain, (), None, None, inputs)
    found = read_file(config.out / RESULT, FinetuneResult)
    for option, value in plain.items():
        before = found.config.get(option)
        if value != before:
            was = f"{config.out} was begun with {shown(before)}"
            raise ArgumentError(option, f"is {shown(value)}, but {was}: resume with the same options.")
    check_same(inputs, found.inputs, options, config.out)
    return found


def check_same(inputs: dict[str, str], before: dict[str, Any], paths: dict[str, Any], out: Path) -> None:
    """Raise ArgumentError for an input that is another one, by its digest, than that with which `out` was begun."""
    for name, value in inputs.items():
        if before.get(name, value) != value:
            what = f"is {paths[name]}, but {out} was begun with another one or another content"
            raise ArgumentError(name, f"{what}: resume with that, or choose another place.")


def digest(path: Path) -> str:
    """A fingerprint of a file, or of a folder of data, in which texts beside records, as of TriviaQA, count by their sizes.

    Raises LineartimeError if a file cannot be read.
    """
    with reporting_file_errors("read", path):
        if not path.is_dir():
            return sha256(path)
        files = sorted(file for places in ("*", "qa/*", "evidence/*/*") for file in path.glob(places) if file.is_file())
        found = [(str(each), each.stat().st_size if each.suffix == ".txt" else sha256(each)) for each in files]
        return hashlib.sha256(json.dumps([(name[len(str(path)) :], of) for name, of in found]).encode()).hexdigest()


def _tried(config: FinetuneConfig, result: FinetuneResult, say: Say) -> FinetuneResult:
    """Try the rates that are not done, in a folder that no other process writes to."""
    loaded = load_with_tokenizer(config.run)
    if loaded.model.config.task != "mlm":
        problem = f"is {config.run}, a causal language model, which does not see what follows a token"
        raise ArgumentError("run", f"{problem}: give a masked one, as `task='mlm'` trains it.")
    tuned_config(loaded.model.config, config.advanced)  # before the data is read
    tokenizer = paired_tokenizer(loaded.tokenizer)
    windows = Windows(tokenizer, config.context_length, config.advanced.stride)
    with nullcontext() if config.resume else removed_on_failure(config.out):
        task = (Labelling if config.task == "classify" else Answering)(config, windows)
    say(task.describe())
    steps = math.ceil(math.ceil(len(task.train) / config.batch_size) * config.epochs)
    say(f"{steps:,} steps with each rate")
    result = result.changed(config.out, max_answer_tokens=task.max_answer_tokens)
    for rate in config.learning_rates[len(result.trials) :]:
        folder = config.out / f"rate-{rate:g}"
        trial = _train(config, loaded.model, task, rate, folder, say)
        if trial.score(task.metric) > max((each.score(task.metric) for each in result.trials), default=-math.inf):
            tokenizer.save_pretrained(folder / MODEL)
            shutil.rmtree(config.out / MODEL, ignore_errors=True)
            for name in (MODEL, PREDICTIONS):
                (folder / name).replace(config.out / name)
        result = result.changed(config.out, trials=(*result.trials, trial))
        shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(config.out / WINDOWS)
    place = max(range(len(result.trials)), key=lambda each: result.trials[each].score(task.metric))
    if not result.trials[place].metrics:
        (config.out / RESULT).unlink()
        rates = " and ".join(f"{each:g}" for each in config.learning_rates)
        raise ArgumentError("learning_rates", f"is {rates}, with which training diverged: give smaller ones.")
    return result.changed(config.out, best=place)


def paired_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer of transformers for pairs of texts; the end of a document serves as [CLS] and [SEP] where there are none."""
    made = fast_tokenizer(tokenizer)
    known, end = made.get_vocab(), made.pad_token
    made.cls_token, made.sep_token = (name if name in known else end for name in FRAME)
    made.backend_tokenizer.post_processor = framing(made.backend_tokenizer, made.cls_token, made.sep_token)
    made.padding_side, made.chat_template = "right", None
    return made


def tuned_config(pretrained: ModelConfig, advanced: Advanced) -> ModelConfig:
    """The model to fine-tune, with the weights of the pre-trained one. Raises ArgumentError if these do not fit."""
    changed, kinds = pretrained.override(dropout=advanced.dropout), [each.kind for each in pretrained.mixers]
    before = min((each.options["chunk_size"] for each in pretrained.mixers if "chunk_size" in each.options), default=0)
    mixer, chunk_size = advanced.mixer, advanced.chunk_size
    if chunk_size is not None and chunk_size > before:
        what = f"is {chunk_size}, but the model was trained with {before or 'none'}: give at most that."
        raise ArgumentError("chunk_size", what)
    if not set(kinds) & set(get_args(OfFLASH)):
        if mixer is not None:
            raise ArgumentError("mixer", f"is {mixer}, but the model is one of {kinds[0]}: leave it out.")
        return changed if chunk_size is None else changed.override(chunk_size=chunk_size)
    recalls = any(each.options.get("memory") == "mesa" for each in pretrained.mixers)
    if recalls and mixer not in (None, "flash"):
        raise ArgumentError("mixer", f"is {mixer}, but the model has the memory mesa: leave it out.")
    mixer = mixer or ("flash-cls" if "flash" in kinds and not recalls else None)
    changed, layers = changed.override(chunk_size=chunk_size or min(before, PAPER_CHUNK)), {}
    for name, each in changed.layers.items():
        if each.kind in get_args(OfFLASH):
            options = {name: value for name, value in each.options.items() if name != "memory" or mixer in (None, "flash")}
            layers[name] = LayerConfig(mixer or each.kind, **options)
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
    place = choose_device(advanced.device)
    arguments = TrainingArguments(
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
        metric_for_best_model=task.metric,
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
    trainer = TaskTrainer(
        model,
        arguments,
        data_collator=task.collate,
        train_dataset=task.train,
        eval_dataset=task.held_out,
        optimizers=(_optimizer(model, rate, advanced.weight_decay), None),
        callbacks=[] if advanced.patience is None else [EarlyStoppingCallback(advanced.patience)],
    )
    trainer.task, trainer.say = task, lambda line: say(f"rate {rate:g}, {line}")
    trainer.remove_callback(transformers.PrinterCallback)
    try:
        with quietly():
            trainer.train(resume_from_checkpoint=_last_whole(folder))
    except DivergedError:
        losses = tuple(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
        trainer.say(f"epoch {trainer.state.epoch:.3g}: diverged: the loss, the logits or the weights are not finite")
        return Trial({}, trainer.state.epoch, losses, rate)
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
    """The last checkpoint of `Trainer` that was written to its end; what a killed process left after it is deleted.

    The best one, which `Trainer` loads at the end, is taken from this folder, wherever it was when it was written.
    """
    for checkpoint in sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name.rpartition("-")[2])):
        with suppress(LineartimeError):
            state = read_plain(checkpoint / "trainer_state.json")  # which is written last
            best = folder / Path(state["best_model_checkpoint"]).name
            write_file(checkpoint / "trainer_state.json", json.dumps({**state, "best_model_checkpoint": str(best)}))
            return str(checkpoint)
        shutil.rmtree(checkpoint)
    return None
