"""The options of a training run; their docstrings are the help of the command line."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

from lineartime.choices import MAX_EXPANSION, TEXT_COLUMN, Device, Precision, Task
from lineartime.errors import ArgumentError
from lineartime.fields import Between, Positive, check_fields, decode
from lineartime.files import absolute_path
from lineartime.host import Threads
from lineartime.training.overrides import errors_in_override, options_of, read_override, written

if TYPE_CHECKING:  # these need PyTorch, without which the command line shows its help
    from lineartime.data import Rows
    from lineartime.models import ModelConfig

RecipeName = Literal["quick", "lm-wiki40b", "lm-pg19", "mlm-c4", "mlm-wikipedia-4096"]
OptimizerName = Literal["adamw", "muon"]
Tracker = Literal["tensorboard", "wandb"]

Steps = Annotated[int, Between(1, 10**9)]
Size = Annotated[int, Between(1, 2**30)]
Expansion = Annotated[int, Between(1, 10**9)]
Lanes = Annotated[int, Between(1, 10**5)]
Shuffle = Annotated[int, Between(0, 10**7)]
Rate = Annotated[float, Between(above=0, most=1e35)]
Ratio = Annotated[float, Between(above=0, most=1e5)]
"""A factor of a learning rate: metrics.jsonl holds the product, and no number above 1e40."""
NotNegative = Annotated[float, Between(0)]
Decay = Annotated[float, Between(0, below=1)]


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
    """Text file, folder, name of a corpus, or hub:ORG/NAME (docs/data.md); the default is Python's standard library."""
    text_column: str = TEXT_COLUMN
    """Column that holds the text in JSON, JSON lines, Parquet and hub data sets."""
    max_expansion: Expansion = MAX_EXPANSION
    """Maximum bytes of text per byte of a compressed file; a file that expands further is refused."""
    include: tuple[str, ...] = ()
    """Read only files of folders that match one of these patterns: '*.md' matches names, 'src/*.py' paths below the folder."""
    exclude: tuple[str, ...] = ()
    """Leave out what matches one of these patterns, files or folders. Hidden and binary files are always left out."""
    tokenizer: str | None = None
    """bytes, a file, a run, hub:NAME, or bpe-32000 or unigram-32000 (or another size) to train one; the default is bytes."""
    streaming: bool = False
    """Read the text while training, for corpora too large to encode beforehand."""
    lanes: Lanes = 8
    """Parts of a streamed corpus that are interleaved; a multiple of the number of processes."""
    shuffle_documents: Shuffle = 0
    """Documents in each part of a streamed corpus that are shuffled together; 0 keeps their order."""
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
        if isinstance(self.track, str):
            given["track"] = [self.track]
        data = [] if self.data is None else [self.data] if isinstance(self.data, (str, Path)) else self.data
        given["data"] = [absolute_path(item, is_corpus_name) for item in data] if isinstance(data, (list, tuple)) else data
        for name in ("preset", "task", "override", "track", "data"):
            object.__setattr__(self, name, given[name])
        # A resumed run has to find its text from any working directory.
        object.__setattr__(self, "tokenizer", absolute_path(self.tokenizer, is_tokenizer_name))
        check_fields(self)
        if isinstance(self.cache, Path):
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
        from lineartime.training.schedule import warmup_steps

        if self.warmup_steps is not None and self.warmup_steps >= self.steps:
            self._refuse("warmup_steps", "but must be below ", f"`steps={self.steps!r}`", ".")
        if self.schedule == "wsd" and self.decay_steps is not None and warmup_steps(self) + self.decay_steps > self.steps:
            most = f"but must, with {warmup_steps(self)} steps of warm-up, be at most "
            self._refuse("decay_steps", most, f"`steps={self.steps!r}`", ".")
        if self.keep_every is not None and self.keep_every % self.eval_every:
            multiple = ("but must be a multiple of ", f"`eval_every={self.eval_every!r}`")
            self._refuse("keep_every", *multiple, ": checkpoints follow evaluations.")
        if self.clips_locally and self.parallel == "fsdp":
            found = ("but with ", "`parallel='fsdp'`", " no process has a whole gradient: use ")
            advice = ("`clip='global'`", " or ", "`parallel='ddp'`", ".")
            self._refuse("clip" if self.clip_tokens is None else "clip_tokens", *found, *advice)
        if self.packed and self.context_parallel > 1:
            raise ArgumentError("packed", "cannot be combined with `context_parallel`: use one or the other.")
        if self.task == "prefix-lm" and self.context_parallel > 1:
            self._refuse("task", "whose prefixes cannot be split over processes: leave out ", "`context_parallel`", ".")
        if not self.resume and self.recipe is None:  # otherwise, what was not given may be unused here
            self._check_used()

    def _check_used(self) -> None:
        """Raise ArgumentError for an option that has no effect beside the others."""
        if self.decay_steps is not None and self.schedule != "wsd":
            problem = f"but {self.schedule} schedules have no decay: use "
            self._refuse("decay_steps", problem, "`schedule='wsd'`", ", or leave it out.")
        for name in ("adamw_ratio", "momentum"):
            usual = getattr(TrainConfig, name)
            if self.optimizer == "adamw" and getattr(self, name) != usual:
                use = (": use ", "`optimizer='muon'`", " or ", f"`{name}={usual!r}`", ".")
                self._refuse(name, "but is not used with ", "`optimizer='adamw'`", *use)
        if self.lanes != TrainConfig.lanes and not self.streaming:
            self._refuse("lanes", "but needs ", "`streaming`", ": leave it out.")
        if self.shuffle_documents and not self.streaming:
            advice = ": text that is encoded beforehand is shuffled by windows."
            self._refuse("shuffle_documents", "but needs ", "`streaming`", advice)

    def _refuse(self, name: str, *why: str) -> NoReturn:
        raise ArgumentError(name, f"is {getattr(self, name)}, ", *why)

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
                processes = f"{data_ranks} processes x " if data_ranks > 1 else ""
                multiple = f"but must be a positive multiple of {smallest}, which is {processes}"
                self._refuse("tokens_per_batch", multiple, "`context_length`", ".")
        together = each
        if self.clip_tokens is not None and self.clip_norm > 0:
            together, rest = divmod(self.clip_tokens, self.context_length)
            if rest or together < 1 or each % together:
                divides = f" that divides the {each * self.context_length} tokens of a step in each process."
                multiple_of = f"`context_length={self.context_length!r}`"
                self._refuse("clip_tokens", "but must be a multiple of ", multiple_of, divides)
        at_once = next(count for count in range(min(self.batch_size, together), 0, -1) if together % count == 0)
        return Rows(each * data_ranks, at_once, data_rank, data_ranks, each // together * data_ranks)

    def model_config(self, vocab_size: int) -> "ModelConfig":
        """The config of the model that these options describe. Raises LineartimeError, naming the argument, if invalid."""
        from lineartime.models.presets import resolve

        values = dict(read_override(item) for item in self.override)
        if "task" in values:
            raise ArgumentError("override", "cannot set task: use `task`.")
        asked = values.pop("vocab_size", vocab_size)  # comes from a `ModelConfig`
        if asked != vocab_size:
            has = f", which has {vocab_size} tokens; choose another one, or vocab_size={vocab_size}."
            raise ArgumentError("override", f"cannot set vocab_size to {asked}: it follows from `tokenizer`", has)
        resolve(self.preset, self.task)  # an error names the preset or the task
        with errors_in_override():
            config = resolve(self.preset, self.task, vocab_size=vocab_size, **values)
            longest = config.longest_sequence
        if longest is not None and self.context_length > longest:
            field = "max_positions" if longest == config.max_positions else "max_length"
            reads = f"but {self.preset} reads at most {longest} tokens: use a shorter context, or "
            self._refuse("context_length", reads, "`override`", f" {field}={self.context_length}.")
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dictionary for JSON, from which `from_dict` restores an equal config."""
        values = {name: str(value) if isinstance(value, Path) else value for name, value in dataclasses.asdict(self).items()}
        # A single text is written as a string, as readers of the file expect.
        return {**values, "data": list(self.data) if len(self.data) > 1 else next(iter(self.data), None)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "TrainConfig":
        """Restore a config from the dictionary of `to_dict`; missing fields take their defaults. Raises ArgumentError."""
        given = data.get("data") or []
        config: TrainConfig = decode(cls, {**data, "data": [given] if isinstance(given, (str, Path)) else given})
        return config
