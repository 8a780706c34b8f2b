"""The shares of time in training steps of FLASH and its peers: `python benchmarks/step_shares.py` (three minutes on 2 cores).

The models are those of speed.py, in the precision that training takes on this machine, not compiled. Matrix products and fused
attention are timed by PyTorch's profiler, C++ functions by a clock around each call, and the whole step separately; each is the
median of several steps. PyTorch counts the operations of the products. `--save-as NAME` keeps the results of another machine.
"""

import argparse
import dataclasses
import statistics
import time
from functools import partial
from typing import Any
from unittest import mock

import torch
from measure import save
from speed import PARTS
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from lineartime.bench.measure import peak_flops, synchronized, timed
from lineartime.bench.plan import make_plan
from lineartime.bench.subjects import Case, Subject, prepare
from lineartime.host import freed_memory_kept
from lineartime.markdown import markdown_table
from lineartime.native import NativeFunctions

CPU = torch.device("cpu")
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::baddbmm_")
ATTENTION = tuple(f"aten::_scaled_dot_product_flash_attention_for_cpu{suffix}" for suffix in ("", "_backward"))
STEPS = 5


def profiled_seconds(step: Any) -> dict[str, float]:
    """Seconds in matrix products, and in fused attention with all that it calls."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    events = profiled.key_averages()
    return {
        "products": sum(event.self_cpu_time_total for event in events if event.key in PRODUCTS) / 1e6,
        "attention": sum(event.cpu_time_total for event in events if event.key in ATTENTION) / 1e6,
    }


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


def row(subject: Subject, case: Case) -> dict[str, Any]:
    """The shares of one model's step."""
    step = prepare(subject, case, CPU).step
    step()
    seconds = statistics.median(timed(step, 1, partial(synchronized, CPU)) for _ in range(STEPS))
    found = [profiled_seconds(step) for _ in range(STEPS)]
    products, attention = (statistics.median(each[key] for each in found) for key in ("products", "attention"))
    native = statistics.median(native_seconds(step) for _ in range(STEPS))
    with FlopCounterMode(display=False) as counter:
        step()
    attention_flops = sum(flops for operator, flops in counter.get_flop_counts()["Global"].items() if "scaled" in str(operator))
    flops = counter.get_total_flops() - attention_flops
    return {
        "context": case.length, "model": subject.name, "seconds": seconds, "products": products / seconds,
        "attention": attention / seconds, "native": native / seconds, "flops_of_products": flops,
        "products_of_peak": flops / products / peak_flops(CPU, case.dtype),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    header = [
        "context", "model", "ms a step", "matrix products", "fused attention", "functions in C++", "all else",
        "GFLOP of products", "products, share of the peak",
    ]  # fmt: skip
    lines = []
    for each in rows:
        shares = [each["products"], each["attention"], each["native"]]
        lines.append(
            [
                f"{each['context']:,}", each["model"], f"{1e3 * each['seconds']:,.0f}",
                *(f"{share:.0%}" for share in (*shares, 1 - sum(shares))),
                f"{each['flops_of_products'] / 1e9:,.0f}", f"{each['products_of_peak']:.0%}",
            ]
        )  # fmt: skip
    return markdown_table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save-as", default="step_shares", help="the name of the results")
    name = parser.parse_args().save_as
    plan = make_plan(dataclasses.replace(PARTS["train"], modes=("eager",)))
    with freed_memory_kept():
        rows = [row(subject, case) for case, subjects in plan.cells for subject in subjects]
    save(name, rows, table(rows))


if __name__ == "__main__":
    main()
