"""Everything one training run is told, which is also what `lineartime train --help` shows."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lineartime.errors import LineartimeError
from lineartime.models.config import ModelConfig, Task, check_fields, from_fields
from lineartime.models.presets import resolve
from lineartime.training.checkpoint import read_facts

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "fp32", "bf16"]


_MAY_CHANGE = ("device", "precision", "compile", "cache", "out", "resume")
"""Options that may be others when a run is resumed: it may have moved to another machine."""


@dataclass(frozen=True)
class TrainConfig:
    """Train a model on text; leaves checkpoints, metrics.jsonl, TensorBoard scalars and a loss curve in --out."""

    preset: str = "flash-tiny"
    """Model to train: a name that `lineartime presets` lists."""
    override: tuple[str, ...] = ()
    """Other values for fields of the model, for instance: --override chunk_size=64 dropout=0.1"""
    task: Task = "clm"
    """What to learn: clm, the next token, or mlm, masked tokens."""
    data: Path | None = None
    """Text file or folder of text files; the default is the source of Python's standard library."""
    tokenizer: Path | None = None
    """tokenizer.json of the Hugging Face tokenizers library; the default is one token for each byte."""
    context_length: int = 512
    """Tokens of context in each training sequence."""
    batch_size: int = 4
    """Sequences in each batch."""
    accumulate: int = 1
    """Batches whose gradients are averaged for one step."""
    steps: int = 600
    """Optimiser steps of the whole run."""
    learning_rate: float = 3e-3
    """Peak learning rate, reached after the warm-up; then it falls linearly to zero."""
    warmup_steps: int | None = None
    """Steps over which the learning rate rises from zero; the default is a tenth of all steps."""
    beta1: float = 0.9
    """AdamW: decay of the running mean of gradients."""
    beta2: float = 0.99
    """AdamW: decay of the running mean of squared gradients."""
    epsilon: float = 1e-6
    """AdamW: the small number in its denominator."""
    weight_decay: float = 0.01
    """AdamW: decay of matrices; vectors and scalars are never decayed."""
    clip_norm: float = 1.0
    """Largest norm of the gradient; a longer one is shortened to it. 0 clips nothing."""
    seed: int = 0
    """Seed of the initial weights, the batches and dropout."""
    eval_every: int = 100
    """Steps between two evaluations on held-out text, each of which is followed by a checkpoint."""
    eval_windows: int = 64
    """Sequences of held-out text in each of these evaluations."""
    device: Device = "auto"
    """Where to train; auto takes a GPU if there is one."""
    precision: Precision = "auto"
    """Precision of matrix products; auto takes bf16 where this machine is faster with it. Weights are always fp32."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; auto uses it where the run is long enough to earn back the compilation."""
    tensorboard: bool = True
    """Whether to write TensorBoard scalars."""
    cache: Path | None = None
    """Folder for encoded text; the default is lineartime in the user's cache folder."""
    out: Path | None = None
    """Folder of the run; the default is runs/PRESET."""
    resume: bool = False
    """Continue the run in --out where its last checkpoint left it, with the options it was started with."""

    def __post_init__(self) -> None:
        # A checkpoint has to find its text from any working directory.
        for name in ("data", "tokenizer", "cache"):
            path = getattr(self, name)
            if isinstance(path, Path):
                object.__setattr__(self, name, path.absolute())

    @property
    def run_directory(self) -> Path:
        """The folder of the run."""
        return self.out or Path("runs") / self.preset

    def check(self) -> None:
        """Raise LineartimeError, naming the option, for a value outside what it allows."""
        try:
            check_fields(self, "TrainConfig")
        except ValueError as error:
            raise LineartimeError(str(error)) from None
        for option in ("context_length", "batch_size", "accumulate", "steps", "eval_every", "eval_windows"):
            if getattr(self, option) < 1:
                raise LineartimeError(f"{_flag(option)} is {getattr(self, option)}, but must be at least 1.")
        for option in ("learning_rate", "beta1", "beta2", "epsilon", "weight_decay", "clip_norm"):
            if not math.isfinite(getattr(self, option)):
                raise LineartimeError(f"{_flag(option)} is {getattr(self, option)}, but must be a finite number.")
        for option in ("warmup_steps", "weight_decay", "clip_norm", "seed"):
            if (getattr(self, option) or 0) < 0:
                raise LineartimeError(f"{_flag(option)} is {getattr(self, option)}, but must not be negative.")
        if self.warmup_steps is not None and self.warmup_steps >= self.steps:
            raise LineartimeError(f"--warmup-steps is {self.warmup_steps}, but must be below --steps = {self.steps}.")
        if self.seed >= 2**63:
            raise LineartimeError(f"--seed is {self.seed}, but must be below 2^63.")
        for option in ("beta1", "beta2"):
            if not 0 <= getattr(self, option) < 1:
                raise LineartimeError(f"{_flag(option)} is {getattr(self, option)}, but must be at least 0 and below 1.")
        for option in ("learning_rate", "epsilon"):
            if not getattr(self, option) > 0:
                raise LineartimeError(f"{_flag(option)} is {getattr(self, option)}, but must be above 0.")

    def model_config(self, vocab_size: int) -> ModelConfig:
        """The model these options describe; LineartimeError, naming the option, where they do not."""
        values: dict[str, Any] = {}
        for item in self.override:
            name, equals, text = item.partition("=")
            if not equals:
                raise LineartimeError(f"--override {item!r} is not of the form NAME=VALUE, for instance chunk_size=64.")
            values[name] = text if (name, text) == ("absolute_position", "none") else _parse(text)
        for name, instead in (("vocab_size", "it follows from --tokenizer"), ("task", "use --task")):
            if name in values:
                raise LineartimeError(f"--override cannot set {name}: {instead}.")
        try:
            config = resolve(self.preset, self.task)
        except ValueError as error:
            raise LineartimeError(f"--preset: {error}") from None
        try:
            config = config.override(vocab_size=vocab_size, **values)
        except ValueError as error:
            raise LineartimeError(f"--override: {error}") from None
        longest = config.longest_sequence
        if longest is not None and self.context_length > longest:
            field = "max_positions" if longest == config.max_positions else "max_length"
            raise LineartimeError(
                f"--context-length is {self.context_length}, but {self.preset} reads at most {longest} tokens: use a shorter "
                f"context, or --override {field}={self.context_length}."
            )
        return config

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary for JSON, from which `from_dict` makes an equal config."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "TrainConfig":
        """The config that `to_dict` described; ValueError naming the field for anything unknown or of the wrong type."""
        data = dict(data)
        for name in ("data", "tokenizer", "cache", "out"):
            if data.get(name) is not None:
                data[name] = Path(data[name])
        data["override"] = tuple(data.get("override", ()))
        return from_fields(cls, data, "training")


