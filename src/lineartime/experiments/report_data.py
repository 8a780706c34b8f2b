"""The types of what report.json holds: plain data, which tables and pictures show."""

from typing import Any, Literal

from typing_extensions import TypedDict

from lineartime.choices import ScaleName
from lineartime.experiments.results import State

TestMetric = Literal["loss", "bits_per_byte", "word_perplexity"]


class TestData(TypedDict):
    """A trained model on its test split: a `Measurement` without its text."""

    name: str
    context_length: int
    loss: float
    bits_per_byte: float | None
    word_perplexity: float | None
    tokens: int
    by_position: list[list[float]]


class RunData(TypedDict):
    """The run of a system with one seed; None for what it does not have yet.

    Attributes:
        seed: the seed.
        folder: the name of its folder.
        state: whether it is finished.
        steps, tokens: of the whole run.
        planned_seconds: the budget.
        seconds: those of training, at the speed that was measured alone.
        taken_seconds: those that it took, beside what else the machine did.
        loss: nats per token on held-out text, at the end.
        bits_per_byte: the same in bits per byte; None for masked tokens.
        curve: the step, the seconds, the loss and the bits per byte of each evaluation.
        tests: the measurements on the test split.
    """

    seed: int
    folder: str
    state: State
    steps: int | None
    tokens: int | None
    planned_seconds: float | None
    seconds: float | None
    taken_seconds: float | None
    loss: float | None
    bits_per_byte: float | None
    curve: list[list[Any]]
    tests: list[TestData]


class AnyRow(TypedDict):
    """What every row has.

    Attributes:
        name: the arm and, if each optimiser has a row, the optimiser.
        arm: the arm of the experiment.
        parameters: their number.
        parameters_over_first: their relative difference from those of the first arm.
        paper: the paper's numbers: "pplx", "latency_ms" and "speedup", as far as it has them.
    """

    name: str
    arm: str
    parameters: int
    parameters_over_first: float
    paper: dict[str, float]


class SystemRow(AnyRow, total=False):
    """An arm in a setting. Reports of earlier versions lack the newest keys.

    Attributes:
        system, override: the preset and its options.
        optimizer, rate: those of its runs, chosen by the trials; None before.
        rate_at_edge: whether the rate is at an end of the grid.
        grid: for each optimiser and rate, the loss of the trial in nats per token, or the state of its run.
        trial_steps: the steps of the trials of each optimiser.
        tokens_per_second: the speed that was measured alone.
        runs: one for each seed.
        chunk_size: of the model, if it has chunks.
        paper_loss: the paper's loss in nats.
        relative_loss, paper_relative_loss: the relative difference of the loss from the baseline's.
        speedups: for each seed, the time in which the baseline reaches its final quality over that of this system.
    """

    system: str
    override: list[str]
    optimizer: str | None
    rate: float | None
    rate_at_edge: bool
    grid: dict[str, dict[str, float | str]]
    trial_steps: dict[str, int | None]
    tokens_per_second: float | None
    runs: list[RunData]
    chunk_size: int | None
    paper_loss: float | None
    relative_loss: float | None
    paper_relative_loss: float | None
    speedups: list[float | None]


class LatencyRow(AnyRow, total=False):
    """The time of a step of an arm, forward and backward.

    Attributes:
        problem: why it could not be measured.
        microseconds_per_token, milliseconds: the median; None without one.
        precision: that of matrix products.
        relative, paper_relative: the time over the baseline's, here and in the paper.
    """

    problem: str | None
    microseconds_per_token: float | None
    milliseconds: float | None
    precision: str | None
    relative: float | None
    paper_relative: float | None


class _AnySetting(TypedDict):
    """A text and a context: the name of its folder, and its name in words."""

    label: str
    name: str
    context: int


class QualitySetting(_AnySetting):
    """The systems that were trained on a text."""

    text: str
    rows: list[SystemRow]


class LatencySetting(_AnySetting):
    """The systems that were timed at a context."""

    rows: list[LatencyRow]


class AnyReport(TypedDict, total=False):
    """What every report.json holds. Those of earlier versions lack the newest keys.

    Attributes:
        experiment, title, question, scale: of the experiment.
        options: what its runs depend on, by the names of `reproduce`; texts are names of files.
        complete: whether all runs are finished.
        missing, problems: the runs that are missing, and a sentence for each that failed or is damaged.
        paper: the source of the paper's numbers.
        baseline: the arm that others are compared with.
        machines, precisions: on which and in which its runs have run.
        started: when the first and the last one began.
        texts: the files of each setting.
        tests: the names of the measurements of each trained model.
    """

    experiment: str
    title: str
    question: str
    scale: ScaleName
    options: dict[str, Any]
    complete: bool
    missing: list[str]
    problems: list[str]
    paper: str
    baseline: str | None
    machines: list[str]
    precisions: list[str]
    started: list[str]
    texts: dict[str, str]
    tests: list[str]


class QualityReport(AnyReport, total=False):
    """The results of an experiment about quality: those of each text and context."""

    settings: list[QualitySetting]


class LatencyReport(AnyReport, total=False):
    """The results of an experiment about time: those of each context."""

    settings: list[LatencySetting]


Report = QualityReport | LatencyReport
