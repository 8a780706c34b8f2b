"""The contents of a checkpoint's JSON files, except for the model: frozen dataclasses with types and ranges."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from lineartime.choices import Task
from lineartime.fields import Between, Count, Digest, Matching, decode

Step = Annotated[int, Between(0, 10**9)]
RelativeFile = Annotated[str, Matching(r"(?!/)(?!(.*/)?\.\.?(/|$))[^\\\0\n]+", "the path of a file below the checkpoint")]

# The options of a run that are read without the training package, which knows and checks all options.
_OPTIONS: dict[str, Any] = {
    "preset": str,
    "task": Task,
    "data": str | tuple[str, ...] | None,
    "text_column": str,
    "max_expansion": Annotated[int, Between(1, 10**9)],
    "include": tuple[str, ...],
    "exclude": tuple[str, ...],
    "tokenizer": str | None,
    "context_length": Annotated[int, Between(1, 10**9)],
    "tokens_per_batch": Annotated[int, Between(1, 10**12)] | None,
    "steps": Annotated[int, Between(1, 10**9)],
}


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ArgumentError for options of a run with a wrong type or range, among those known here."""
    for option, value in options.items():
        decode(_OPTIONS.get(option, Any), value, f"{name}.{option}")


@dataclass(frozen=True)
class LanePosition:
    """The position in a lane of a streamed text."""

    epoch: Step  # how often the lane has ended
    source: dict[str, Any] | None  # the state of its source, as the datasets library describes it; None at the beginning
    used: Count  # the number of tokens to skip from there


@dataclass(frozen=True)
class TextPosition:
    """The position in the text, from the loaders of all processes."""

    rows: Count  # the number of sequences that were read
    of: Annotated[int, Between(1, 10**6)] | None = None  # the number of lanes of a streamed text
    lanes: dict[str, LanePosition] | None = None  # the position in each lane, by its number

    def to_dict(self) -> dict[str, Any]:
        """Return the position as loaders describe it."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


HELD_OUT = ", held out "
"""What stands before the digest of the held-out text in the identity of a text; earlier versions wrote neither."""


@dataclass(frozen=True)
class TrainingState:
    """What resuming a run needs besides tensors: training.json.

    `automatic` holds the options that were left to the library, as they were given: `config` has what it chose. A run with the
    same options, but another length or machine, chooses again.
    """

    step: Step  # steps taken
    text: str  # the identity of the text, which shows whether it has changed
    data: TextPosition
    config: dict[str, Any]  # the run's options
    skipped: Step = 0  # steps that were skipped because the loss or the gradient was not finite
    validation_loss: float | None = None  # in nats per token, at this step; None if it was not measured by then
    automatic: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_options("config", self.config)
        check_options("automatic", self.automatic)

    @property
    def held_out(self) -> str:
        """The digest of the held-out text; empty if the checkpoint does not record it."""
        return self.text.partition(HELD_OUT)[2]

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dictionary for JSON."""
        return {**vars(self), "data": self.data.to_dict()}


@dataclass(frozen=True)
class ValidationLoss:
    """A loss that was measured after its checkpoint was written: validation.json."""

    validation_loss: float


Manifest = dict[RelativeFile, Digest]
"""The files of a checkpoint and their SHA-256: manifest.json."""
