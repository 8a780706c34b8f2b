"""Memory measurement: by the allocator on a GPU, and in a separate process that only takes the step on a CPU.

`python -m lineartime.bench.memory` is that process: it reads JSON from standard input and writes JSON to standard output.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lineartime.bench.measure import separate_compilations
from lineartime.bench.subjects import Case, Ready, Subject, prepare
from lineartime.host import peak_memory
from lineartime.machine import is_out_of_memory

_CLEAR = Path("/proc/self/clear_refs")
# With these settings, the allocator returns freed memory to the system at once: the process holds only what it uses.
_ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}
_COMMAND = ["-m", "lineartime.bench.memory"]
SMALL = 16
"""Tokens of a small step before the measurement, in which libraries allocate memory that does not depend on the sizes."""


Memory = tuple[int, int, int]
"""Memory of one step, in bytes: the most that it holds above the weights, all parameters, and the gradients it leaves."""


class OutOfMemoryError(Exception):
    """The process that measured memory ran out of memory."""


def of_ready(ready: Ready, device: torch.device) -> Memory:
    """The memory of a step on a GPU, after warm-up steps."""
    ready.model.zero_grad()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    ready.step()
    torch.cuda.synchronize(device)
    return _memory(ready.model, torch.cuda.max_memory_allocated(device) - before)


def in_process(subject: Subject, case: Case) -> Memory:
    """The memory of a step on a CPU, measured in a separate process.

    Raises:
        OutOfMemoryError: if this machine has too little memory.
        RuntimeError: if the process fails for another reason, with the last line of its standard error.
    """
    task = {"subject": subject.to_dict(), "case": asdict(case), "threads": torch.get_num_threads()}
    command, environment = [sys.executable, *_COMMAND], {**os.environ, **_ALLOCATOR}
    process = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, env=environment, check=False)
    if process.returncode == -signal.SIGKILL:
        raise OutOfMemoryError
    if process.returncode != 0:
        said = process.stderr.strip().splitlines() or [f"the process that measures memory ended with {process.returncode}"]
        raise RuntimeError(said[-1])
    answer: Memory | None = json.loads(process.stdout.splitlines()[-1])
    if answer is None:
        raise OutOfMemoryError
    return answer


def _memory(model: nn.Module, peak: int) -> Memory:
    weights = list(model.parameters())
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    return peak, sum(weight.nbytes for weight in weights), sum(gradient.nbytes for gradient in gradients)


def _measure(task: dict[str, Any]) -> Memory | None:
    """The memory of the step that a task describes; None if memory runs out."""
    torch.set_num_threads(task["threads"])
    subject, case, device = Subject.from_dict(task["subject"]), Case(**task["case"]), torch.device("cpu")
    try:
        with separate_compilations() if subject.mode == "compiled" else nullcontext():
            if subject.mode == "eager":
                small = prepare(subject, replace(case, length=min(SMALL, case.length), batch=1), device)
                small.step()
                del small
            ready = prepare(subject, case, device)
            if subject.mode == "compiled":  # compile first, which takes more memory than the step
                ready.step()
                ready.model.zero_grad()
            with suppress(OSError):  # reset the peak that `peak_memory` reads, if the system can
                _CLEAR.write_text("5")
            before = peak_memory()
            ready.step()
            return _memory(ready.model, peak_memory() - before)
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            return None
        raise


def main() -> None:
    """Read a task from standard input and print the result."""
    print(json.dumps(_measure(json.loads(sys.stdin.read()))))


if __name__ == "__main__":
    main()
