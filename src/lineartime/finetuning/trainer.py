"""Training of a task by `Trainer` of transformers: best by a metric, early stopping, and going on where it was stopped."""

import dataclasses
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from lineartime.choices import Device, Precision
from lineartime.errors import ArgumentError, reporting_file_errors
from lineartime.fields import shown
from lineartime.files import read_file, write_file
from lineartime.hf.convert import quietly
from lineartime.machine import choose_device, choose_precision

PREDICTIONS = "predictions.json"
_SAME_RESULT = ("resume", "out", "device", "advanced")
"""Options that do not decide the result, and the place of more options."""
Begun = TypeVar("Begun")


class Task(ABC):
    """What a model learns, and how it is judged.

    Attributes:
        metric: by which the best model is chosen.
        train: what is trained with.
        held_out: what is validated with.
        predictions: the last ones.
    """

    metric: str
    train: Any
    held_out: Any
    predictions: Any

    @abstractmethod
    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """A batch of rows to train with."""

    @abstractmethod
    def evaluate(self, model: Any, bf16: bool = False) -> dict[str, float]:
        """Predict for what is validated with, and compare with what is right."""

    def write(self, folder: Path) -> None:
        """Write the last predictions; those of answers are as the official scripts read them."""
        write_file(folder / PREDICTIONS, json.dumps(self.predictions, ensure_ascii=False, indent=1) + "\n")


@dataclass(frozen=True)
class Evaluated:
    """The best evaluation of a training.

    Attributes:
        metrics: the metrics on what is validated with.
        epoch: when they were measured.
        losses: the mean training loss since the evaluation before, for each evaluation.
    """

    metrics: dict[str, float]
    epoch: float
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Trained(Evaluated):
    """The best evaluation, and its `model`, whose predictions are the last ones of the task."""

    model: Any


def train(
    task: Task,
    model: torch.nn.Module,
    folder: Path,
    say: Callable[[str], None],
    *,
    about: str = "",
    device: Device,
    precision: Precision,
    patience: int | None,
    optimizer: torch.optim.Optimizer | None = None,
    **arguments: Any,
) -> Trained:
    """Train a model, or go on with that, with checkpoints in a folder.

    Args:
        task: what it learns.
        model: maps a batch of the task to outputs with a loss.
        folder: of checkpoints.
        say: called with a line for each evaluation, which begins with `about`.
        device, precision: where, and how, to compute.
        patience: the evaluations without a better model after which to stop; None for no such end.
        optimizer: the optimiser; None for AdamW.
        **arguments: those of `TrainingArguments`.
    """
    place = choose_device(device)
    bf16 = choose_precision(precision, place) == "bf16"
    verbosity = transformers.logging.get_verbosity()  # which `log_level` changes for the whole process
    try:
        trainer = TaskTrainer(
            model,
            TrainingArguments(
                str(folder),
                bf16=bf16,
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
                **arguments,
            ),
            data_collator=task.collate,
            train_dataset=task.train,
            eval_dataset=task.held_out,
            optimizers=(optimizer, None),
            callbacks=[Said(about, say), *([] if patience is None else [EarlyStoppingCallback(patience)])],
        )
        trainer.task = task
        trainer.remove_callback(transformers.PrinterCallback)
        with quietly():
            trainer.train(resume_from_checkpoint=_last_whole(folder))
    finally:
        transformers.logging.set_verbosity(verbosity)
    steps, history = trainer.state.best_global_step, trainer.state.log_history
    if steps != trainer.evaluated:  # the last predictions are of another model
        task.evaluate(trainer.model, bf16)
    logged = next(entry for entry in history if entry["step"] == steps and f"eval_{task.metric}" in entry)
    metrics = {name.removeprefix("eval_"): value for name, value in logged.items() if name.startswith("eval_")}
    losses = tuple(entry["loss"] for entry in history if "loss" in entry)
    return Trained(metrics, logged["epoch"], losses, trainer.model)


class TaskTrainer(Trainer):  # type: ignore[misc]  # transformers has no types here
    """A `Trainer` that evaluates by the metrics of a task."""

    task: Task
    control: Any
    evaluated = -1
    """The step of the last evaluation."""

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """The metrics on the held-out data."""
        found = self.task.evaluate(self.accelerator.unwrap_model(self.model), self.args.bf16)
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


def plain_options(config: Any) -> dict[str, Any]:
    """The options that decide the result, with advanced ones among them, as plain data."""
    fields = dataclasses.asdict(config)
    fields |= fields.get("advanced", {})
    plain: dict[str, Any] = json.loads(
        json.dumps({name: value for name, value in fields.items() if name not in _SAME_RESULT}, default=str)
    )
    return plain


def begun(config: Any, name: str, content: type[Begun]) -> Begun | None:
    """What a training that is resumed has found; None for a new one, for whose folder it makes room.

    Args:
        config: the options, with `out` and `resume`.
        name: the name of the file of the result in `out`.
        content: what the file holds; its field `config` are the options that it was begun with.

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
        raise ArgumentError("resume", f"is True, but {out} holds no training that has begun: leave it out.")
    found = read_file(file, content)
    before: dict[str, Any] = vars(found)["config"]
    for option, value in plain_options(config).items():
        if value != before.get(option):
            was = shown(before.get(option))
            raise ArgumentError(option, f"is {shown(value)}, but {out} was begun with {was}: resume with the same options.")
    return found


def write_result(file: Path, result: Any) -> None:
    """Write a result, a dataclass, as JSON."""
    write_file(file, json.dumps(dataclasses.asdict(result), indent=1) + "\n")
