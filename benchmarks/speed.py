"""The figures of training in docs/results.md: `python benchmarks/speed.py` (40 minutes on 2 cores with bf16, longer on
others), or parts by name.

Each part is a benchmark whose timings go to benchmarks/results/speed-PART.json. The ratios go to speed.md
there, beside those of another machine; crossover.md shows from which length on FLASH is faster than Transformer++. Parts that
are not run keep their earlier results. The environment variable BENCHMARK_RESULTS names another folder. generation.py measures
generation, and length.py other lengths.
"""

import argparse
import dataclasses
import json
import math
import shutil
import statistics
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


MACHINES = {"AMD EPYC": RESULTS, "slower AMD EPYC": RESULTS / "half-peak"}
"""Folders of results: the machine of the documents, and one whose matrix products in bf16 are half as fast."""


def entries(file: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The results of a part, by model and length."""
    if not file.is_file():
        return {}
    suffix = {"eager": "", "compiled": " compiled"}
    found: list[dict[str, Any]] = json.loads(file.read_text())["entries"]
    return {(entry["subject"] + suffix[entry["mode"]], entry["length"]): entry for entry in found}


def ratios() -> str:
    """A table of the time of a step over that of FLASH, the median over the rounds, by machine and length."""
    trained = {name: entries(folder / "speed-train.json") for name, folder in MACHINES.items()}
    columns = [(name, length) for name, found in trained.items() if found for length in (1024, 8192)]
    models = dict.fromkeys(model for found in trained.values() for model, _ in found)
    rows = []
    for model in list(models)[1:]:
        cells = []
        for name, length in columns:
            seconds = [trained[name][each, length]["seconds"] for each in (model, "flash-tiny")]
            cells.append(f"{statistics.median(a / b for a, b in zip(*seconds, strict=True)):.2f}")
        rows.append([f"{model} / flash-tiny", *cells])
    shares = [f"{trained[name]['flash-tiny', length]['use_of_peak']:.0%}" for name, length in columns]
    rows.append(["flash-tiny: share of the peak of matrix products", *shares])
    memory = entries(RESULTS / "speed-memory.json")
    for model in ("transformer++-tiny", "flash-pytorch") if memory else ():
        ratio = memory[model, 8192]["peak_bytes"] / memory["flash-tiny", 8192]["peak_bytes"]
        cells = [f"{ratio:.2f}" if column == ("AMD EPYC", 8192) else "-" for column in columns]
        rows.append([f"{model} / flash-tiny: peak memory", *cells])
    return markdown_table(["a training step in bf16", *(f"{name}, {length:,} tokens" for name, length in columns)], rows)


def crossover() -> str:
    """A table of microseconds per token in training, by length and precision; each model in its faster mode."""
    path = RESULTS / "speed-crossover.json"
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
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="what to measure; everything by default")
    parts = parser.parse_args().parts or [*PARTS]
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in parts:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "results")
            run_benchmark(dataclasses.replace(PARTS[name], out=out))
            shutil.copy(out / "results.json", RESULTS / f"speed-{name}.json")  # not before: one that fails replaces nothing
    (RESULTS / "speed.md").write_text(ratios())
    (RESULTS / "crossover.md").write_text(crossover())
    print(ratios(), crossover(), sep="\n")


if __name__ == "__main__":
    main()
