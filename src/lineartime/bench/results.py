"""The results of a benchmark, and results.json, which is replaced as a whole after every case."""

import json
import os
import platform
import statistics
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from lineartime.bench.config import RESULTS_FILE
from lineartime.bench.measure import median_and_spread
from lineartime.bench.memory import Memory
from lineartime.bench.subjects import Case, Subject
from lineartime.files import write_file
from lineartime.host import installed_version, processor_name


@dataclass
class Measurement:
    """What was measured of one subject in one case."""

    case: Case  # the measure, length and precision
    subject: Subject  # the model
    seconds: list[float] = field(default_factory=list)  # seconds per step, one value for each round
    calls: int = 1  # the number of steps that each of these values averages
    first_seconds: float | None = None  # seconds of the very first step, which compiles
    alone: bool = False  # whether it was measured after the others, because they did not all fit into memory together
    problem: str | None = None  # why there are no numbers: "out of memory", or what failed
    memory: Memory | None = None  # memory of a step, if it was measured
    state_bytes: int | None = None  # bytes of the state of a stream, for decode
    flops_per_token: float | None = None  # FLOPs of the model per token, for train including the backward pass; None if unknown

    @property
    def median(self) -> float | None:
        """The median seconds per step."""
        return median_and_spread(self.seconds)[0] if self.seconds else None

    @property
    def spread(self) -> float | None:
        """The interquartile range, in seconds."""
        return median_and_spread(self.seconds)[1] if self.seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second, of all sequences together."""
        return None if self.median is None else self.case.tokens / self.median

    @property
    def compile_seconds(self) -> float | None:
        """By how many seconds the first step of a compiled model exceeds the median."""
        if self.subject.mode == "eager" or self.first_seconds is None or self.median is None:
            return None
        return max(0.0, self.first_seconds - self.median)

    def ratio(self, first: "Measurement") -> float | None:
        """The step time relative to the first subject: the median of the ratios over the rounds that both have."""
        if self.alone or first.alone:
            return None
        ratios = [own / other for own, other in zip(self.seconds, first.seconds, strict=False)]
        return statistics.median(ratios) if ratios else None


class Results:
    """All measurements of a benchmark, the machine they were made on and the peaks they are compared with.

    `precision` says which precision was chosen on this machine, and why; it is empty if the options name it.
    """

    def __init__(self, folder: Path, options: dict[str, Any], device: torch.device, precision: str = "") -> None:
        self.folder = folder
        self.options = options
        self.precision = precision
        self.machine = describe_machine(device)
        self.started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.measurements: list[Measurement] = []
        self.peaks: dict[str, list[float]] = {}

    @property
    def finished(self) -> list[Measurement]:
        """The measurements with timings or a problem."""
        return [found for found in self.measurements if found.seconds or found.problem]

    def use_of_peak(self, found: Measurement) -> float | None:
        """The FLOP/s of the model as a share of the highest measured peak of matrix products."""
        peak, speed = max(self.peaks.get(found.case.dtype, []), default=None), found.tokens_per_second
        if peak is None or speed is None or found.flops_per_token is None:
            return None
        return found.flops_per_token * speed / peak

    def ratio_to_first(self, found: Measurement) -> float | None:
        """The step time relative to the first measurement of the same case, if both were timed."""
        first = next((other for other in self.finished if other.case == found.case), None)
        return None if first is None else found.ratio(first)

    def save(self) -> Path:
        """Write results.json."""
        subjects = dict.fromkeys(found.subject for found in self.finished)
        content = {
            "options": self.options,
            "precision": self.precision,
            "machine": self.machine,
            "started": self.started,
            "lineartime": installed_version("lineartime"),
            "peak_flops": {dtype: {"runs": runs, "taken": max(runs)} for dtype, runs in self.peaks.items()},
            "subjects": [subject.to_dict() for subject in subjects],
            "entries": [self._to_dict(found) for found in self.finished],
        }
        return write_file(self.folder / RESULTS_FILE, json.dumps(content, indent=1) + "\n")

    def _to_dict(self, found: Measurement) -> dict[str, Any]:
        memory = None if found.memory is None else asdict(found.memory)
        return {
            **asdict(found.case),
            "tokens": found.case.tokens,
            "subject": found.subject.name,
            "mode": found.subject.mode,
            "problem": found.problem,
            "alone": found.alone,
            "seconds": found.seconds,
            "calls": found.calls,
            "median_seconds": found.median,
            "spread_seconds": found.spread,
            "tokens_per_second": found.tokens_per_second,
            "ratio_to_first": self.ratio_to_first(found),
            "flops_per_token": found.flops_per_token,
            "use_of_peak": self.use_of_peak(found),
            **{f"{part}_bytes": memory and memory[part] for part in ("peak", "weights", "gradients")},
            "state_bytes": found.state_bytes,
            "first_seconds": found.first_seconds,
            "compile_seconds": found.compile_seconds,
        }


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
