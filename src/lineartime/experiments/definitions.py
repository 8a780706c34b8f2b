"""The parts of an experiment; `catalogue.py` holds their values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lineartime.choices import BYTE_VOCABULARY, MemoryTask, ScaleName, Task, TextName
from lineartime.models.systems import Size
from lineartime.training.config import RecipeName

JobKind = Literal["speed", "tune", "run", "latency", "memory"]
"""Speed: a few steps to measure how fast a model trains. Tune: a short run with one learning rate. Memory: a run on a task."""
MIN_TRIAL_STEPS = 60
"""The fewest steps after which trials rank learning rates as longer runs do: see docs/experiments.md."""
MAX_TRIAL_RATIO = 4
"""The maximum duration of a trial that needs more time for these steps, as a multiple of its planned seconds."""
INTERRUPTED = 130
"""The exit status of a process that was asked to stop."""


@dataclass(frozen=True)
class Arm:
    """One of the models that an experiment compares."""

    name: str  # in tables; unique in its experiment
    system: str  # the name of its row in the table of systems
    override: Mapping[str, Any] = field(default_factory=dict)  # other values for options of the model
    seeds: int = 1  # how many are trained; at the scale `paper`, one
    scales: tuple[ScaleName, ...] = ("trial", "cpu", "gpu", "paper")  # where it takes part
    paper_row: str = ""  # its name in the paper's tables; empty if it has none
    paper_preset: str = "{system}-base"  # at the scale `paper`; the size of the setting can be filled in, too


@dataclass(frozen=True)
class Setting:
    """The text and the context, in tokens, in which all arms are compared, and the name of the size of their models.

    The size is one of the scale's, or at the scale `paper` that of a preset. A task for a memory, of which most read no text,
    may have a number of tokens to remember, its pairs.
    """

    text: TextName
    context: int
    size: str = "main"
    task: MemoryTask | None = None
    pairs: int = 0

    @property
    def reads_text(self) -> bool:
        """Whether its texts are not all generated."""
        return self.task in (None, "needle")

    @property
    def label(self) -> str:
        """Its name, also that of its folder."""
        if self.task is not None:
            return f"{self.task}-{self.context}" + (f"-{self.pairs}" if self.pairs else "")
        return f"{self.text}-{self.context}" + ("" if self.size == "main" else f"-{self.size}")

    def __str__(self) -> str:
        if self.task is not None:
            return f"{self.task}, {self.context:,} tokens" + (f", {self.pairs:,} to remember" if self.pairs else "")
        size = "" if self.size == "main" else f", size {self.size}"
        return f"{self.text}, {self.context:,} tokens{size}"


@dataclass(frozen=True)
class Optimizer:
    """An optimiser, tuned over the same learning rates for every system: those of each scale that tunes.

    Its options are those of training that choose it.
    """

    rates: Mapping[ScaleName, tuple[float, ...]]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FinalTest:
    """A measurement of a trained model on the test split."""

    name: str = ""  # what differs from training; empty if nothing does
    times_context: int = 1  # the context, as a multiple of that of training
    chunk_size: int | None = None  # another one than in training
    depth: float | None = None  # of a needle, as the share of the text before it; any if None


@dataclass(frozen=True)
class Scale:
    """How large the runs are. All durations are seconds of training, without evaluations and compilation."""

    description: str
    sizes: Mapping[str, Size]  # of the models, by name
    tokens_per_batch: int  # in an optimiser step
    tokens_at_once: int | None  # a step of more accumulates gradients; None if the recipe tells it
    budget: float | None  # seconds of a run; None if the recipe fixes the steps
    tuning: float | None  # seconds of a run that tries a learning rate; None if no rate is tried
    tokenizer: str = "bytes"  # its name, as for training
    speed_steps: int = 8  # of a run that measures how fast a model trains, before any is tuned
    speed_rounds: int = 3  # how often all models are measured, in turn
    evaluations: int = 12  # of a run on held-out text
    validation_tokens: int = 32_768  # of each of these evaluations
    test_tokens: int = 262_144  # of the test at the end, from the beginning of the test split
    compile: Literal["auto", "on", "off"] = "off"  # by torch.compile

    @property
    def vocab_size(self) -> int:
        """The vocabulary size of the tokenizer."""
        return BYTE_VOCABULARY if self.tokenizer == "bytes" else int(self.tokenizer.rpartition("-")[2])


@dataclass(frozen=True)
class Experiment:
    """A question, the models that are compared to answer it, and the settings."""

    title: str
    question: str
    arms: tuple[Arm, ...]  # parameters are matched to the first
    settings: Mapping[ScaleName, tuple[Setting, ...]]  # `trial` takes the first one of `cpu`, with a short context
    baseline: str  # the arm whose final quality the others have to reach, and that losses and times are relative to
    task: Task = "clm"
    recipe: RecipeName = "lm-wiki40b"  # the paper's, for the scale `paper`
    paper_tables: tuple[str, ...] = ()  # those that have rows of the arms
    tests: tuple[FinalTest, ...] = (FinalTest(),)  # at the end of a run
    each_optimizer: bool = False  # whether every optimiser is trained in full; otherwise, the better one after tuning
    pairs: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # (exact, approximate), by the paper's name
    words: bool = False  # whether the metric is the perplexity per word
    kind: Literal["quality", "latency", "memory"] = "quality"  # latency trains nothing, and memory on tasks
    budget: Mapping[ScaleName, float] = field(default_factory=dict)  # if it is not the scale's own; so the next two
    tuning: Mapping[ScaleName, float] = field(default_factory=dict)
    tokenizer: Mapping[ScaleName, str] = field(default_factory=dict)
    override: Mapping[str, Any] = field(default_factory=dict)  # options of all arms whose system does not set them
    steps: Mapping[ScaleName, int] = field(default_factory=dict)  # of a run of memory
    rates: Mapping[ScaleName, tuple[float, ...]] = field(default_factory=dict)  # if they are not the optimiser's own


@dataclass(frozen=True)
class Job:
    """One process: a run to train, on text or on a task, or a measurement of latency."""

    folder: Path  # where it leaves its files
    kind: JobKind
    options: dict[str, Any]  # of training, or of the benchmark, as values for JSON
    tests: tuple[FinalTest, ...] = ()  # to measure at the end
    test_tokens: int | None = None  # how much of the test split they read; None for all of it
    seconds: float | None = None  # of training that are planned; None if the steps are given
    setting: Setting | None = None  # of a memory

    @property
    def name(self) -> str:
        """Its folder, from that of the experiment on: setting, system and run, or for latency the setting alone."""
        return "/".join(self.folder.parts[-1 if self.kind == "latency" else -3 :])
