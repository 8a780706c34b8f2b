"""The options of `reproduce`; their docstrings are the help of the command line."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lineartime.choices import Device, Precision, ScaleName, TextName
from lineartime.errors import Argument, ArgumentError, did_you_mean


@dataclass(frozen=True)
class ReproduceConfig:
    """Train what an experiment of the paper compares, one process a run, and set the results beside the paper's."""

    name: str = ""
    """Experiment, as --list shows them."""
    scale: ScaleName = "cpu"
    """trial: toy models for seconds; cpu: hours on 2 cores; gpu: at most 8 minutes a run; paper: the paper's configuration."""
    out: Path = Path("runs/reproduce")
    """Folder for the folder of the experiment, which is resumed if it is there."""
    list: bool = False
    """Only show the experiments, or the runs of one, with an estimate of the time."""
    report: bool = False
    """Only make the report again from what is there."""
    data: tuple[str, ...] = ()
    """Text for all kinds of text that are not given; the default is the library's, or at the scale paper that of the recipe."""
    code: tuple[str, ...] = ()
    """Text of programs: files, folders or names, as for train."""
    books: tuple[str, ...] = ()
    """Text of books."""
    wikipedia: tuple[str, ...] = ()
    """Text of Wikipedia."""
    systems: tuple[str, ...] = ()
    """Run only these models of the experiment now; another call can run the others."""
    contexts: tuple[int, ...] = ()
    """Run only these contexts now."""
    texts: tuple[TextName, ...] = ()
    """Run only these kinds of text now."""
    seeds: int | None = None
    """Run at most so many seeds now; the default is as many as the experiment has."""
    optimizers: tuple[str, ...] = ()
    """Optimisers to tune; the default is all."""
    rates: tuple[float, ...] = ()
    """Learning rates to tune over, of one optimiser; the default is the scale's four."""
    budget: float | None = None
    """Seconds of training of each run, without evaluations; the default is the scale's."""
    tuning: float | None = None
    """Seconds of training of each run that tries a learning rate; the default is the scale's."""
    compile: Literal["auto", "on", "off"] | None = None
    """Whether to use torch.compile; the default is the scale's."""
    precision: Precision = "auto"
    """Precision of matrix products; auto takes bf16 where the device has units for it."""
    device: Device = "auto"
    """Where to train; auto takes a GPU if there is one."""
    threads: int | None = None
    """Threads of the CPU in each process; the default is PyTorch's."""
    cache: Path | None = None
    """Folder for encoded text; the default is lineartime in the user's cache folder."""

    def __post_init__(self) -> None:
        for name in ("data", "code", "books", "wikipedia"):
            value = getattr(self, name)
            given = (value,) if isinstance(value, (str, Path)) else value or ()
            object.__setattr__(
                self, name, tuple(str(Path(text).absolute()) if Path(text).exists() else str(text) for text in given)
            )
        for name in ("systems", "contexts", "texts", "optimizers", "rates"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def check(self) -> None:
        """Raise ArgumentError for a value that is not allowed."""
        from lineartime.experiments.catalogue import OPTIMIZERS

        for name in ("budget", "tuning"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ArgumentError(name, f"is {value}, but must be a number of seconds above 0.")
            if value is not None and self.scale == "paper":
                raise ArgumentError(name, f"is {value}, but the scale paper has the paper's steps and rate: leave it out.")
        for name in ("seeds", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(name, f"is {value}, but must be at least 1.")
        check_among("optimizers", self.optimizers, tuple(OPTIMIZERS), "optimiser")
        if self.rates:
            self._check_rates()

    def _check_rates(self) -> None:
        given = " ".join(f"{rate:g}" for rate in self.rates)
        if self.scale == "paper":
            raise ArgumentError("rates", f"is {given}, but the scale paper has the paper's rate: leave it out.")
        if not all(math.isfinite(rate) and rate > 0 for rate in self.rates) or len(set(self.rates)) < len(self.rates):
            raise ArgumentError("rates", f"is {given}, but must be different numbers above 0.")
        if len(self.optimizers) != 1:
            raise ArgumentError(
                "rates", f"is {given}, but each optimiser has its own: give one in ", Argument("optimizers"), "."
            )


def check_among(argument: str, values: tuple[Any, ...], known: tuple[Any, ...], kind: str) -> None:
    """Raise ArgumentError for a value that is not known, with the nearest that is."""
    for value in values:
        if value not in known:
            like = did_you_mean(str(value), map(str, known))
            allowed = ", ".join(map(str, known))
            raise ArgumentError(argument, f"has {value!r}, which is no {kind} here{like}: use {allowed}.")
