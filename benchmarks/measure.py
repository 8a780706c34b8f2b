"""What the benchmarks share: interleaved timings, the machine they ran on, and where results go."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def interleaved(cases: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median seconds of each case, all of them being run in turn, so that noise of the machine meets all alike."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for case in cases.values():  # warm-up
        case()
    for _ in range(rounds):
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?"
    )
    return {"cpu": cpu, "cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}


def save(name: str, rows: list[dict[str, Any]], table: str) -> None:
    """Write the raw results, and the table that the README shows."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(table)
    print(table)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table: the first column to the left, all others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
