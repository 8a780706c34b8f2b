"""Time and memory: steps take turns and are repeated; the reference is the fastest matrix product measured in the same run."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import nn

Key = TypeVar("Key")
Clock = Callable[[], float]

PRODUCTS = {
    "cpu": ((256, 256, 256), (512, 512, 512), (1024, 256, 1024), (1024, 1024, 1024), (4096, 256, 1024), (2048, 2048, 2048)),
    "cuda": ((2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192), (16384, 1024, 4096), (8192, 4096, 16384)),
}
"""Sizes m, n, k of products of [m, k] and [k, n], from small to large: square ones, and shapes that occur in models."""
MAX_PRODUCT_SECONDS = 1.0
"""The longest time that a single product may take at the speed measured so far; longer ones are skipped."""


def synchronized(device: torch.device) -> float:
    """The current time in seconds, after all pending work on the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def repetitions(seconds: float, min_seconds: float) -> int:
    """How often to repeat a step that takes `seconds`, for a measurement of at least `min_seconds`."""
    return max(1, math.ceil(min_seconds / max(seconds, 1e-7)))


@dataclass(frozen=True)
class RewindingStep:
    """A step whose next call costs more than the last one: `rewind`, which is not timed, goes back before `burst` calls."""

    step: Callable[[], object]
    rewind: Callable[[], object]
    burst: int

    def __call__(self) -> object:
        """Take the step."""
        return self.step()


def timed(step: Callable[[], object], calls: int, clock: Clock) -> float:
    """The mean seconds per call, over `calls` calls."""
    burst, seconds = step.burst if isinstance(step, RewindingStep) else calls, 0.0
    for first in range(0, calls, burst):
        if isinstance(step, RewindingStep):
            step.rewind()
        start = clock()
        for _ in range(min(burst, calls - first)):
            step()
        seconds += clock() - start
    return seconds / calls


def interleaved(
    steps: Mapping[Key, tuple[Callable[[], object], int]], rounds: int, clock: Clock
) -> Iterator[tuple[Key, float | Exception]]:
    """Time all steps in turn, A B B A, so that machine noise and what ran just before affect all of them alike.

    `steps` are the steps to time, each with the calls that make one measurement. If there are several, it is first called once
    untimed, with the processor's caches as others left them. Yields a key with the seconds per call, or with the error that
    was raised, after which the step is not called again.
    """
    failed = set()
    order = list(steps.items())
    for _ in range(rounds):
        for key, (step, calls) in order:
            if key in failed:
                continue
            try:
                if calls > 1:
                    timed(step, 1, clock)
                yield key, timed(step, calls, clock)
            except Exception as error:
                failed.add(key)
                yield key, error
        order.reverse()


def median_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """The median and the interquartile range, which is None for a single value."""
    if len(values) < 2:
        return values[0], None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return statistics.median(values), high - low


def peak_flops(device: torch.device, dtype: str, seconds: float = 0.3) -> float:
    """Operations per second of the fastest of several matrix products, each repeated for about `seconds`."""
    clock = partial(synchronized, device)
    number = torch.bfloat16 if dtype == "bf16" else torch.float32
    best = 0.0
    for m, n, k in PRODUCTS["cpu" if device.type == "cpu" else "cuda"]:
        if best and 2 * m * n * k / best > MAX_PRODUCT_SECONDS:
            continue
        a, b = torch.randn(m, k, dtype=number, device=device), torch.randn(k, n, dtype=number, device=device)
        out = torch.empty(m, n, dtype=number, device=device)
        product = partial(torch.mm, a, b, out=out)
        product()
        calls = repetitions(timed(product, 1, clock), seconds / 3)
        best = max(best, *(2 * m * n * k / timed(product, calls, clock) for _ in range(3)))
    return best


def step_memory(model: nn.Module, step: Callable[[], object], device: torch.device) -> int:
    """The bytes that a step holds at most above the weights, with the gradients that it leaves, on a GPU."""
    model.zero_grad()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


@contextmanager
def separate_compilations() -> Iterator[None]:
    """Compile each subject for its own sizes, without using the caches of earlier runs."""
    import torch._dynamo
    from torch._inductor.utils import fresh_cache

    own_sizes = torch._dynamo.config.patch(  # by default, shapes become dynamic, and compilation stops at a limit
        automatic_dynamic_shapes=False, recompile_limit=256, accumulated_recompile_limit=4096
    )
    with fresh_cache(), own_sizes:
        yield


def release(device: torch.device) -> None:
    """Return unreferenced memory to the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def forget(device: torch.device) -> None:
    """Free everything that the subjects of a case left behind, including compiled code."""
    torch.compiler.reset()
    release(device)
