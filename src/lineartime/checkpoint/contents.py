"""What the JSON files of a checkpoint hold, besides the model: frozen dataclasses with types and ranges."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from lineartime.choices import Task
from lineartime.errors import ArgumentError
from lineartime.fields import Between, Count, Digest, Matching, decode

Step = Annotated[int, Between(0, 10**9)]
RelativeFile = Annotated[str, Matching(r"(?!/)(?!(.*/)?\.\.?(/|$))[^\\\0\n]+", "the path of a file below the checkpoint")]

# The options of a run that are read before the training room, which knows all of them, has checked them.
_OPTIONS: dict[str, Any] = {
    "preset": str,
    "task": Task,
    "data": str | tuple[str, ...] | None,
    "text_column": str,
    "max_expansion": Annotated[int, Between(1, 10**9)],
    "tokenizer": str | None,
    "context_length": Annotated[int, Between(1, 10**9)],
    "tokens_per_batch": Annotated[int, Between(1, 10**12)] | None,
    "steps": Annotated[int, Between(1, 10**9)],
}


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ArgumentError for options of a run of the wrong type, as far as this room knows them."""
    for option, value in options.items():
        decode(_OPTIONS.get(option, Any), value, f"{name}.{option}")


@dataclass(frozen=True)
class LanePosition:
    """Where a lane of a streamed text stands.

    Attributes:
        epoch: how often it has ended.
        source: the state of what it reads, as the datasets library describes it; None at the beginning.
        used: tokens to skip from there.
    """

    epoch: Step
    source: dict[str, Any] | None
    used: Count


@dataclass(frozen=True)
class TextPosition:
    """The position in the text, from the loaders of all processes.

    Attributes:
        rows: sequences that were read.
        of: the number of lanes of a streamed text.
        lanes: where each of them stands, by number.
    """

    rows: Count
    of: Annotated[int, Between(1, 10**6)] | None = None
    lanes: dict[str, LanePosition] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As loaders describe it."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@dataclass(frozen=True)
class TrainingState:
    """What resuming a run needs besides tensors: training.json.

    Attributes:
        step: steps taken.
        text: an identity of the text, which tells whether it has changed.
        data: the position in the text.
        config: the run's options, as a dictionary.
        skipped: steps that changed nothing, because a gradient was not finite.
        validation_loss: in nats per token, at this step; None if it was not measured before the checkpoint was written.
    """

    step: Step
    text: str
    data: TextPosition
    config: dict[str, Any]
    skipped: Step = 0
    validation_loss: float | None = None

    def __post_init__(self) -> None:
        check_options("config", self.config)
        if self.skipped > self.step:
            raise ArgumentError("skipped", f"is {self.skipped}, but must be at most the {self.step} steps taken.")

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary for JSON."""
        return {**vars(self), "data": self.data.to_dict()}


@dataclass(frozen=True)
class ValidationLoss:
    """A loss that was measured after its checkpoint was written: validation.json."""

    validation_loss: float


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint and their SHA-256: manifest.json."""

    files: dict[RelativeFile, Digest]
