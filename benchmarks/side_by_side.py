"""Time training, generation and the import of two checkouts in turn: `python benchmarks/side_by_side.py OLD NEW` (20 minutes).

A step is forward, loss, backward and AdamW on one row of tokens, with the tiny preset of a system or, in long contexts and in
bf16, a smaller one, so that a step takes at most 8 seconds on 2 cores without units for bf16; --full keeps the presets.
Generation continues prompts of 128 tokens by 200 others, with flash-tiny.

Each checkout has one process, which keeps freed memory as training does. They take turns, of which every other begins with the
new one; nothing else should run. The results are medians, and the median and quartiles of the ratios of the two steps of a
turn. Every time is in the file of --out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

import lineartime

SYSTEMS = ("flash", "flash-quad", "transformer++")
IMPORTS = {
    "import lineartime": "import lineartime",
    "layers and models, beyond torch": "import time, torch; start = time.perf_counter(); import lineartime; "
    "lineartime.FLASH, lineartime.build; print(time.perf_counter() - start)",
}
STREAMS, PROMPT, TOKENS = (1, 32), 128, 200
WARM_UP = 2
PAUSE = 0.05
"""Seconds between turns: the threads of a step spin for a while after it."""
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(2**62)}
"""How glibc keeps freed memory, which a training step would otherwise ask the system for again."""


def smaller(system: str, length: int, precision: str) -> dict[str, int]:
    """What differs from the tiny preset: products in bf16 take 30 times as long without units for them."""
    long = length > 2048
    if precision == "fp32":
        return {"n_blocks": 2} if long else {}
    sizes = {"n_blocks": 1, "d_model": 32 if long else 128}
    return sizes | {"d_qk": 16} if long and system.startswith("flash") else sizes


def training_step(system: str, length: int, precision: str, sizes: dict[str, int]) -> Callable[[], None]:
    """A step that trains a model on the same row each time."""
    torch.manual_seed(0)
    model = lineartime.build(f"{system}-tiny", "clm", vocab_size=258, **sizes)
    ids, targets = torch.randint(258, (1, length)), torch.randint(258, (1, length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model.loss(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def continuation(streams: int, precision: str) -> Callable[[], None]:
    """A call that continues so many prompts together, the same ones each time."""
    torch.manual_seed(0)
    model = lineartime.build("flash-tiny").eval().to(torch.bfloat16 if precision == "bf16" else torch.float32)
    prompt = [7 * token % 256 for token in range(PROMPT)]

    def write() -> None:
        lineartime.generate_batch(model, [prompt] * streams, TOKENS, lineartime.Sampling(seed=0))

    return write


def work() -> None:
    """Take a step of the case on each line that is read, and print its seconds."""
    assert Path(lineartime.__file__).is_relative_to(os.environ["PYTHONPATH"]), lineartime.__file__
    case, step = "", None
    for line in sys.stdin:
        if line != case or step is None:
            step = None  # frees the model of the last case first
            kind, *given = json.loads(line)
            case, step = line, (training_step if kind == "train" else continuation)(*given)
        start = time.perf_counter()
        step()
        print(time.perf_counter() - start, flush=True)


class Checkout:
    """A process that trains with the source of a checkout, and others that import it."""

    def __init__(self, root: Path) -> None:
        self._environment = os.environ | KEEP_MEMORY | {"PYTHONPATH": str(root.resolve() / "src")}
        command = [sys.executable, __file__, "--work"]
        self._process = subprocess.Popen(
            command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        self.commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()

    def run(self, *case: Any) -> float:
        """The seconds of a case: "train" or "generate", and what its function takes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def start(self, script: str) -> float:
        """The seconds of a Python that runs a script, or those that it prints."""
        start = time.perf_counter()
        run = [sys.executable, "-c", script]
        printed = subprocess.run(run, env=self._environment, capture_output=True, text=True, check=True).stdout
        return float(printed or time.perf_counter() - start)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def in_turn(old: Callable[[], float], new: Callable[[], float], repeats: int) -> dict[str, list[float]]:
    """The seconds of both, after turns that warm up."""
    seconds: dict[str, list[float]] = {"old": [], "new": []}
    for turn in range(WARM_UP + repeats):
        for name, measure in [("old", old), ("new", new)][:: 1 if turn % 2 else -1]:
            seconds[name].append(measure())
            time.sleep(PAUSE)
    return {name: values[WARM_UP:] for name, values in seconds.items()}


def summary(row: dict[str, Any]) -> str:
    """A line of the table."""
    ratios = [new / old for old, new in zip(row["old"], row["new"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    old, new = (statistics.median(row[name]) for name in ("old", "new"))
    return f"| {row['case']} | {old:.4f} | {new:.4f} | {middle:.3f} | {low:.3f} to {high:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--systems", nargs="*", default=SYSTEMS, help="of which the tiny presets are trained")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--repeats", type=int, default=20, help="timed turns of each case, at least 2")
    parser.add_argument("--full", action="store_true", help="train the tiny presets at their own sizes")
    parser.add_argument("--no-imports", action="store_true", help="time only training")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "side-by-side.json")
    options = parser.parse_args()
    from lineartime.runs.record import this_process  # not above: a checkout may have it elsewhere

    old, new = (Checkout(path) for path in (options.old, options.new))
    rows: list[dict[str, Any]] = []
    commits = {"old": old.commit, "new": new.commit}
    results = {"machine": str(this_process()), "commits": commits, "rows": rows}
    print("| seconds | old | new | new / old | quartiles |", "| --- | ---: | ---: | ---: | ---: |", sep="\n")

    def measure(name: str, of: Callable[..., float], *case: Any) -> None:
        rows.append({"case": name, **in_turn(partial(of, old, *case), partial(of, new, *case), options.repeats)})
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        print(summary(rows[-1]), flush=True)

    try:
        for name, script in {} if options.no_imports else IMPORTS.items():
            measure(name, Checkout.start, script)
        for system, length, precision in product(options.systems, options.lengths, options.precisions):
            sizes = {} if options.full else smaller(system, length, precision)
            name = ", ".join([system, f"{length:,}", precision, *(f"{key} {value}" for key, value in sizes.items())])
            measure(name, Checkout.run, "train", system, length, precision, sizes)
        for streams, precision in product(STREAMS, options.precisions):
            measure(f"{streams} streams, {precision}", Checkout.run, "generate", streams, precision)
    finally:
        old.stop()
        new.stop()


if __name__ == "__main__":
    work() if sys.argv[1:] == ["--work"] else main()
