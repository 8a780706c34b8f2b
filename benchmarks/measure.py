"""What the benchmarks share: where results go, and how their tables look."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from lineartime.bench.measure import Clock, interleaved, median_and_spread, repetitions, timed
from lineartime.machine import is_out_of_memory
from lineartime.runs.record import this_process

Key = TypeVar("Key")

RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", Path(__file__).parent / "results"))
"""Where results go. Set the variable on another machine, so that its results do not replace those of the documents."""


def save(name: str, rows: list[dict[str, Any]], table: str) -> None:
    """Write the raw results with their machine, command, date and commit, and the table for the documents."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    results = {"machine": str(this_process()), **origin(), "rows": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(table)
    print(table)


def origin() -> dict[str, str]:
    """The command that measures, without folders, the date, and the commit that is checked out, empty without git."""
    command = ["python", f"benchmarks/{Path(sys.argv[0]).name}", *(Path(each).name for each in sys.argv[1:])]
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    return {
        "command": shlex.join(command),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
    }


def median_seconds(
    steps: Mapping[Key, Callable[[], object]], rounds: int, clock: Clock, min_seconds: float = 0.0
) -> dict[Key, float | None]:
    """The median seconds of each step, timed as by `interleaved` after two warm-up calls; None if memory runs out in these.

    A measurement takes `min_seconds` at least: shorter steps are repeated.
    """
    ready: dict[Key, tuple[Callable[[], object], int]] = {}
    times: dict[Key, list[float]] = {key: [] for key in steps}
    for key, step in steps.items():
        try:
            step()
            ready[key] = step, repetitions(min(timed(step, 1, clock) for _ in range(3 if min_seconds else 1)), min_seconds)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
    for key, result in interleaved(ready, rounds, clock):
        if isinstance(result, Exception):
            raise result
        times[key].append(result)
    return {key: median_and_spread(values)[0] if values else None for key, values in times.items()}
