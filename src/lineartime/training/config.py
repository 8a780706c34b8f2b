"""Everything one training run is told, which is also what `lineartime train --help` shows."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from lineartime.data import Rows, names_corpus, names_tokenizer
from lineartime.errors import LineartimeError
from lineartime.machine import Device, Precision
from lineartime.models.config import ModelConfig, Task
from lineartime.models.fields import check_fields, from_fields
from lineartime.models.presets import resolve

RecipeName = Literal["lm-wiki40b", "lm-pg19", "mlm-c4"]
Tracker = Literal["tensorboard", "wandb", "trackio"]

_POSITIVE = (
    "context_length",
    "batch_size",
    "steps",
    "eval_every",
    "eval_windows",
    "lanes",
    "context_parallel",
    "max_skipped",
)


@dataclass(frozen=True)
class TrainConfig:
    """Train a model on text; leaves checkpoints, metrics.jsonl, TensorBoard scalars and a loss curve in --out."""

    preset: Annotated[str, tyro.conf.arg(aliases=["--model"])] = "flash-tiny"
    """Model to train: a name that `lineartime presets` lists."""
    recipe: RecipeName | None = None
    """Other defaults for all options below: a recipe of the paper, with its corpus. See docs/training.md."""
    like: Path | None = None
    """Other defaults for all options: those of the run in this folder."""
    override: tuple[str, ...] = ()
    """Other values for fields of the model, for instance: --override chunk_size=64 dropout=0.1"""
    task: Task = "clm"
    """What to learn: clm, the next token, or mlm, masked tokens."""
    data: str | None = None
    """Text file, folder, or the name of a corpus (docs/data.md); the default is the source of Python's standard library."""
    tokenizer: str | None = None
    """tokenizer.json, or bpe-32000 or unigram-32000 (or another size) to train one on the text; the default is bytes."""
    streaming: bool = False
    """Read the text while training, for corpora too large to encode beforehand."""
    lanes: int = 8
    """With --streaming: parts of the corpus that are read side by side; a multiple of the number of processes."""
    packed: bool = False
    """Whether documents are kept apart: no token reads a document but its own."""
    context_length: Annotated[int, tyro.conf.arg(aliases=["--context"])] = 512
    """Tokens of context in each training sequence."""
    batch_size: int = 4
    """Sequences that each process computes at once; fewer, where that divides what it has to do in a step."""
    tokens_per_batch: int | None = None
    """Tokens in each optimiser step, over all processes and as many batches as that takes; the default is a batch of each."""
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
    clip: Literal["global", "local"] = "global"
    """global: shorten the mean gradient of all processes; local: each its own, before the mean is taken, as in the paper."""
    max_skipped: int = 10
    """Steps in a row with an infinite loss or gradient, which change nothing, before training stops."""
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
    recompute: bool = False
    """Whether blocks compute again in the backward pass what they would keep: a third more work, far less memory."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Of several processes: ddp, each holds all weights, or fsdp, each a part of them."""
    context_parallel: int = 1
    """Processes that share each sequence; only for FLASH."""
    timeout: float = 600.0
    """Seconds that a process waits for the others before it calls them lost."""
    track: tuple[Tracker, ...] = ("tensorboard",)
    """Where to write scalars besides metrics.jsonl: tensorboard, wandb, trackio; none if empty."""
    cache: Path | None = None
    """Folder for encoded text; the default is lineartime in the user's cache folder."""
    out: Path | None = None
    """Folder of the run; the default is runs/PRESET."""
    resume: bool = False
    """Continue the run in --out where its last checkpoint left it, with the options it was started with."""

    def __post_init__(self) -> None:
        # A checkpoint has to find its text from any working directory.
        for name in ("data", "tokenizer"):
            value = getattr(self, name)
            if isinstance(value, Path) or not (value is None or names_corpus(value) or names_tokenizer(value)):
                object.__setattr__(self, name, str(Path(value).absolute()))
        if isinstance(self.cache, Path):
            object.__setattr__(self, "cache", self.cache.absolute())

    @property
    def run_directory(self) -> Path:
        """The folder of the run."""
        return self.out or Path("runs") / self.preset

    @property
    def clips_locally(self) -> bool:
        """Whether each replica clips its own gradient."""
        return self.clip == "local" and self.clip_norm > 0

    def check(self) -> None:
        """Raise LineartimeError, naming the option, for a value outside what it allows."""
        try:
            check_fields(self)
        except ValueError as error:
            raise LineartimeError(str(error)) from None
        for option in _POSITIVE:
            if getattr(self, option) < 1:
                raise LineartimeError(f"{flag(option)} is {getattr(self, option)}, but must be at least 1.")
        for option in ("learning_rate", "beta1", "beta2", "epsilon", "weight_decay", "clip_norm", "timeout"):
            if not math.isfinite(getattr(self, option)):
                raise LineartimeError(f"{flag(option)} is {getattr(self, option)}, but must be a finite number.")
        for option in ("warmup_steps", "weight_decay", "clip_norm", "seed"):
            if (getattr(self, option) or 0) < 0:
                raise LineartimeError(f"{flag(option)} is {getattr(self, option)}, but must not be negative.")
        if self.warmup_steps is not None and self.warmup_steps >= self.steps:
            source = "" if self.recipe is None else f" (--recipe {self.recipe} has 10000)"
            raise LineartimeError(f"--warmup-steps is {self.warmup_steps}{source}, but must be below --steps = {self.steps}.")
        if self.clips_locally and self.parallel == "fsdp":
            raise LineartimeError(
                "--clip is local, but with --parallel fsdp no process ever has a whole gradient: use --clip global, or "
                "--parallel ddp."
            )
        if self.timeout > 1e7:
            raise LineartimeError(f"--timeout is {self.timeout:g}, but must be at most 1e7 seconds.")
        if self.packed and self.context_parallel > 1:
            raise LineartimeError("--packed keeps documents apart, which --context-parallel cannot: use one or the other.")
        if self.seed >= 2**63:
            raise LineartimeError(f"--seed is {self.seed}, but must be below 2^63.")
        for option in ("beta1", "beta2"):
            if not 0 <= getattr(self, option) < 1:
                raise LineartimeError(f"{flag(option)} is {getattr(self, option)}, but must be at least 0 and below 1.")
        for option in ("learning_rate", "epsilon", "timeout"):
            if not getattr(self, option) > 0:
                raise LineartimeError(f"{flag(option)} is {getattr(self, option)}, but must be above 0.")

    def rows(self, data_rank: int, data_ranks: int) -> Rows:
        """How the sequences of a step are dealt out to `data_ranks` processes that read their own; raises as `check`."""
        if self.tokens_per_batch is None:
            return Rows(self.batch_size * data_ranks, self.batch_size, data_rank, data_ranks)
        smallest = data_ranks * self.context_length
        if self.tokens_per_batch < 1 or self.tokens_per_batch % smallest:
            processes = f"{data_ranks} processes x " if data_ranks > 1 else ""
            raise LineartimeError(
                f"--tokens-per-batch is {self.tokens_per_batch}, but must be a positive multiple of {smallest}, which is "
                f"{processes}--context-length."
            )
        each = self.tokens_per_batch // smallest
        at_once = next(count for count in range(min(self.batch_size, each), 0, -1) if each % count == 0)
        return Rows(each * data_ranks, at_once, data_rank, data_ranks)

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
            longest = config.longest_sequence
        except ValueError as error:
            raise LineartimeError(f"--override: {error}") from None
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
        for name in ("like", "cache", "out"):
            if data.get(name) is not None:
                data[name] = Path(data[name])
        for name in ("override", "track"):
            data[name] = tuple(data.get(name, ()))
        return from_fields(cls, data, "training")


def flag(option: str) -> str:
    """How an option is written on the command line."""
    return "--" + option.replace("_", "-")


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
