"""The options of a training run, whose docstrings are the help of the command line; the learning rates that they give; recipes.

With a peak P, S steps, W of them warm-up, D of them decay, and x = (step - W) / (S - W), from 0 after the warm-up to 1 just
after the last step, the rate of a step, counted from 0, is P (step + 1) / W during the warm-up, and then

    linear:   P (1 - x)
    cosine:   F + (P - F) (1 + cos(pi x)) / 2, where the floor F is P / 10
    constant: P
    wsd:      P, and in the last D steps P (S - step) / D

Sources: MiniCPM (arXiv 2404.06395, section 4) for wsd (warm-up, stable, decay); "Transformer Quality in Linear Time"
(arXiv 2202.10447, section 4 and appendix B) for the paper's recipes.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from lineartime.choices import TEXT_COLUMN, Device, Precision, RawIds, Task
from lineartime.errors import ArgumentError, check_choice
from lineartime.fields import Between, Positive, check_fields, from_fields
from lineartime.files import absolute_path
from lineartime.host import Threads
from lineartime.units import number_or_text

if TYPE_CHECKING:  # these need PyTorch, without which the command line shows its help
    from lineartime.data import Rows
    from lineartime.models import ModelConfig

RecipeName = Literal["quick", "lm-wiki40b", "lm-pg19", "mlm-c4", "mlm-wikipedia-4096"]
OptimizerName = Literal["adamw", "muon"]
Tracker = Literal["tensorboard", "wandb"]

Steps = Annotated[int, Between(1, 10**9)]
Size = Annotated[int, Between(1, 2**30)]
Rate = Annotated[float, Between(above=0, most=1e35)]
Ratio = Annotated[float, Between(above=0, most=1e5)]
"""A factor of a learning rate: metrics.jsonl holds the product, and no number above 1e40."""
NotNegative = Annotated[float, Between(0)]
Decay = Annotated[float, Between(0, below=1)]
_COMPARED = 1000
"""At how many of the steps taken the rates of two schedules are compared."""


@dataclass(frozen=True)
class TrainConfig:
    """Train a model on text. The run's folder gets checkpoints, metrics.jsonl, TensorBoard scalars and a loss curve."""

    preset: str = "flash-tiny"
    """Preset of the model to train."""
    recipe: RecipeName | None = None
    """Take the defaults of all options from a recipe: quick, for a small model in minutes on a CPU, or one of the paper's."""
    init_from: Path | None = None
    """Start from the weights, model and tokenizer of a run, checkpoint or saved model; everything else starts anew."""
    override: tuple[str, ...] = ()
    """Other values for fields of the model, for instance chunk_size=64 pattern=flash,gau dropout=0.1"""
    task: Task = "clm"
    """What to predict: clm, the next token; mlm, masked tokens; prefix-lm, the text after a bidirectional prefix."""
    data: tuple[str, ...] = ()
    """Text file, folder, name of a corpus, or hub:ORG/NAME (docs/training.md); the default is Python's standard library."""
    text_column: str = TEXT_COLUMN
    """Column that holds the text in JSON, JSON lines, Parquet and hub data sets."""
    include: tuple[str, ...] = ()
    """Read only files of folders that match one of these patterns: '*.md' matches names, 'src/*.py' paths below the folder."""
    exclude: tuple[str, ...] = ()
    """Leave out what matches one of these patterns, files or folders. Hidden and binary files are always left out."""
    raw_ids: RawIds | None = None
    """Type of the token ids in files that do not state it: .bin of nanoGPT (uint16), .npy of OLMo, and bytes of MDS."""
    tokenizer: str | None = None
    """bytes, a file, a run, hub:NAME, or bpe-32000 (or another size) to train one; the default is bytes."""
    streaming: bool = False
    """Read one data set of the hub while training, for corpora too large to encode beforehand."""
    packed: bool = False
    """Keep documents apart: no token attends to another document."""
    context_length: Size = 512
    """Tokens in each training sequence."""
    batch_size: Size = 4
    """Sequences that each process computes at once; fewer if this does not divide its share of a step."""
    tokens_per_batch: Size | None = None
    """Tokens in each optimiser step, over all processes and micro-batches; the default is one batch per process."""
    steps: Steps = 600
    """Optimiser steps of the whole run."""
    optimizer: OptimizerName = "adamw"
    """adamw, or muon: Muon for the linear maps inside layers, and AdamW for everything else. See docs/training.md."""
    learning_rate: Rate = 3e-3
    """Peak learning rate, at the end of the warm-up."""
    adamw_ratio: Ratio = 1.0
    """Muon: learning rate of the parameters that AdamW updates, relative to that of the linear maps."""
    momentum: Decay = 0.95
    """Muon: decay of the running mean of gradients (Nesterov's momentum)."""
    schedule: Literal["linear", "cosine", "constant", "wsd"] = "linear"
    """Learning rate after the warm-up: linear, to zero; cosine, to a tenth; constant; wsd, constant, then linear to zero."""
    decay_steps: Steps | None = None
    """wsd: last steps, over which the learning rate falls to zero; the default is a fifth of all steps."""
    warmup_steps: Annotated[int, Between(0, 10**9)] | None = None
    """Steps over which the learning rate rises from zero; the default is a tenth of all, for constant and wsd at most 1,000."""
    beta1: Decay = 0.9
    """AdamW: decay of the running mean of gradients."""
    beta2: Decay = 0.99
    """AdamW: decay of the running mean of squared gradients."""
    epsilon: Positive = 1e-6
    """AdamW: small number added to the denominator."""
    weight_decay: NotNegative = 0.01
    """Weight decay of matrices, including embeddings and learned positions; vectors and scalars are never decayed."""
    clip_norm: NotNegative = 1.0
    """Maximum norm of the gradient; larger gradients are scaled down to it. 0 turns clipping off."""
    clip: Literal["global", "local"] = "global"
    """global: clip the mean gradient of all processes; local: clip the gradient of each before averaging."""
    clip_tokens: Size | None = None
    """Clip the gradient of every this many tokens before averaging, instead of `clip`, whatever the number of processes is."""
    max_skipped: Steps = 10
    """Training stops after this many consecutive steps that were skipped because a loss or gradient was not finite."""
    seed: Annotated[int, Between(0, below=2**63)] = 0
    """Seed of the initial weights, the batches and dropout."""
    eval_every: Steps = 100
    """Steps between evaluations on held-out text; a checkpoint is written after each."""
    eval_windows: Size = 64
    """Windows of held-out text in each evaluation."""
    keep_every: Steps | None = None
    """Interval in steps, a multiple of `eval_every`, at which checkpoints are kept besides the best and the last two."""
    max_time: Positive | None = None
    """Minutes of training, not of encoding, after which it stops as after an interrupt: the run can be resumed."""
    device: Device = "auto"
    """Device to train on; auto takes a GPU if there is one."""
    precision: Precision = "auto"
    """Precision of matrix products; auto takes bf16 if the device has units for it. Weights are always fp32."""
    threads: Threads | None = None
    """CPU threads in each process; the default is PyTorch's. If other programs are running, 1 is often fastest."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; auto uses it if the run is long enough to pay for the compilation."""
    recompute: bool = False
    """Recompute the activations of blocks in the backward pass: a third more work, far less memory."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How processes hold the weights: ddp, each process holds all of them; fsdp, each process holds a part."""
    context_parallel: Size = 1
    """Processes that share each sequence; only for FLASH."""
    timeout: Annotated[float, Between(above=0, most=10**7)] = 600.0
    """Seconds that a process waits for the others before it reports them lost."""
    track: tuple[Tracker, ...] = ("tensorboard",)
    """Trackers to write to besides metrics.jsonl: tensorboard, wandb; none if empty."""
    cache: Path | None = None
    """Folder for encoded text; the default is lineartime in the user's cache folder."""
    out: Path | None = None
    """Folder of the run; the default is runs/PRESET."""
    resume: bool = False
    """Resume the run in its folder from the last checkpoint, with the options it was started with."""
    auto_resume: bool = False
    """Resume if the folder holds a checkpoint, otherwise start: for jobs that are queued again, and for loops over runs."""

    def __post_init__(self) -> None:
        from lineartime.data import is_corpus_name, is_tokenizer_name

        given: dict[str, Any] = dict(vars(self))  # Python callers may pass a mapping, lists, and a str or a Path for each path
        if isinstance(self.override, Mapping):
            given["override"] = written(self.override)
        if not isinstance(self.preset, str):
            model = options_of(self.preset, self.task, all_values=self.recipe is not None)
            override = given["override"]
            if isinstance(override, (list, tuple)):  # anything else is refused below
                override = [*written(model["override"]), *override]
            given |= {**model, "override": override}
        for name in ("track", "data"):
            if isinstance(given[name], (str, Path)):
                given[name] = [given[name]]
        data = given["data"] or ()
        # A resumed run has to find its text from any working directory.
        given["data"] = [absolute_path(item, is_corpus_name) for item in data] if isinstance(data, (list, tuple)) else data
        given["tokenizer"] = absolute_path(self.tokenizer, is_tokenizer_name)
        for name, value in given.items():
            object.__setattr__(self, name, value)
        check_fields(self)
        if self.cache is not None:
            object.__setattr__(self, "cache", self.cache.absolute())

    @property
    def run_directory(self) -> Path:
        """The folder of the run."""
        return self.out or Path("runs") / self.preset

    @property
    def clips_locally(self) -> bool:
        """Whether gradients are clipped before they are averaged."""
        return (self.clip == "local" or self.clip_tokens is not None) and self.clip_norm > 0

    def check(self) -> None:
        """Raise LineartimeError, naming the argument, for values that do not fit together."""
        if self.warmup_steps is not None and self.warmup_steps >= self.steps:
            raise ArgumentError("warmup_steps", f"is {self.warmup_steps}, but must be below `steps={self.steps}`.")
        if self.schedule == "wsd" and self.decay_steps is not None and warmup_steps(self) + self.decay_steps > self.steps:
            most = f"with {warmup_steps(self)} steps of warm-up, be at most `steps={self.steps}`"
            raise ArgumentError("decay_steps", f"is {self.decay_steps}, but must, {most}.")
        if self.keep_every is not None and self.keep_every % self.eval_every:
            multiple = f"a multiple of `eval_every={self.eval_every}`: checkpoints follow evaluations"
            raise ArgumentError("keep_every", f"is {self.keep_every}, but must be {multiple}.")
        if self.clips_locally and self.parallel == "fsdp":
            name = "clip" if self.clip_tokens is None else "clip_tokens"
            found = f"is {getattr(self, name)}, but with `parallel=fsdp` no process has a whole gradient"
            raise ArgumentError(name, f"{found}: use `clip=global` or `parallel=ddp`.")
        if self.context_parallel > 1 and (self.packed or self.task == "prefix-lm"):
            what = "documents are kept apart (`packed`)" if self.packed else "`task=prefix-lm` has prefixes"
            raise ArgumentError("context_parallel", f"is {self.context_parallel}, but {what}: use one or the other.")
        given = not self.resume and self.recipe is None  # otherwise, an option without effect may come from there
        if given and self.decay_steps is not None and self.schedule != "wsd":
            found = f"is {self.decay_steps}, but {self.schedule} schedules have no decay"
            raise ArgumentError("decay_steps", f"{found}: use `schedule=wsd`, or leave it out.")
        for name in ("adamw_ratio", "momentum"):
            if given and self.optimizer == "adamw" and getattr(self, name) != getattr(TrainConfig, name):
                found = f"is {getattr(self, name)}, but is not used with `optimizer=adamw`"
                raise ArgumentError(name, f"{found}: use `optimizer=muon`, or leave it out.")

    def rows(self, data_rank: int, data_ranks: int) -> "Rows":
        """Divide the sequences of a step over the `data_ranks` processes that read different data. Raises as `check`.

        Sequences that are clipped together form a group.
        """
        from lineartime.data import Rows

        each = self.batch_size
        if self.tokens_per_batch is not None:
            smallest = data_ranks * self.context_length
            each, rest = divmod(self.tokens_per_batch, smallest)
            if rest or each < 1:
                product = f"{data_ranks} processes x `context_length`" if data_ranks > 1 else "`context_length`"
                multiple = f"a positive multiple of {smallest}, which is {product}"
                raise ArgumentError("tokens_per_batch", f"is {self.tokens_per_batch}, but must be {multiple}.")
        together = each
        if self.clip_tokens is not None and self.clip_norm > 0:
            together, rest = divmod(self.clip_tokens, self.context_length)
            if rest or together < 1 or each % together:
                multiple = f"a multiple of `context_length={self.context_length}`"
                divides = f"that divides the {each * self.context_length} tokens of a step in each process"
                raise ArgumentError("clip_tokens", f"is {self.clip_tokens}, but must be {multiple} {divides}.")
        at_once = next(count for count in range(min(self.batch_size, together), 0, -1) if together % count == 0)
        return Rows(each * data_ranks, at_once, data_rank, data_ranks, each // together * data_ranks)

    def model_config(self, vocab_size: int) -> "ModelConfig":
        """The config of the model that these options describe. Raises LineartimeError, naming the argument, if invalid."""
        from lineartime.models.systems import resolve

        values = dict(read_override(item) for item in self.override)
        if "task" in values:
            raise ArgumentError("override", "cannot set task: use `task`.")
        asked = values.pop("vocab_size", vocab_size)  # comes from a `ModelConfig`
        if asked != vocab_size:
            has = f"it follows from `tokenizer`, which has {vocab_size} tokens; choose another one, or vocab_size={vocab_size}"
            raise ArgumentError("override", f"cannot set vocab_size to {asked}: {has}.")
        resolve(self.preset, self.task)  # an error names the preset or the task
        with errors_in_override():
            config = resolve(self.preset, self.task, vocab_size=vocab_size, **values)
            longest = config.longest_sequence
        if longest is not None and self.context_length > longest:
            field = "max_positions" if longest == config.max_positions else "max_length"
            reads = f"but {self.preset} reads at most {longest} tokens: use a shorter context, or `override`"
            raise ArgumentError("context_length", f"is {self.context_length}, {reads} {field}={self.context_length}.")
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dictionary for JSON, from which `from_dict` restores an equal config."""
        values = {name: str(value) if isinstance(value, Path) else value for name, value in dataclasses.asdict(self).items()}
        # A single text is written as a string, as readers of the file expect.
        return {**values, "data": list(self.data) if len(self.data) > 1 else next(iter(self.data), None)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "TrainConfig":
        """Restore a config from the dictionary of `to_dict`; missing fields take their defaults. Raises ArgumentError."""
        return from_fields(cls, dict(data))


def warmup_steps(config: TrainConfig) -> int:
    """The number of steps over which the learning rate rises; by default, a tenth of all."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    most = config.steps if config.schedule in ("linear", "cosine") else 1000  # others may end sooner or later than planned
    return min(config.steps // 10, most)


def decay_steps(config: TrainConfig) -> int:
    """The number of last steps over which the learning rate of "wsd" falls: by default, a fifth of all after the warm-up."""
    if config.decay_steps is not None:
        return config.decay_steps
    return max(1, min(config.steps // 5, config.steps - warmup_steps(config)))


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of a step, counted from 0."""
    warmup, peak = warmup_steps(config), config.learning_rate
    left, falling = config.steps - step, max(1, config.steps - warmup)
    if step < warmup:
        return peak * (step + 1) / warmup
    match config.schedule:
        case "linear":
            return peak * left / falling
        case "cosine":
            floor = 0.1 * peak
            return floor + (peak - floor) * (1 + math.cos(math.pi * (step - warmup) / falling)) / 2
        case "constant":
            return peak
        case "wsd":
            return peak * min(1.0, left / decay_steps(config))


def with_other_steps(started: TrainConfig, asked: TrainConfig, taken: int) -> TrainConfig:
    """The options of a run, with its own warm-up, that goes on to the steps and the steps of decay of `asked`.

    Raises ArgumentError if the `taken` steps would have had other learning rates, or more were taken than are asked for.
    """
    warmup, name = warmup_steps(started), "steps" if asked.steps != started.steps else "decay_steps"
    found = f"is {getattr(asked, name)}, but the run was started with {getattr(started, name)}"
    if asked.steps <= max(taken - 1, warmup):
        raise ArgumentError("steps", f"{found}, of which {warmup} are warm-up, and has taken {taken}: ask for more.")
    if asked.decay_steps is not None and started.schedule != "wsd":
        problem = f"is {asked.decay_steps}, but the {started.schedule} schedule of this run has no decay: leave it out."
        raise ArgumentError("decay_steps", problem)
    changed = dataclasses.replace(started, steps=asked.steps, decay_steps=asked.decay_steps, warmup_steps=warmup)
    compared = {round(number * max(0, taken - 1) / _COMPARED) for number in range(_COMPARED + 1)} if taken else set()
    if any(learning_rate(step, changed) != learning_rate(step, started) for step in compared):
        raise ArgumentError(
            name,
            f"{found}, and some of the {taken} steps taken would have had other learning rates ({started.schedule} schedule): "
            "leave it out, or start a new run from its weights with `init_from`; a run with `schedule=constant`, or wsd before "
            "its decay, can go on.",
        )
    return changed


@contextmanager
def errors_in_override(*own: str) -> Iterator[None]:
    """Turn a ValueError about a field of the model into one about the argument `override`, except for `own` options."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, ArgumentError) and error.argument in own:
            raise
        raise ArgumentError("override", f"does not fit the model: {error}") from None


def read_override(item: str) -> tuple[str, Any]:
    """The name and the value in NAME=VALUE: a number, true, false, none, or a text."""
    name, equals, text = item.partition("=")
    if not equals:
        raise ArgumentError("override", f"contains {item!r}, which is not of the form NAME=VALUE, for instance chunk_size=64.")
    if text == "none" and name in ("absolute_position", "final_norm"):  # "none" is one of their values
        return name, text
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return name, words[text.lower()]
    return name, number_or_text(text)


def written(values: Mapping[str, Any]) -> list[str]:
    """Fields of a model as the command line writes them: NAME=VALUE."""
    return [f"{name}={_value(value)}" for name, value in values.items()]


def _value(value: object) -> str:
    """A value as `read_override` reads it back."""
    if isinstance(value, tuple):  # an option of this type reads the text
        return ",".join(map(_value, value)) or ","
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def merged_override(*overrides: Sequence[str]) -> tuple[str, ...]:
    """Merge overrides field by field; later ones win."""
    return tuple({item.partition("=")[0]: item for item in chain(*overrides)}.values())


def options_of(model: object, task: Task, *, all_values: bool) -> dict[str, Any]:
    """The options preset, task and override (by name) that describe a `ModelConfig`, including its vocabulary size.

    With `all_values`, values are overridden that are the preset's, too, because other options may set them. Raises
    ArgumentError for anything but a `ModelConfig`, a contradicting task, or a model that no preset resembles.
    """
    from lineartime.models.config import ModelConfig
    from lineartime.models.systems import nearest_preset, resolve

    if not isinstance(model, ModelConfig):
        raise ArgumentError("preset", f"is of type {type(model).__name__}, but must be the name of a preset, or a ModelConfig.")
    if task not in ("clm", model.task):
        raise ArgumentError("task", f"is {task!r}, but that of the ModelConfig is {model.task!r}: leave one of them out.")
    preset = nearest_preset(model)
    usual = {} if all_values else resolve(preset, model.task).values
    values = {name: value for name, value in model.values.items() if name not in usual or usual[name] != value}
    return {"preset": preset, "task": model.task, "override": {**values, "vocab_size": model.vocab_size}}


_PAPER: dict[str, Any] = {
    "tokenizer": "bpe-32000",
    "tokens_per_batch": 2**18,
    "steps": 125_000,
    "warmup_steps": 10_000,
    "optimizer": "adamw",
    "learning_rate": 7e-4,
    "beta1": 0.9,
    "beta2": 0.999,
    "epsilon": 1e-6,
    "weight_decay": 0.01,
    "clip_norm": 0.1,
    "clip": "local",
    "eval_every": 1_000,
}

_RECIPES: dict[RecipeName, dict[str, Any]] = {
    "quick": {
        "preset": "flash-memory-tiny",
        "tokenizer": "bpe-4096",
        "optimizer": "muon",
        "learning_rate": 5e-3,
        "adamw_ratio": 2.0,
        "steps": 420,
    },
    "lm-wiki40b": {**_PAPER, "data": "wiki40b", "task": "clm", "context_length": 1024},
    "lm-pg19": {**_PAPER, "data": "pg19", "task": "clm", "context_length": 1024},
    "mlm-c4": {**_PAPER, "data": "c4", "task": "mlm", "context_length": 512, "streaming": True},
    "mlm-wikipedia-4096": {
        **_PAPER,
        "data": "hub:wikimedia/wikipedia/20231101.en",
        "task": "mlm",
        "context_length": 4096,
        "streaming": True,
    },
}

_CHUNK_SIZES: dict[RecipeName, int] = {"lm-wiki40b": 256, "lm-pg19": 512, "mlm-c4": 256}


def recipe_config(recipe: RecipeName, preset: str | None = None) -> TrainConfig:
    """The options of a recipe for a preset, by default its own; any of them can be overridden.

    In the paper's recipes, the model gets the recipe's chunk size unless its system fixes one, and the gradients of the vanilla
    Transformer are not clipped. Raises ArgumentError for an unknown recipe or preset.
    """
    from lineartime.models.systems import system_of

    check_choice("recipe", recipe, tuple(_RECIPES))
    values = {"preset": TrainConfig.preset, **_RECIPES[recipe], "recipe": recipe}
    preset = values["preset"] = preset or values["preset"]
    system = system_of(preset)
    if "chunk_size" in system.sized_options and recipe in _CHUNK_SIZES:
        values["override"] = (f"chunk_size={_CHUNK_SIZES[recipe]}",)
    if not system.clips_gradient and recipe != "quick":
        values["clip_norm"] = 0.0
    return TrainConfig(**values)
