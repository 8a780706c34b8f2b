"""outcome.json: the measurements or the error of a run that has ended."""

from dataclasses import dataclass, field

from lineartime.fields import Count

OUTCOME_FILE = "outcome.json"
"""An interrupted run has none."""


@dataclass(frozen=True)
class Measurement:
    """A trained model on its test split.

    Attributes:
        name: what differed from training; empty for nothing.
        context_length: tokens of a window.
        loss: the mean loss in nats per token.
        bits_per_byte: None for masked tokens.
        word_perplexity: None where words cannot be counted.
        tokens: the number of tokens that were measured.
        text: the name of the text.
        by_position: the first place, the last place and the loss of each part of the window.
    """

    name: str
    context_length: Count
    loss: float
    bits_per_byte: float | None
    word_perplexity: float | None
    tokens: Count
    text: str
    by_position: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class StepTime:
    """The time of a step of a system.

    Attributes:
        subject: the preset.
        length: tokens of a sequence.
        batch: sequences.
        tokens: tokens of a step.
        median_seconds: None if it failed.
        spread_seconds: between the quartiles.
        problem: why it failed.
        dtype: the precision.
        mode: eager or compiled.
    """

    subject: str
    length: Count
    batch: Count
    tokens: Count
    median_seconds: float | None
    spread_seconds: float | None
    problem: str | None
    dtype: str
    mode: str


@dataclass(frozen=True)
class Outcome:
    """The content of outcome.json.

    Attributes:
        kind: the kind of the job.
        error: the sentence of the error that ended it.
        tests: its measurements.
        time: when the times of steps were measured.
        machine: where they were measured.
        entries: the times of steps.
    """

    kind: str = ""
    error: str | None = None
    tests: tuple[Measurement, ...] = ()
    time: str | None = None
    machine: dict[str, str | int | None] = field(default_factory=dict)
    entries: tuple[StepTime, ...] = ()
