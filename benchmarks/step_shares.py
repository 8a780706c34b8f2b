"""The shares of time in a training step of FLASH: `python benchmarks/step_shares.py` (a minute on 2 cores).

The model is that of speed.py, in the precision that training takes on this machine. Matrix products are timed by PyTorch's
profiler, C++ functions by a clock around each call, and the whole step separately; each is the median of several steps. PyTorch
counts the operations of the products.
"""

import statistics
import time
from functools import partial
from typing import Any
from unittest import mock

import torch
from measure import save
from speed import SIZES
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from lineartime.bench.config import BenchConfig
from lineartime.bench.measure import peak_flops, synchronized, timed
from lineartime.bench.plan import make_plan
from lineartime.bench.subjects import prepare
from lineartime.host import freed_memory_kept
from lineartime.markdown import markdown_table
from lineartime.native import NativeFunctions

CPU = torch.device("cpu")
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm_")
LENGTHS = (1024, 8192)
OVERRIDE = tuple(size for size in SIZES if not size.startswith("transformer"))
STEPS = 5


def product_seconds(step: Any) -> float:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    microseconds: float = sum(event.self_cpu_time_total for event in profiled.key_averages() if event.key in PRODUCTS)
    return microseconds / 1e6


def native_seconds(step: Any) -> float:
    inside, plain = 0.0, NativeFunctions.call

    def call(self: NativeFunctions, *arguments: Any) -> None:
        nonlocal inside
        start = time.perf_counter()
        plain(self, *arguments)
        inside += time.perf_counter() - start

    with mock.patch.object(NativeFunctions, "call", call):
        step()
    return inside


def row(length: int) -> dict[str, float]:
    config = BenchConfig(
        presets=("flash-tiny",), override=OVERRIDE, vocab_size=256, measure=("train",), context_lengths=(length,), memory=False
    )
    [(case, [subject])] = make_plan(config).cells
    step = prepare(subject, case, CPU).step
    step()
    seconds, products, native = (
        statistics.median(measure(step) for _ in range(STEPS))
        for measure in (partial(timed, calls=1, clock=partial(synchronized, CPU)), product_seconds, native_seconds)
    )
    with FlopCounterMode(display=False) as counter:
        step()
    peak = peak_flops(CPU, case.dtype)
    return {
        "context": length, "seconds": seconds, "products": products / seconds, "native": native / seconds,
        "products_of_peak": counter.get_total_flops() / products / peak,
    }  # fmt: skip


def table(rows: list[dict[str, float]]) -> str:
    header = ["context", "ms a step", "matrix products", "functions in C++", "all else", "products, share of the peak"]
    return markdown_table(
        header,
        [
            [
                f"{row['context']:,}", f"{1e3 * row['seconds']:,.0f}", f"{row['products']:.0%}", f"{row['native']:.0%}",
                f"{1 - row['products'] - row['native']:.0%}", f"{row['products_of_peak']:.0%}",
            ]
            for row in rows
        ],
    )  # fmt: skip


if __name__ == "__main__":
    with freed_memory_kept():
        rows = [row(length) for length in LENGTHS]
    save("step_shares", rows, table(rows))
