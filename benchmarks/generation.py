"""How fast models generate, one token after another: `python benchmarks/generation.py` (about 15 minutes on 2 cores).

The script times `prepare(...).step`, which reads one token of each of B streams after `position` tokens, eager and compiled.
All subjects take turns. The first call of a compiled step is timed in two new processes; the second one finds compiled code on
disk. The first token of a long prompt is compared with a forward pass over the prompt, which keeps no state.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measure import save
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from lineartime.bench.measure import median_seconds, synchronized
from lineartime.bench.subjects import Case, Subject, prepare
from lineartime.layers.dense import dense
from lineartime.machine import choose_precision, using_threads
from lineartime.markdown import markdown_table
from lineartime.models.decoder import NativeDecoder
from lineartime.models.presets import resolve

CPU = torch.device("cpu")
SUBJECTS = (
    ("flash-tiny", "eager"),
    ("flash-tiny", "compiled"),
    ("flash-next-tiny", "eager"),
    ("transformer++-tiny", "eager"),
)
POSITIONS = {1: (512, 1024, 65_536), 32: (1024,)}
"""The positions at which a step is timed, by the number of streams."""
GOALS = {
    ("flash-tiny", "fp32", 1024, 1): 1000,
    ("flash-tiny", "bf16", 1024, 1): 1600,
    ("flash-tiny", "fp32", 1024, 32): 8000,
    ("flash-tiny", "bf16", 1024, 32): 8000,
}
"""Goals in tokens per second, compiled or not; the goal of an eager step was 500."""

PROMPTS = {32_000: 1.2, 65_536: 2.0}
"""The tokens of long prompts, and the goals for the time to the first token relative to a forward pass."""
PROMPT_ROUNDS = 3
QUADRATIC = "transformer++-tiny"
"""It reads the shorter prompt only: the longer one would take it minutes."""


def first_token(dtype: Any) -> list[dict[str, Any]]:
    """Seconds to read a long prompt, which gives the logits of the first token and a state, and of a forward pass."""
    rows = []
    for name, prompt in product(dict.fromkeys(name for name, _ in SUBJECTS), PROMPTS):
        if name == QUADRATIC and prompt > min(PROMPTS):
            continue
        subject = Subject(name, "eager", resolve(name))
        steps = {kind: prepare(subject, Case(kind, prompt, dtype, 1), CPU).step for kind in ("prefill", "forward")}
        seconds = median_seconds(steps, PROMPT_ROUNDS, partial(synchronized, CPU))
        rows.append({"prompt": prompt, "preset": name, "dtype": dtype, **seconds})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def first_call(dtype: str, cache: str) -> float:
    """Seconds of the first compiled step in a new process, with the compilation cache in a given folder."""
    code = f"import generation; print(generation.time_first({dtype!r}))"
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    command = [sys.executable, "-W", "ignore", "-c", code]
    output = subprocess.run(command, cwd=Path(__file__).parent, env=environment, check=True, capture_output=True, text=True)
    return float(output.stdout.split()[-1])


def time_first(dtype: Any) -> float:
    """Seconds of the first compiled step in this process."""
    ready = prepare(Subject("flash-tiny", "compiled", resolve("flash-tiny")), Case("decode", 1024, dtype, 1), CPU)
    start = time.perf_counter()
    ready.step()
    return time.perf_counter() - start


def causes() -> dict[str, float]:
    """For an eager float32 step of flash-tiny: its calls, the time share of C++, and the bandwidth of reading weights."""
    step = prepare(Subject("flash-tiny", "eager", resolve("flash-tiny")), Case("decode", 1024, "fp32", 1), CPU).step
    calls, inside, plain = 0, 0.0, NativeDecoder.logits

    def timed(self: NativeDecoder, *arguments: Any) -> torch.Tensor:
        nonlocal calls, inside
        start = time.perf_counter()
        out = plain(self, *arguments)
        calls, inside = calls + 1, inside + time.perf_counter() - start
        return out

    steps = 50
    with using_threads(1):
        for _ in range(30):
            step()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            step()
        with mock.patch.object(NativeDecoder, "logits", timed):
            start = time.perf_counter()
            for _ in range(steps):
                step()
            seconds = time.perf_counter() - start
        weights = [torch.randn(1088, 256) for _ in range(160)]  # 178 MB: more than the caches of a processor hold
        token = torch.randn(1, 256)
        read = {
            "PyTorch's product": lambda: [functional.linear(token, weight) for weight in weights],
            "the product in C++": lambda: [dense(token, weight) for weight in weights],
            "a sum": lambda: [weight.sum() for weight in weights],
        }
        with torch.no_grad():
            read_seconds = median_seconds(read, 21, partial(synchronized, CPU))
    gigabytes = sum(weight.nbytes for weight in weights) / 1e9
    outermost = [event for event in profiled.events() if event.cpu_parent is None and event.name.startswith("aten::")]
    found = {"calls": float(len(outermost)), "C++ calls": calls / steps, "C++ share": inside / seconds}
    return found | {f"GB/s {name}": gigabytes / value for name, value in read_seconds.items() if value}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="timings of each case, of which the median is taken")
    rounds = parser.parse_args().rounds
    dtypes: tuple[Any, ...] = ("fp32", "bf16") if choose_precision("auto", CPU) == "bf16" else ("fp32",)
    rows: list[dict[str, Any]] = []
    for dtype in dtypes:
        for streams, positions in POSITIONS.items():
            steps = {}  # of all positions, which take turns, too
            for (name, mode), position in product(SUBJECTS, positions):
                subject = Subject(name, mode, resolve(name))  # type: ignore[arg-type]
                steps[name, mode, position] = prepare(subject, Case("decode", position, dtype, streams), CPU).step
            for step in steps.values():
                step()  # compile
            seconds = median_seconds(steps, rounds, partial(synchronized, CPU), min_seconds=0.05)
            rows += [
                {"preset": name, "mode": mode, "dtype": dtype, "position": position, "streams": streams, "seconds": value}
                for (name, mode, position), value in seconds.items()
            ]
            print(json.dumps(rows[-len(steps) :]), flush=True)
        rows += first_token(dtype)
        with tempfile.TemporaryDirectory() as cache:
            rows += [{"first_call": number, "dtype": dtype, "seconds": first_call(dtype, cache)} for number in (1, 2)]
    rows.append({"causes": causes()})
    save("generation", rows, table(rows))


def ratios(rows: list[dict[str, Any]]) -> list[list[str]]:
    """How the time of an eager step depends on the position, and compares with Transformer++ in its faster precision."""
    steps = [row for row in rows if row.get("mode") == "eager" and row["streams"] == 1]
    seconds = {(row["preset"], row["dtype"], row["position"]): row["seconds"] for row in steps}
    dtypes = list(dict.fromkeys(row["dtype"] for row in steps))
    lines = []
    for dtype in dtypes:
        if any(value is None for value in seconds.values()):
            return [["a step ran out of memory", dtype, "-", "-"]]
        longer = seconds["flash-tiny", dtype, 65_536] / seconds["flash-tiny", dtype, 1024]
        lines.append(["`flash-tiny`, position 65,536 / position 1,024", dtype, "<= 1.05", f"{longer:.3f}"])
        for position in POSITIONS[1]:
            other = min(seconds[QUADRATIC, each, position] for each in dtypes)
            ratio = other / seconds["flash-tiny", dtype, position]
            lines.append([f"`{QUADRATIC}` / `flash-tiny`, position {position:,}", dtype, ">= 1", f"{ratio:.2f}"])
    return lines


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown tables: tokens per second with the goals, prompts, compilation, and causes."""
    lines = []
    for row in rows:
        if "mode" not in row:
            continue
        key = (row["preset"], row["dtype"], row["position"], row["streams"])
        goal = f"{GOALS[key]:,}" if key in GOALS else "-"
        speed = f"{row['streams'] / row['seconds']:,.0f}" if row["seconds"] else "-"
        case = [f"`{key[0]}`", row["mode"], key[1], f"{key[2]:,}", str(key[3])]
        lines.append([*case, f"{1e3 * row['seconds']:.2f}" if row["seconds"] else "out of memory", speed, goal])
    header = ["model", "step", "precision", "position", "streams", "ms", "tokens/s", "goal"]
    starts = [
        [row["dtype"], "empty" if row["first_call"] == 1 else "filled before", f"{row['seconds']:.1f} s"]
        for row in rows
        if "first_call" in row
    ]
    prompts = []
    for row in rows:
        if "prompt" in row:
            goal = f"<= {PROMPTS[row['prompt']]}" if row["preset"] == "flash-tiny" else "-"
            seconds = [f"{row[kind]:.2f}" if row[kind] else "out of memory" for kind in ("prefill", "forward")]
            ratio = f"{row['prefill'] / row['forward']:.2f}" if row["prefill"] and row["forward"] else "-"
            case = [f"`{row['preset']}`", row["dtype"], f"{row['prompt']:,}"]
            prompts.append([*case, *seconds, ratio, goal])
    found = next(row["causes"] for row in rows if "causes" in row)
    why = [
        ["calls into PyTorch", f"{found['calls']:.0f}"],
        ["calls of functions in C++", f"{found['C++ calls']:.0f}"],
        ["their share of the time, one thread", f"{found['C++ share']:.0%}"],
        *[
            [f"weights read by {how} with one row, one thread", f"{found[f'GB/s {how}']:.1f} GB/s"]
            for how in ("PyTorch's product", "the product in C++")
        ],
        ["weights read by a sum, one thread", f"{found['GB/s a sum']:.1f} GB/s"],
    ]
    return "\n".join(
        [
            markdown_table(header, lines),
            markdown_table(["ratio of times of a token, one stream", "precision of FLASH", "goal", "measured"], ratios(rows)),
            markdown_table(["model", "precision", "prompt", "first token, s", "forward pass, s", "ratio", "goal"], prompts),
            markdown_table(["compiling the step, precision", "cache on disk", "first token"], starts),
            markdown_table(["an eager step of `flash-tiny`, fp32", ""], why),
        ]
    )


if __name__ == "__main__":
    main()
