"""The shares of time in training steps of FLASH and its peers: `python benchmarks/step_shares.py` (five minutes on 2 cores).

The models are those of speed.py, in the precision that training takes on this machine, not compiled. Matrix products and fused
attention are timed by PyTorch's profiler, C++ functions by a clock around each call. Each is a share of the same step, and the
median over several steps, so that other programs on the machine change little. PyTorch counts the operations of the products.
Needs FLASH-pytorch.
"""

import dataclasses
import statistics
import time
from typing import Any
from unittest import mock

import torch
from measure import save
from speed import PARTS
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from lineartime.bench.measure import peak_flops, timed
from lineartime.bench.plan import make_plan
from lineartime.bench.subjects import Case, Subject, prepare
from lineartime.host import freed_memory_kept
from lineartime.markdown import markdown_table
from lineartime.native import NativeFunctions

CPU = torch.device("cpu")
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::baddbmm_")
ATTENTION = tuple(f"aten::_scaled_dot_product_flash_attention_for_cpu{suffix}" for suffix in ("", "_backward"))
STEPS = 5


def shares_of_operators(step: Any) -> dict[str, float]:
    """The shares of a step in matrix products, and in fused attention with all that it calls; the seconds in products."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        seconds = timed(step, 1, time.perf_counter)
    events = profiled.key_averages()
    products = sum(event.self_cpu_time_total for event in events if event.key in PRODUCTS) / 1e6
    attention = sum(event.cpu_time_total for event in events if event.key in ATTENTION) / 1e6
    return {"products": products / seconds, "attention": attention / seconds, "product_seconds": products}


def share_of_native(step: Any) -> float:
    """The share of a step in C++ functions."""
    inside, plain = 0.0, NativeFunctions.call

    def call(self: NativeFunctions, *arguments: Any) -> None:
        nonlocal inside
        start = time.perf_counter()
        plain(self, *arguments)
        inside += time.perf_counter() - start

    with mock.patch.object(NativeFunctions, "call", call):
        seconds = timed(step, 1, time.perf_counter)
    return inside / seconds


def row(subject: Subject, case: Case) -> dict[str, Any]:
    """The shares of one model's step."""
    step = prepare(subject, case, CPU).step
    step()
    found = [
        {"seconds": timed(step, 1, time.perf_counter), "native": share_of_native(step), **shares_of_operators(step)}
        for _ in range(STEPS)
    ]
    medians = {key: statistics.median(each[key] for each in found) for key in found[0]}
    product_seconds = medians.pop("product_seconds")
    with FlopCounterMode(display=False) as counter:
        step()
    attention_flops = sum(flops for operator, flops in counter.get_flop_counts()["Global"].items() if "scaled" in str(operator))
    flops = counter.get_total_flops() - attention_flops
    medians["else"] = 1 - medians["products"] - medians["attention"] - medians["native"]
    return {
        "context": case.length, "model": subject.name, "dtype": case.dtype, **medians,
        "product_seconds": product_seconds, "flops_of_products": flops,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    header = [
        "context", "model", "ms a step", "matrix products", "fused attention", "functions in C++", "all else",
        "GFLOP of products", "products, share of the peak",
    ]  # fmt: skip
    lines = []
    for each in rows:
        speed = each["flops_of_products"] / each["product_seconds"]
        lines.append(
            [
                f"{each['context']:,}", each["model"], f"{1e3 * each['seconds']:,.0f}",
                *(f"{each[share]:.0%}" for share in ("products", "attention", "native", "else")),
                f"{each['flops_of_products'] / 1e9:,.0f}", f"{speed / each['peak']:.0%}",
            ]
        )  # fmt: skip
    return markdown_table(header, lines)


def main() -> None:
    plan = make_plan(dataclasses.replace(PARTS["train"], modes=("eager",)))
    dtype = plan.cells[0][0].dtype
    with freed_memory_kept():
        before = peak_flops(CPU, dtype)
        rows = [row(subject, case) for case, subjects in plan.cells for subject in subjects]
        peak = max(before, peak_flops(CPU, dtype))  # the same for all rows
    for each in rows:
        each["peak"] = peak
        if each["else"] < 0:
            raise SystemExit(f"The parts of {each['model']} take longer than its step: measure again on a quieter machine.")
    save("step_shares", rows, table(rows))


if __name__ == "__main__":
    main()
