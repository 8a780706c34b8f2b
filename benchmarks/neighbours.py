"""Whether a training step of FLASH takes longer beside other models: `python benchmarks/neighbours.py` (two minutes).

In one process, it is timed alone, in turn with the peers of speed.py, and alone again. Page faults tell whether the memory
came from the system.
"""

import dataclasses
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import save
from speed import PARTS

from lineartime.bench.plan import make_plan
from lineartime.bench.subjects import prepare
from lineartime.host import freed_memory_kept
from lineartime.markdown import markdown_table

LENGTH, ROUNDS = 1024, 7
FLASH = "flash-tiny"


def timed(step: Callable[[], object]) -> tuple[float, int]:
    """Seconds of a step, and its page faults."""
    faults, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
    step()
    return time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults


def measure() -> list[dict[str, Any]]:
    """The median seconds and page faults of a step of FLASH, in each phase."""
    config = dataclasses.replace(PARTS["train"], context_lengths=(LENGTH,), modes=("eager",))
    [(case, subjects)] = make_plan(config).cells
    steps = {subject.name: prepare(subject, case, torch.device("cpu")).step for subject in subjects}
    for _ in range(3):
        steps[FLASH]()
    rows = []
    for phase, names in (
        ("alone", [FLASH]),
        (f"in turn with {', '.join(list(steps)[1:])}", list(steps)),
        ("alone again", [FLASH]),
    ):
        found = [timed(steps[name]) for _ in range(ROUNDS) for name in names][:: len(names)]
        seconds, faults = (statistics.median(values) for values in zip(*found, strict=True))
        rows.append({"phase": phase, "seconds": seconds, "page_faults": faults})
    return rows


if __name__ == "__main__":
    with freed_memory_kept():
        rows = measure()
    lines = [[row["phase"], f"{1e3 * row['seconds']:.0f}", f"{row['page_faults']:.0f}"] for row in rows]
    save("neighbours", rows, markdown_table([f"a step of FLASH, T = {LENGTH:,}", "ms", "page faults"], lines))
