"""How memory is measured: on a GPU by its allocator, on a CPU by a process that does nothing but the one step.

`python -m lineartime.bench.memory` is that process: it reads JSON from its standard input and answers with JSON.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lineartime.bench.measure import is_out_of_memory, separate_compilations
from lineartime.bench.subjects import Case, Ready, Subject, prepare

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# Memory goes back to the system as soon as it is freed, so that what the process holds is what is in use.
_ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}
_COMMAND = ["-m", "lineartime.bench.memory"]
SMALL = 16
"""Tokens of the step that comes before, in which libraries take what they need whatever the sizes."""


@dataclass(frozen=True)
class Memory:
    """Memory of one step, in bytes.

    Attributes:
        peak: the most that the step holds above the weights; gradients are part of it.
        weights: all parameters.
        gradients: what is left of the step.
    """

    peak: int
    weights: int
    gradients: int


class OutOfMemoryError(Exception):
    """The process that measured memory had not enough of it."""


def of_ready(ready: Ready, device: torch.device) -> Memory:
    """The memory of a step on a GPU that has taken steps before."""
    ready.model.zero_grad()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    ready.step()
    torch.cuda.synchronize(device)
    return _memory(ready.model, torch.cuda.max_memory_allocated(device) - before)


def in_process(subject: Subject, case: Case) -> Memory:
    """The memory of a step on a CPU, measured in a process of its own.

    Raises:
        OutOfMemoryError: if the memory of this machine does not suffice.
        RuntimeError: if the process fails in another way, with the last line of what it said.
    """
    task = {"subject": subject.to_dict(), "case": asdict(case), "threads": torch.get_num_threads()}
    process = subprocess.run(
        [sys.executable, *_COMMAND],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        env={**os.environ, **_ALLOCATOR},
        check=False,
    )
    if process.returncode == -signal.SIGKILL:
        raise OutOfMemoryError
    if process.returncode != 0:
        said = process.stderr.strip().splitlines() or [f"the process that measures memory ended with {process.returncode}"]
        raise RuntimeError(said[-1])
    answer = json.loads(process.stdout.splitlines()[-1])
    if answer is None:
        raise OutOfMemoryError
    return Memory(**answer)


def _memory(model: nn.Module, peak: int) -> Memory:
    weights = list(model.parameters())
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    return Memory(peak, *(sum(t.numel() * t.element_size() for t in tensors) for tensors in (weights, gradients)))


def _most_held() -> int:
    """The most bytes that this process has held, since it was last forgotten."""
    if _STATUS.exists():
        lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
        if "VmHWM" in lines:
            return 1024 * int(lines["VmHWM"].split()[0])
    unit = 1 if sys.platform == "darwin" else 1024
    import resource  # not on Windows, where this process is never started

    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _forget_most_held() -> None:
    """Begin anew to count the most that this process holds, where the system lets it."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return


def _measure(task: dict[str, Any]) -> Memory | None:
    """The memory of the step that a task describes; None if there is not enough."""
    torch.set_num_threads(task["threads"])
    subject, case, device = Subject.from_dict(task["subject"]), Case(**task["case"]), torch.device("cpu")
    try:
        with separate_compilations():
            if subject.mode == "eager":
                small = prepare(subject, replace(case, length=min(SMALL, case.length), batch=1), device)
                small.step()
                del small
            ready = prepare(subject, case, device)
            if subject.mode == "compiled":  # compiling itself takes more memory than the step
                ready.step()
                ready.model.zero_grad()
            _forget_most_held()
            before = _most_held()
            ready.step()
            return _memory(ready.model, _most_held() - before)
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            return None
        raise


def main() -> None:
    """Read a task from standard input and print its answer."""
    memory = _measure(json.loads(sys.stdin.read()))
    print(json.dumps(None if memory is None else asdict(memory)))


if __name__ == "__main__":
    main()
