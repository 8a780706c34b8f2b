"""Time training steps by how long threads spin for each other, alone and beside a busy program: `python benchmarks/waiting.py`.

Five minutes on two otherwise idle cores. PyTorch divides each operation over its threads, which then wait for the slowest.
GNU's OpenMP lets them spin for a while before they sleep: GOMP_SPINCOUNT says how long.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from measure import save

from lineartime.markdown import markdown_table

CASES = {
    "2 threads, 300,000 spins (OpenMP's default)": (2, 300_000),
    "2 threads, 5,000": (2, 5_000),
    "2 threads, 1,000": (2, 1_000),
    "2 threads, 0": (2, 0),
    "1 thread": (1, 1_000),
}
OTHERS = {"alone": 0, "beside a busy program": 1}
OPTIONS = ["--preset", "flash-next-tiny", "--context", "512", "--batch-size", "8", "--eval-windows", "2", "--precision", "fp32"]
STEPS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each case, in turn")
    rounds = parser.parse_args().rounds
    speeds: dict[tuple[str, str], list[float]] = {key: [] for key in product(CASES, OTHERS)}
    for _, (case, situation) in product(range(rounds), speeds):
        threads, spins = CASES[case]
        with busy_programs(OTHERS[situation]):
            speeds[case, situation] += steps_of_run(threads, spins)
        print(f"{case}, {situation}: {statistics.median(speeds[case, situation]):,.0f} tokens/s", flush=True)
    rows: list[dict[str, Any]] = [
        {"case": case, "situation": situation, "tokens_per_second": values} for (case, situation), values in speeds.items()
    ]
    save("waiting", rows, table(speeds))


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """Keep so many cores busy."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def steps_of_run(threads: int, spins: int) -> list[float]:
    """The tokens per second of each step of a short run but the first, which sets everything up."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lineartime", "train", *OPTIONS, "--steps", str(STEPS), "--eval-every", str(STEPS)]
        environment = {**os.environ, "GOMP_SPINCOUNT": str(spins)}
        arguments = ["--threads", str(threads), "--out", str(Path(folder) / "run")]
        subprocess.run([*command, *arguments], check=True, env=environment, capture_output=True)
        lines = map(json.loads, (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines())
        return [line["tokens_per_second"] for line in lines if "tokens_per_second" in line][1:]


def table(speeds: dict[tuple[str, str], list[float]]) -> str:
    """Markdown: tokens per second, the median over all steps and rounds."""
    lines = [[case, *(f"{statistics.median(speeds[case, situation]):,.0f}" for situation in OTHERS)] for case in CASES]
    return markdown_table(["tokens/s", *OTHERS], lines)


if __name__ == "__main__":
    main()
