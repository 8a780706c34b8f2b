"""The options of `reproduce`; their docstrings are the help of the command line."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from lineartime.choices import Device, MemoryTask, Precision, ScaleName, TextName
from lineartime.errors import ArgumentError, did_you_mean
from lineartime.fields import AtLeastOne, Between, Positive, check_fields
from lineartime.files import absolute_path
from lineartime.host import Threads
from lineartime.training.config import Rate

TEXT_OPTIONS = ("data", "code", "books", "wikipedia")
"""The options that give texts."""
TASK_OPTIONS = ("lengths", "pairs", "steps")
"""The options of the experiment on memory alone."""


@dataclass(frozen=True)
class ReproduceConfig:
    """Run an experiment of the paper, each model in a separate process, and compare the results with the paper's."""

    name: str = ""
    """Experiment: lm, next-ablation, mlm, pg19, gau-vs-mhsa, layer-ablation, chunk-size, local-global, memory, positions
    or normalization."""
    scale: ScaleName = "cpu"
    """trial: toy models for seconds; cpu: hours on 2 cores; gpu: at most 8 minutes a run."""
    out: Path = Path("runs/reproduce")
    """Parent folder of the results; an existing experiment is resumed."""
    report: bool = False
    """Only rebuild the report from existing results."""
    data: tuple[str, ...] = ()
    """Text in place of kinds that are not given; the default is Python's library."""
    code: tuple[str, ...] = ()
    """Text of programs: files, folders or names, as for train."""
    books: tuple[str, ...] = ()
    """Text of books."""
    wikipedia: tuple[str, ...] = ()
    """Text of Wikipedia."""
    systems: tuple[str, ...] = ()
    """Run only these models of the experiment now; another call can run the others."""
    add: tuple[str, ...] = ()
    """Further systems to compare, also your own: a name from presets without its size, or NAME:OPTION=VALUE."""
    contexts: tuple[AtLeastOne, ...] = ()
    """Run only these contexts now."""
    texts: tuple[TextName | MemoryTask, ...] = ()
    """Run only these kinds of text, or tasks for a memory, now."""
    seeds: AtLeastOne | None = None
    """Number of seeds to train of each model now, more or fewer than the one or two of the experiment."""
    optimizers: tuple[str, ...] = ()
    """Optimisers to tune; the default is all."""
    rates: tuple[Rate, ...] = ()
    """Learning rates to try, for one optimiser; the default is the four of the scale."""
    budget: Positive | None = None
    """Seconds of training of each run, without evaluations; the default is the scale's. Runs of memory have steps."""
    tuning: Positive | None = None
    """Seconds of training of each trial of a learning rate; a trial of fewer than 60 steps lasts up to four times as long."""
    lengths: tuple[AtLeastOne, ...] = ()
    """Memory: tokens of a text, even numbers; the default is the scale's."""
    pairs: tuple[AtLeastOne, ...] = ()
    """Memory: pairs of recall, and tokens of selective-copying; the default is the scale's."""
    steps: AtLeastOne | None = None
    """Memory: steps of each run; the default is the scale's."""
    longer: tuple[Annotated[int, Between(2, 1024)], ...] = ()
    """Test each model also in contexts that are so many times longer than in training."""
    compile: Literal["on", "off"] | None = None
    """Whether to use torch.compile; the default is the scale's."""
    precision: Precision = "auto"
    """Precision of matrix products; auto takes bf16 where the device has units for it."""
    device: Device = "auto"
    """Where to train; auto takes a GPU if there is one."""
    threads: Threads | None = None
    """Threads of the CPU in each process; the default is PyTorch's."""
    cache: Path | None = None
    """Folder for encoded text; the default is lineartime in the user's cache folder."""

    def __post_init__(self) -> None:
        from lineartime.data import is_corpus_name

        for name in TEXT_OPTIONS:
            object.__setattr__(self, name, tuple(absolute_path(text, is_corpus_name) for text in getattr(self, name)))
        check_fields(self)

    def check(self) -> None:
        """Raise ArgumentError for a value that is not allowed."""
        from lineartime.experiments.catalogue import EXPERIMENTS, OPTIMIZERS

        if not self.name:
            raise ArgumentError("name", f"is missing: give an experiment, {', '.join(EXPERIMENTS)}.")
        check_among("name", (self.name,), EXPERIMENTS, "an experiment")
        check_among("optimizers", self.optimizers, OPTIMIZERS, "an optimiser")
        remembers = EXPERIMENTS[self.name].remembers
        for name in ("budget", "tuning", *TEXT_OPTIONS) if remembers else TASK_OPTIONS:
            if value := getattr(self, name):
                raise ArgumentError(name, f"is {shown_option(value)}, which {self.name} does not have: leave it out.")
        if self.rates and len(self.optimizers or OPTIMIZERS) > 1 and (self.optimizers or not remembers):
            found = f"is {shown_option(self.rates)}, but each optimiser has its own"
            raise ArgumentError("rates", f"{found}: give one in `optimizers`.")


def shown_option(value: object) -> str:
    """The value of an option as it is written on the command line."""
    if value in (None, ()):
        return "the default"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def check_among(argument: str, values: tuple[Any, ...], known: Collection[Any], kind: str) -> None:
    """Raise ArgumentError, with the most similar known value, for a value that is not known."""
    for value in values:
        if value not in known:
            like = did_you_mean(str(value), map(str, known))
            more = "; or `add` it" if argument == "systems" else ""
            allowed = ", ".join(map(str, known))
            raise ArgumentError(argument, f"has {value!r}, which is not {kind} here{like}: use {allowed}{more}.")
