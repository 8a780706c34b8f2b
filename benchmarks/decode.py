"""How fast flash-tiny generates in two source trees, in one interleaved run: `python benchmarks/decode.py OLD NEW`.

Each tree has a process of its own, which waits while the other one runs. A run continues a prompt of 128 tokens by 200
others. The time of the first token, which reads the prompt, does not count with one stream.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

TOKENS, PROMPT = 200, 128
STREAMS, DTYPES = (1, 32), ("float32", "bfloat16")


def generating(streams: int, dtype: str) -> Callable[[int], float]:
    """A run with a seed by the public functions, which returns its seconds."""
    import torch

    from lineartime.generation import Sampling, generate, generate_batch
    from lineartime.models import build

    torch.manual_seed(0)
    model: Any = build("flash-tiny").eval().to(getattr(torch, dtype))
    prompt = [7 * token % 256 for token in range(PROMPT)]

    def run(seed: int) -> float:
        sampling = Sampling(seed=seed)
        if streams > 1:
            start = time.perf_counter()
            generate_batch(model, [prompt] * streams, TOKENS, sampling)
            return time.perf_counter() - start
        tokens = generate(model, prompt, TOKENS + 1, sampling)
        next(tokens)
        start = time.perf_counter()
        for _ in tokens:
            pass
        return time.perf_counter() - start

    return run


def work() -> None:
    """Answer every line "STREAMS DTYPE SEED" on standard input by the seconds of a run."""
    runs: dict[tuple[int, str], Callable[[int], float]] = {}
    for line in sys.stdin:
        streams, dtype, seed = line.split()
        key = int(streams), dtype
        if key not in runs:
            runs[key] = generating(*key)
            runs[key](0)
        print(runs[key](int(seed)), flush=True)


def start(tree: Path) -> "subprocess.Popen[str]":
    """The process of a source tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve() / "src")}
    command = [sys.executable, __file__, ".", ".", "--work"]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path, help="a source tree, which contains src/lineartime")
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--out", type=Path, help="a JSON file for the seconds of all runs")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work()
        return
    processes = {"old": start(options.old), "new": start(options.new)}

    def seconds(tree: str, streams: int, dtype: str, seed: int) -> float:
        process = processes[tree]
        assert process.stdin is not None
        assert process.stdout is not None
        print(streams, dtype, seed, file=process.stdin, flush=True)
        return float(process.stdout.readline())

    rows = []
    for streams, dtype in product(options.streams, DTYPES):
        taken: dict[str, list[float]] = {"old": [], "new": []}
        for number in range(options.rounds):
            for tree in ("old", "new") if number % 2 else ("new", "old"):
                taken[tree].append(seconds(tree, streams, dtype, number))
        rows.append({"streams": streams, "dtype": dtype, "tokens": TOKENS, "seconds": taken})
        old, new = (1e3 / TOKENS * median(taken[tree]) for tree in ("old", "new"))
        low, middle, high = quantiles(before / after for before, after in zip(taken["old"], taken["new"], strict=True))
        ratio = f"{middle:.2f} (quartiles {low:.2f} to {high:.2f})"
        print(f"{streams:>2} streams, {dtype}: {old:.3f} ms a token before, {new:.3f} now, times as fast: {ratio}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    for process in processes.values():
        process.communicate()


if __name__ == "__main__":
    main()
