"""The content of report.json: plain data, which tables and pictures show."""

import statistics
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, Literal

from typing_extensions import TypedDict

from lineartime.choices import ScaleName
from lineartime.experiments.models import TOLERANCE
from lineartime.experiments.results import State

TestMetric = Literal["loss", "bits_per_byte", "word_perplexity", "accuracy"]


class RunData(TypedDict):
    """The run of a system with one seed; None for what it does not have yet."""

    seed: int
    folder: str  # its name
    state: State
    steps: int | None
    tokens: int | None  # of the whole run
    planned_seconds: float | None  # the budget
    seconds: float | None  # of training, at the speed that was measured alone
    taken_seconds: float | None  # those that it took, beside what else the machine did
    loss: float | None  # nats per token on held-out text, at the end
    bits_per_byte: float | None  # the same in bits per byte; None for masked tokens
    curve: list[Any]  # the evaluations, each a `Point`; in a report that was read, lists of the same numbers
    tests: list[dict[str, Any]]  # each `FinalResult`, without its text


Metric = Callable[[RunData], float | None]
"""A number of a run, if it has it."""


class SystemRow(TypedDict, total=False):
    """An arm in a setting: its runs, or the time of its steps. Older reports lack the newest keys."""

    name: str  # the arm and, if each optimiser has a row, the optimiser
    arm: str
    parameters: int
    parameters_over_first: float  # the relative difference from those of the first arm
    paper: dict[str, float]  # the paper's numbers: "pplx", "latency_ms" and "speedup", as far as it has them
    # Of runs:
    system: str
    override: list[str]
    optimizer: str | None  # of its runs, chosen by the trials, as is the rate; None before
    rate: float | None
    rate_at_edge: bool  # whether the rate is at an end of the grid
    grid: dict[str, dict[str, float | str]]  # by optimiser and rate: the trial's loss in nats per token, or its state
    trial_steps: dict[str, int | None]  # by optimiser
    tokens_per_second: float | None  # the speed that was measured alone
    runs: list[RunData]  # one for each seed
    chunk_size: int | None  # of the model, if it has chunks
    paper_loss: float | None  # in nats
    relative_loss: float | None  # the relative difference from the baseline's
    paper_relative_loss: float | None
    speedups: list[float | None]  # by seed: the baseline's time to its final quality over the time of this system to it
    # Of runs on tasks, whose trials of a rate are runs with accuracies; means over the seeds:
    state_bytes: int | None  # of a stream after a text
    step_seconds: float | None  # of training
    decode_seconds: float | None  # of a further token
    # Of steps, forward and backward:
    problem: str | None  # why their time could not be measured
    microseconds_per_token: float | None  # the median
    milliseconds: float | None
    precision: str | None  # of matrix products
    relative: float | None  # the time over the baseline's
    paper_relative: float | None


class SettingRows(TypedDict):
    """The systems in a setting."""

    label: str  # the name of its folder
    name: str  # in words
    text: str
    context: int
    rows: list[SystemRow]


class Report(TypedDict, total=False):
    """The content of report.json. Older ones lack the newest keys."""

    experiment: str
    title: str
    question: str
    scale: ScaleName
    options: dict[str, Any]  # what its runs depend on, by the names of `reproduce`; texts are names of files
    complete: bool
    missing: list[str]  # runs
    problems: list[str]  # a sentence for each run that failed or is damaged
    paper: str  # the source of the paper's numbers
    baseline: str  # the arm that others are compared with
    machines: list[str]
    precisions: list[str]  # of matrix products
    started: list[str]  # when the first and the last run began
    texts: dict[str, str]  # the files of each setting
    tests: list[str]  # the names of the measurements of each trained model
    settings: list[SettingRows]


def baseline_row(rows: Iterable[SystemRow], baseline: str) -> SystemRow | None:
    """The row of the baseline, and of several, with an optimiser each, that with the lowest loss; None if there is none."""

    def mean_loss(row: SystemRow) -> float:
        losses = values_of_row(row, itemgetter("loss"))
        return statistics.fmean(losses) if losses else float("inf")

    return min((row for row in rows if row["arm"] == baseline), key=mean_loss, default=None)


def values_of_row(row: SystemRow, metric: Metric) -> list[float]:
    """The values of a metric over the seeds of a row that have one."""
    return [value for run in row["runs"] if (value := metric(run)) is not None]


def metric_of_test(name: str, metric: TestMetric) -> Metric:
    """A metric of a run: a number of one of its tests."""
    return lambda run: next((test[metric] for test in run["tests"] if test["name"] == name), None)


def steps_to(run: RunData, accuracy: float) -> float | None:
    """The steps after which the held-out texts of a task first had this accuracy; None if they never had."""
    return next((point[0] for point in run["curve"] if point[4] is not None and point[4] >= accuracy), None)


def settings_with_results(report: Report) -> list[SettingRows]:
    """The settings of which anything has run, each with the systems that have. Rows of latency have, as they run together."""
    found = [SettingRows({**setting, "rows": list(filter(_has_begun, setting["rows"]))}) for setting in report["settings"]]
    return [setting for setting in found if setting["rows"]]


def _has_begun(row: SystemRow) -> bool:
    if "runs" not in row:
        return True
    tried = [cell for grid in row["grid"].values() for cell in grid.values()]
    return any(state != "missing" for state in [*tried, *(run["state"] for run in row["runs"])])


def within_tolerance(row: SystemRow) -> bool:
    """Whether the parameters of a row are within 3 % of the first one's."""
    return abs(row["parameters_over_first"]) <= TOLERANCE
