"""metrics.jsonl: the numbers of a run, one JSON object per line for each step and each evaluation."""

import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from lineartime.errors import reporting
from lineartime.files import write_atomically

METRICS_FILE = "metrics.jsonl"
AVERAGED = 20
"""Steps over which displayed losses and speeds are averaged; metrics.jsonl holds those of each step."""

Line = Mapping[str, float]
"""One line of metrics.jsonl."""


class MetricsLog:
    """Appends lines to a run's metrics.jsonl, each with the tokens and the seconds of training so far.

    Args:
        run: the run's folder; created if missing.
        first_step: steps taken before. Lines of later steps, left by a killed process, are dropped.

    Attributes:
        tokens: trained on so far, over all processes of the run.
        skipped: steps so far that changed nothing.

    Raises:
        LineartimeError: if the file cannot be written.
    """

    def __init__(self, run: Path, first_step: int) -> None:
        self._file = run / METRICS_FILE
        with reporting("write", self._file):
            run.mkdir(parents=True, exist_ok=True)
            kept = [line for line in read_metrics(run) if line["step"] <= first_step] if self._file.exists() else []
            write_atomically(self._file, "".join(json.dumps(line) + "\n" for line in kept))
            self._opened = self._file.open("a", encoding="utf-8")
        totals = {name: value for line in kept for name, value in line.items()}  # the last value of each name
        self.tokens = int(totals.get("tokens", 0))
        self.skipped = int(totals.get("skipped", 0))
        self._begin = time.perf_counter() - totals.get("seconds", 0)  # the time between processes does not count

    def write(self, step: int, numbers: Mapping[str, float]) -> dict[str, float]:
        """Append one line and return its numbers, without those that JSON cannot express: infinities and NaN."""
        totals = {"tokens": self.tokens, "seconds": round(time.perf_counter() - self._begin, 3)}
        finite = {name: value for name, value in {**numbers, **totals}.items() if math.isfinite(value)}
        with reporting("write", self._file):
            self._opened.write(json.dumps({"step": step, **finite}) + "\n")
            self._opened.flush()
        return finite

    def close(self) -> None:
        """Close the file."""
        with reporting("write", self._file):
            self._opened.close()


def read_metrics(run: str | Path) -> list[dict[str, float]]:
    """The finite numbers in each line of a run's metrics file; OSError if it cannot be read.

    Damaged lines are skipped: a killed process or a full disk leaves a line cut off.
    """
    return read_damaged_metrics(run)[0]


def read_damaged_metrics(run: str | Path) -> tuple[list[dict[str, float]], int]:
    """The lines of `read_metrics`, and how many were skipped; a last line that is merely cut off does not count."""
    *texts, last = Path(run, METRICS_FILE).read_text(encoding="utf-8", errors="replace").split("\n")
    found = [_parse(text) for text in texts]
    begin = '{"step": '
    if last[: len(begin)] != begin[: len(last)] or _parse(last) is not None:
        found.append(_parse(last))
    lines = [line for line in found if line is not None]
    return lines, len(found) - len(lines)


def losses(lines: Iterable[Line], name: str) -> dict[int, float]:
    """The values of "loss" or "validation_loss" by step, in nats per token."""
    return {int(line["step"]): line[name] for line in lines if name in line}


def _parse(text: str) -> dict[str, float] | None:
    """The numbers of a line; None for a line that is not an object with a step."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        return None
    return {name: value for name, value in line.items() if isinstance(value, (int, float)) and math.isfinite(value)}
