"""The results of a benchmark, and results.json, which is replaced as a whole after every case."""

import json
import os
import platform
import statistics
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from lineartime.bench.benchmark import Benchmark
from lineartime.bench.config import RESULTS_FILE, Dtype, Measure, Mode
from lineartime.bench.measure import median_and_spread
from lineartime.bench.subjects import Case
from lineartime.fields import AtLeastOne, Count
from lineartime.files import write_file
from lineartime.host import installed_version, processor_name


@dataclass(kw_only=True)
class Entry:
    """What was measured of one subject in one case: an entry of results.json. `Results.save` adds what follows from others."""

    measure: Measure = "train"
    length: Count  # tokens of the context, or the position for decode
    dtype: Dtype
    batch: Count  # sequences, or streams
    tokens: AtLeastOne  # of one step
    subject: str  # the name of the preset or the peer
    mode: Mode
    problem: str | None = None  # why there are no numbers: "out of memory", or what failed
    alone: bool = False  # whether it was measured after the others, because they did not all fit into memory together
    seconds: tuple[float, ...] = ()  # per step, one value for each round
    calls: Count = 1  # the number of steps that each of these values averages
    median_seconds: float | None = None
    spread_seconds: float | None = None  # the interquartile range
    tokens_per_second: float | None = None  # of all sequences together
    ratio_to_first: float | None = None  # to the first subject of the case: the median over the rounds that both have
    flops_per_token: float | None = None  # of the model, for train including the backward pass; None if unknown
    use_of_peak: float | None = None  # the FLOP/s of the model as a share of the highest measured peak of matrix products
    peak_bytes: Count | None = None  # the most memory that a step holds above the weights, including gradients
    weights_bytes: Count | None = None  # all parameters
    gradients_bytes: Count | None = None  # the gradients that a step leaves
    state_bytes: Count | None = None  # of the state of a stream, for decode
    first_seconds: float | None = None  # of the very first step, which compiles
    compile_seconds: float | None = None  # by how much the first step of a compiled model exceeds the median

    @property
    def case(self) -> Case:
        """What is compared with each other."""
        return Case(self.measure, self.length, self.dtype, self.batch)

    @property
    def microseconds_per_token(self) -> float | None:
        """The median time of a token in a step."""
        return None if self.median_seconds is None else 1e6 * self.median_seconds / self.tokens

    @property
    def label(self) -> str:
        """The subject and its mode, unless that is eager."""
        return self.subject if self.mode == "eager" else f"{self.subject} {self.mode}"


class Results:
    """All entries of a benchmark, the machine they were made on and the peaks they are compared with."""

    def __init__(self, folder: Path, options: dict[str, Any], benchmark: Benchmark) -> None:
        self.folder = folder
        self.options = options
        self.benchmark = benchmark
        self.machine = describe_machine(benchmark.device)
        self.started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.entries: list[Entry] = []
        self.peaks: dict[str, list[float]] = {}

    @property
    def finished(self) -> list[Entry]:
        """The entries with timings or a problem."""
        return [found for found in self.entries if found.seconds or found.problem]

    def save(self) -> Path:
        """Complete the entries, and write results.json."""
        finished = self.finished
        for found in finished:
            if found.seconds:
                self._complete(found, next(other for other in finished if other.case == found.case))
        measured = {found.label for found in finished}
        content = {
            "options": self.options,
            "precision": self.benchmark.precision,
            "machine": self.machine,
            "started": self.started,
            "lineartime": installed_version("lineartime"),
            "peak_flops": {dtype: {"runs": runs, "taken": max(runs)} for dtype, runs in self.peaks.items()},
            "subjects": [each.to_dict() for each in self.benchmark.subjects if str(each) in measured],
            "entries": [asdict(found) for found in finished],
        }
        return write_file(self.folder / RESULTS_FILE, json.dumps(content, indent=1) + "\n")

    def _complete(self, found: Entry, first: Entry) -> None:
        """Add what follows from the seconds of an entry, of the first one of its case, and from the peaks."""
        found.median_seconds, found.spread_seconds = median_and_spread(found.seconds)
        found.tokens_per_second = found.tokens / found.median_seconds
        if first.seconds and not (found.alone or first.alone):
            ratios = [own / other for own, other in zip(found.seconds, first.seconds, strict=False)]
            found.ratio_to_first = statistics.median(ratios)
        if found.flops_per_token is not None and (peaks := self.peaks.get(found.dtype)):
            found.use_of_peak = found.flops_per_token * found.tokens_per_second / max(peaks)
        if found.mode != "eager" and found.first_seconds is not None:
            found.compile_seconds = max(0.0, found.first_seconds - found.median_seconds)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The properties of the machine that the numbers depend on."""
    products = (torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn).matmul.fp32_precision
    facts: dict[str, Any] = {
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device.type,
        "fp32_products": "highest" if products in ("none", "ieee") else products,
    }
    if device.type == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, "triton": installed_version("triton")}
    return facts
