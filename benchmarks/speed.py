"""The figures in docs/speed.md: `python benchmarks/speed.py` (40 minutes on 2 cores with bf16, longer on others), or parts
by name.

Each part is a benchmark that writes results.json and results.md to benchmarks/results/speed-PART. The figures beside their
goals go to benchmarks/results/speed.md; crossover.md shows from which length on FLASH is faster than Transformer++. Parts that
are not run keep their earlier results. The environment variable BENCHMARK_RESULTS names another folder. generation.py measures
generation, and length.py other lengths.
"""

import argparse
import dataclasses
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS

from lineartime.bench.command import run_benchmark
from lineartime.bench.config import BenchConfig
from lineartime.machine import choose_precision
from lineartime.markdown import markdown_table

SIZES = ("flash-tiny.n_blocks=12", "transformer++-tiny.n_blocks=6", "d_qk=128", "chunk_size=256")
"""12 blocks of FLASH, and 6 of a Transformer, which have the same cost; both have d = 256."""


def part(**options: Any) -> BenchConfig:
    values: dict[str, Any] = {
        "presets": ("flash-tiny", "transformer++-tiny"),
        "override": SIZES,
        "vocab_size": 256,
        "memory": False,
        "device": "cpu",
    }
    return BenchConfig(**values | options)


PARTS = {
    "train": part(
        measure=("train",),
        context_lengths=(1024, 8192),
        modes=("eager", "compiled"),
        peers=("flash-pytorch",),
        rounds=9,
    ),
    "memory": part(measure=("train",), context_lengths=(8192,), peers=("flash-pytorch",), rounds=1, warmup=0, memory=True),
    "crossover": part(
        measure=("train",),
        context_lengths=(128, 256, 512, 1024, 2048, 4096, 8192),
        modes=("eager", "compiled"),
        dtypes=tuple(dict.fromkeys(("fp32", choose_precision("auto", torch.device("cpu"))))),
        rounds=3,
    ),
}


def measure_import() -> None:
    """Seconds that importing lineartime and its layers takes in addition to torch, in separate processes."""
    script = (
        "import time, torch; start = time.perf_counter(); import lineartime; lineartime.FLASH, lineartime.build; "
        "print(time.perf_counter() - start)"
    )
    runs = [subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True) for _ in range(7)]
    seconds = [float(run.stdout) for run in runs]
    (RESULTS / "speed-import.json").write_text(json.dumps({"seconds": seconds}) + "\n")


def entries(name: str) -> dict[tuple[str, int], dict[str, Any]]:
    """The results of a part, by model and length or position."""
    path = RESULTS / f"speed-{name}" / "results.json"
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())
    suffix = {"eager": "", "compiled": " compiled"}
    return {(entry["subject"] + suffix[entry["mode"]], entry["length"]): entry for entry in found["entries"]}


def rounded_down(ratio: float) -> str:
    """Two digits after the point, rounded down: a goal that is just missed is not shown as met."""
    return f"{math.floor(100 * ratio) / 100:.2f}"


def figures() -> list[list[str]]:
    """Rows of figure, goal and result; the result is "not measured" if the part has not run."""
    train, memory = (entries(name) for name in ("train", "memory"))

    def ratio(of: dict[tuple[str, int], dict[str, Any]], slow: str, fast: str, length: int, key: str = "seconds") -> str:
        """The time of one model relative to another: the median of the ratios over the rounds."""
        a, b = of.get((slow, length)), of.get((fast, length))
        if not a or not b or not a[key] or not b[key]:
            return "not measured"
        values = [a[key]] if key != "seconds" else a[key]
        others = [b[key]] if key != "seconds" else b[key]
        return rounded_down(statistics.median(x / y for x, y in zip(values, others, strict=True)))

    rows = []
    for length in (1024, 8192):
        for peer, goal in (("flash-pytorch", "1.7"), ("flash-pytorch compiled", "1.35")):
            rows.append(
                [f"{peer} / flash, a training step, T = {length:,}", f">= {goal}", ratio(train, peer, "flash-tiny", length)]
            )
    for length, goal in ((1024, "1.25"), (8192, "4.5")):
        what = f"transformer++ compiled / flash, a training step, T = {length:,}"
        rows.append([what, f">= {goal}", ratio(train, "transformer++-tiny compiled", "flash-tiny", length)])
    for length in (1024, 8192):
        entry = train.get(("flash-tiny", length))
        use = "not measured" if entry is None else f"{math.floor(100 * entry['use_of_peak'])}%"
        rows.append([f"flash, share of the peak of matrix products, T = {length:,}", ">= 60 %", use])
    for other, goal in (("flash-pytorch", "1.7"), ("transformer++-tiny", "1")):
        what = f"{other.removesuffix('-tiny')} / flash, peak memory, T = 8,192"
        rows.append([what, f">= {goal}", ratio(memory, other, "flash-tiny", 8192, "peak_bytes")])
    file = RESULTS / "speed-import.json"
    seconds = f"{statistics.median(json.loads(file.read_text())['seconds']):.2f} s" if file.is_file() else "not measured"
    rows.append(["importing lineartime, beyond torch", "<= 0.3 s", seconds])
    return rows


def crossover() -> str:
    """A table of microseconds per token in training, by length and precision; each model in its faster mode."""
    path = RESULTS / "speed-crossover" / "results.json"
    if not path.is_file():
        return "not measured\n"
    measured = [entry for entry in json.loads(path.read_text())["entries"] if entry["tokens_per_second"]]
    dtypes, lengths, models = (list(dict.fromkeys(entry[key] for entry in measured)) for key in ("dtype", "length", "subject"))
    rows = []
    for dtype in dtypes:
        times: list[list[float]] = []
        for model in models:
            times.append([])
            for length in lengths:
                alike = [e for e in measured if (e["dtype"], e["length"], e["subject"]) == (dtype, length, model)]
                times[-1].append(min((1e6 / entry["tokens_per_second"] for entry in alike), default=math.nan))
            rows.append([f"{dtype}: {model}", *[f"{value:.1f}" for value in times[-1]]])
        rows.append([f"{dtype}: the second over the first", *[f"{b / a:.2f}" for a, b in zip(*times, strict=True)]])
    return markdown_table(["µs for a token, trained in contexts of", *[f"{length:,}" for length in lengths]], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, "import", []], help="what to measure; everything by default")
    parts = parser.parse_args().parts or [*PARTS, "import"]
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in parts:
        if name == "import":
            measure_import()
            continue
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "results")
            run_benchmark(dataclasses.replace(PARTS[name], out=out))
            shutil.rmtree(RESULTS / f"speed-{name}", ignore_errors=True)  # not before: a benchmark that fails replaces nothing
            shutil.move(out, RESULTS / f"speed-{name}")
    table = markdown_table(["figure", "goal", "measured"], figures())
    (RESULTS / "speed.md").write_text(table)
    (RESULTS / "crossover.md").write_text(crossover())
    print(table, crossover(), sep="\n")


if __name__ == "__main__":
    main()
