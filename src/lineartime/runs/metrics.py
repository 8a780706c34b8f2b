"""metrics.jsonl: the numbers of a run, one JSON object per line for each step and each evaluation."""

import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

from lineartime.checkpoint.format import Step
from lineartime.errors import reporting_file_errors
from lineartime.fields import Between, decode, shown
from lineartime.files import write_atomically
from lineartime.json_files import open_regular, parse

METRICS_FILE = "metrics.jsonl"
AVERAGED = 20
"""Steps over which displayed losses and speeds are averaged; metrics.jsonl holds those of each step."""

Line = Mapping[str, float]
"""One line of metrics.jsonl."""
_LONGEST = 1 << 16
"""The maximum size of a line, in bytes."""
_NUMBER = Annotated[float, Between(-1e40, 1e40)]
"""A number in a line: the range of fp32, with some margin."""
_COUNT = Annotated[float, Between(0, 1e18)]
_NUMBERS = {"step": Step, "tokens": _COUNT, "skipped": _COUNT, "seconds": _COUNT, "tokens_per_second": _COUNT}
"""The numbers in a line that cannot be negative."""


class MetricsLog:
    """Appends lines to a run's metrics.jsonl, each with the tokens and the seconds of training so far.

    Lines of steps after `first_step`, left by a killed process, are dropped. `tokens` are those of all processes. Raises
    LineartimeError if the file cannot be written.
    """

    def __init__(self, run: Path, first_step: int) -> None:
        self._file = run / METRICS_FILE
        with reporting_file_errors("write", self._file):
            run.mkdir(parents=True, exist_ok=True)
            kept = [line for line in read_metrics(run) if line["step"] <= first_step] if self._file.exists() else []
            write_atomically(self._file, "".join(json.dumps(line) + "\n" for line in kept))
            self._opened = self._file.open("a", encoding="utf-8")
        totals = {name: value for line in kept for name, value in line.items()}  # the last value of each name
        self.tokens = int(totals.get("tokens", 0))
        self._begin = time.perf_counter() - totals.get("seconds", 0)  # the time between processes does not count

    def write(self, step: int, numbers: Mapping[str, float]) -> dict[str, float]:
        """Append one line and return its numbers, without those that JSON cannot express: infinities and NaN."""
        totals = {"tokens": self.tokens, "seconds": round(time.perf_counter() - self._begin, 3)}
        finite = {name: value for name, value in {**numbers, **totals}.items() if math.isfinite(value)}
        with reporting_file_errors("write", self._file):
            self._opened.write(json.dumps({"step": step, **finite}) + "\n")
            self._opened.flush()
        return finite

    def close(self) -> None:
        """Close the file."""
        with reporting_file_errors("write", self._file):
            self._opened.close()


def read_metrics(run: str | Path) -> list[dict[str, float]]:
    """Read the finite numbers in each line of a run's metrics file. Raises LineartimeError if the file cannot be read.

    Damaged lines are skipped, such as lines that a killed process or a full disk left incomplete.
    """
    return read_damaged_metrics(run)[0]


def read_damaged_metrics(run: str | Path) -> tuple[list[dict[str, float]], list[str]]:
    """The lines of `read_metrics`, and a clause for each skipped line that says why.

    A last line that is merely cut off is not reported.
    """
    lines, problems = [], []
    path = Path(run, METRICS_FILE)
    with reporting_file_errors("read", path), open_regular(path) as file:
        number = 0
        while content := file.readline(_LONGEST):
            number += 1
            try:
                lines.append(_parse(content))
            except ValueError as error:
                if content.endswith(b"\n") or not content.startswith(b"{"):
                    problems.append(f"line {number:,}: {error}".rstrip("."))
    return lines, problems


def losses(lines: Iterable[Line], name: str) -> dict[int, float]:
    """The values of "loss" or "validation_loss" by step, in nats per token."""
    return {int(line["step"]): line[name] for line in lines if name in line}


def _parse(content: bytes) -> dict[str, float]:
    """Parse the numbers of a line. Raises ValueError, with a clause as its message, for anything else."""
    line = parse(content)
    if not isinstance(line, dict):
        raise ValueError(f"it is {shown(line)}, but must be an object")
    if "step" not in line:
        raise ValueError("step is missing")
    for name, value in line.items():
        usual = type(value) is int or (type(value) is float and name != "step")
        if not (usual and 0 <= value < 1e9):  # few are not: this saves time in long files
            decode(_NUMBERS.get(name, _NUMBER), value, name)
    return line
