"""The types of the parts of an experiment; `catalogue.py` holds their values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lineartime.choices import BYTE_VOCABULARY, ScaleName, Task, TextName
from lineartime.models.systems import Size
from lineartime.training.config import RecipeName

Kind = Literal["quality", "latency"]

MIN_TRIAL_STEPS = 60
"""The fewest steps after which trials rank learning rates as longer runs do: see docs/experiments.md."""
MAX_TRIAL_RATIO = 4
"""The maximum duration of a trial that needs more time for these steps, as a multiple of its planned seconds."""


@dataclass(frozen=True)
class Arm:
    """One of the models that an experiment compares.

    Attributes:
        name: in tables; unique in its experiment.
        system: the name of its row in the table of systems.
        override: other values for options of the model.
        seeds: how many seeds are trained; the `paper` scale has one.
        scales: where it takes part.
        paper_row: its name in the paper's tables; empty if it has none.
        paper_preset: its preset at the scale `paper`, if that is not SYSTEM-base; `{size}` stands for the size of the setting.
    """

    name: str
    system: str
    override: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 1
    scales: tuple[ScaleName, ...] = ("trial", "cpu", "gpu", "paper")
    paper_row: str = ""
    paper_preset: str = ""


@dataclass(frozen=True)
class Setting:
    """The text and the context in which all arms are compared, and the size of their models.

    Attributes:
        text: the kind of text.
        context: tokens of a training sequence.
        size: the name of one of the scale's sizes; at the scale `paper`, of the size of a preset.
    """

    text: TextName
    context: int
    size: str = "main"

    @property
    def label(self) -> str:
        """Its name, also that of its folder."""
        return f"{self.text}-{self.context}" + ("" if self.size == "main" else f"-{self.size}")

    def __str__(self) -> str:
        size = "" if self.size == "main" else f", size {self.size}"
        return f"{self.text}, {self.context:,} tokens{size}"


@dataclass(frozen=True)
class Optimizer:
    """An optimiser, tuned over the same rates for every system.

    Attributes:
        rates: four learning rates for each scale that tunes; two for a trial.
        options: the options of training that choose it.
    """

    rates: Mapping[ScaleName, tuple[float, ...]]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FinalTest:
    """A measurement of a trained model on the test split.

    Attributes:
        name: what differs from training; empty if nothing does.
        times_context: the context, as a multiple of that of training.
        chunk_size: another chunk size than in training.
    """

    name: str = ""
    times_context: int = 1
    chunk_size: int | None = None


@dataclass(frozen=True)
class Scale:
    """How large the runs are. All durations are seconds of training, without evaluations and compilation.

    Attributes:
        description: one line about the scale.
        sizes: the sizes of the models, by name.
        tokens_per_batch: tokens in an optimiser step.
        tokens_at_once: tokens computed together; a step of more accumulates gradients. None if the recipe tells it.
        budget: seconds of training of a run; None if the recipe fixes the steps.
        tuning: seconds of a run that tries a learning rate; None if no rate is tried.
        tokenizer: the name of the tokenizer, as for training.
        speed_steps: steps of a run that measures how fast a model trains, before any is tuned.
        speed_rounds: how often all models are measured, in turn.
        evaluations: how often a run is evaluated on held-out text.
        validation_tokens: tokens of each of these evaluations.
        test_tokens: tokens of the test at the end, from the beginning of the test split.
        compile: whether models are compiled by torch.compile.
    """

    description: str
    sizes: Mapping[str, Size]
    tokens_per_batch: int
    tokens_at_once: int | None
    budget: float | None
    tuning: float | None
    tokenizer: str = "bytes"
    speed_steps: int = 8
    speed_rounds: int = 3
    evaluations: int = 12
    validation_tokens: int = 32_768
    test_tokens: int = 262_144
    compile: Literal["auto", "on", "off"] = "off"

    @property
    def vocab_size(self) -> int:
        """The vocabulary size of the tokenizer."""
        return BYTE_VOCABULARY if self.tokenizer == "bytes" else int(self.tokenizer.rpartition("-")[2])


@dataclass(frozen=True)
class Experiment:
    """A question, the models that are compared to answer it, and the settings.

    Attributes:
        title: its title in a report.
        question: the question that it answers, in a sentence.
        arms: the models. Parameters are matched to the first.
        settings: where they are compared, by scale; `trial` takes the first one of `cpu`, with a short context.
        baseline: the arm whose final quality the others have to reach, and that losses and times are relative to.
        task: the task that models learn.
        recipe: the paper's recipe, for the scale `paper`.
        paper_tables: the paper's tables that have rows of the arms; empty if the paper has no numbers.
        tests: what is measured at the end of a run.
        each_optimizer: whether every optimiser is trained in full; otherwise, the better one after tuning.
        pairs: arms whose difference the paper reports, (exact, approximate), by the paper's name.
        words: whether the metric is the perplexity per word.
        kind: "quality", or "latency", which trains nothing.
        budget: seconds of training of a run by scale, if they are not the scale's.
        tuning: seconds of training of a trial by scale, if they are not the scale's.
        tokenizer: the name of the tokenizer by scale, if it is not the scale's.
    """

    title: str
    question: str
    arms: tuple[Arm, ...]
    settings: Mapping[ScaleName, tuple[Setting, ...]]
    baseline: str
    task: Task = "clm"
    recipe: RecipeName = "lm-wiki40b"
    paper_tables: tuple[str, ...] = ()
    tests: tuple[FinalTest, ...] = (FinalTest(),)
    each_optimizer: bool = False
    pairs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    words: bool = False
    kind: Kind = "quality"
    budget: Mapping[ScaleName, float] = field(default_factory=dict)
    tuning: Mapping[ScaleName, float] = field(default_factory=dict)
    tokenizer: Mapping[ScaleName, str] = field(default_factory=dict)