def saved_config(checkpoint: Path) -> TrainConfig:
    """The options that the run of a checkpoint was started with; LineartimeError if they cannot be read."""
    try:
        return TrainConfig.from_dict(read_facts(checkpoint)["config"])
    except ValueError as error:
        raise LineartimeError(f"The options in {checkpoint} are not of this version of lineartime: {error}") from None


def resumed_config(asked: TrainConfig, started: TrainConfig, left_out: TrainConfig) -> TrainConfig:
    """The options of a run that goes on: its own, and those asked for where they may be others.

    Args:
        asked: the options now.
        started: the options of the run.
        left_out: what an option is now if nobody asked for it.

    Raises:
        LineartimeError: naming the option, if it is asked to differ from the run's and must not.
    """
    values = {}
    for field in dataclasses.fields(TrainConfig):
        new, old = getattr(asked, field.name), getattr(started, field.name)
        if field.name in ("out", "resume") or (new != getattr(left_out, field.name) and field.name in _MAY_CHANGE):
            values[field.name] = new
        elif new not in (old, getattr(left_out, field.name)):
            raise LineartimeError(
                f"{_flag(field.name)} is {_shown(new)}, but the run in {asked.run_directory} was started with {_shown(old)}: "
                "leave the option out to resume it, or start another run in another --out."
            )
    return dataclasses.replace(started, **values)


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _shown(value: object) -> str:
    """A value as it stands on the command line."""
    return "nothing" if value in (None, ()) else " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _parse(text: str) -> Any:
    """A value of --override: a number, true, false, none, or a text."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text
