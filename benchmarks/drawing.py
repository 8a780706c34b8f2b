"""Time drawing the next token from logits, which follows each step: `python benchmarks/drawing.py` (a minute, one thread)."""

import argparse
from functools import partial
from itertools import product
from typing import Any

import torch
from measure import save

from lineartime.bench.measure import median_seconds, synchronized
from lineartime.generation.sampling import Sampling, draw
from lineartime.machine import using_threads
from lineartime.markdown import markdown_table

VOCABULARIES = (258, 4096, 32_000)
"""Bytes, the vocabulary of `make train`, and one of a larger model."""
STREAMS = (1, 32)
SAMPLINGS = {
    "default": Sampling(),
    "top_p 1": Sampling(top_p=1.0),
    "top_k 50": Sampling(top_k=50),
    "greedy": Sampling(temperature=0),
}
SPREAD = 4.0
"""The standard deviation of the logits; at this one, about 13, 90 and 500 tokens reach a top_p of 0.95."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=51, help="timings of each case, of which the median is taken")
    rounds, generator = parser.parse_args().rounds, torch.Generator().manual_seed(0)
    cases = {}
    for vocabulary, streams, name in product(VOCABULARIES, STREAMS, SAMPLINGS):
        logits = SPREAD * torch.randn(streams, vocabulary, generator=generator)
        cases[vocabulary, streams, name] = partial(draw, logits, SAMPLINGS[name], generator)
    with using_threads(1):
        seconds = median_seconds(cases, rounds, partial(synchronized, torch.device("cpu")), min_seconds=0.02)
        rows: list[dict[str, Any]] = [
            {"vocabulary": vocabulary, "streams": streams, "sampling": name, "seconds": value}
            for (vocabulary, streams, name), value in seconds.items()
        ]
        save("drawing", rows, table(seconds))  # here, where a thread is what the machine has


def table(seconds: dict[tuple[int, int, str], float | None]) -> str:
    """Markdown: milliseconds by vocabulary and streams, a column for each way to draw."""
    lines = []
    for vocabulary, streams in product(VOCABULARIES, STREAMS):
        values = [seconds[vocabulary, streams, name] for name in SAMPLINGS]
        lines.append([f"{vocabulary:,}", str(streams), *("-" if value is None else f"{1e3 * value:.2f}" for value in values)])
    return markdown_table(["vocabulary", "streams", *(f"{name} (ms)" for name in SAMPLINGS)], lines)


if __name__ == "__main__":
    main()
