"""How the time per token grows with the length of the context: `python benchmarks/length.py` (about 10 minutes on 2 cores).

Training: one step (forward, backward) over 8,192 tokens, cut into sequences of the given length, or over one sequence of
65,536, of which Transformer++ takes a single step. Generation: one token after `length` others, in fp32; the states are filled
with zeros, which does not change the time. All have a vocabulary of 256 bytes, and FLASH-pytorch has the sizes of flash-tiny.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, median_seconds, save
from peer import NAME as PEER
from peer import Peer

from lineartime.bench.measure import Case, Subject, prepare, synchronized, timed
from lineartime.host import freed_memory_kept
from lineartime.machine import choose_precision
from lineartime.models.systems import resolve
from lineartime.plots import label_axes, looks_of
from lineartime.units import markdown_table

PRESETS = ["flash-tiny", "flash-quad-tiny", "transformer++-tiny"]
NAMES = [PRESETS[0], PEER, *PRESETS[1:]]
LENGTHS = [512, 2048, 8192, 65536]
POSITIONS = [1024, 8192, 65536]
TOKENS = 8192
CPU = torch.device("cpu")


def subject(name: str) -> Subject:
    """A preset or FLASH-pytorch, of bytes."""
    if name == PEER:
        return Peer(name, "eager", resolve(PRESETS[0], vocab_size=256))
    return Subject(name, "eager", resolve(name, vocab_size=256))


def measured(cases: list[Case], names: list[str], rounds: int, seconds: float) -> dict[tuple[str, Case], float | None]:
    """The median seconds of a step of each model in each case.

    All take turns, because the machine is not equally fast at all times. A step is repeated, as in generation: each model has
    the caches of the processor to itself.
    """
    steps = {(name, case): prepare(subject(name), case, CPU).step for case in cases for name in names}
    return median_seconds(steps, rounds, partial(synchronized, CPU), min_seconds=seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timings of each case, of which the median is taken")
    rounds = parser.parse_args().rounds
    precision = choose_precision("auto", CPU)
    training = [Case("train", length, precision, max(1, TOKENS // length)) for length in LENGTHS]
    generation = [Case("decode", position, "fp32", 1) for position in POSITIONS]
    with freed_memory_kept():  # as in training
        seconds = measured(training[:-1], NAMES, rounds, 0.05) | measured(training[-1:], NAMES[:2], 1, 0.05)
        slow = prepare(subject(PRESETS[-1]), training[-1], CPU).step
        seconds[PRESETS[-1], training[-1]] = timed(slow, 1, partial(synchronized, CPU))
        # Turns of a second: a decoder may begin with the threads that the turn before needed.
        seconds |= measured(generation, PRESETS, 2 * rounds, 1.0)
    rows: list[dict[str, object]] = [
        {
            "what": "generation" if case.measure == "decode" else "training",
            "preset": name,
            "length": case.length,
            "us_per_token": None if value is None else 1e6 * value / case.tokens,
        }
        for (name, case), value in seconds.items()
    ]
    save("length", rows, table(rows))
    draw(rows)


def table(rows: list[dict[str, object]]) -> str:
    cells = {(row["what"], row["preset"], row["length"]): row["us_per_token"] for row in rows}
    header = ["µs per token", *[f"train {n:,}" for n in LENGTHS], *[f"generate at {n:,}" for n in POSITIONS]]
    columns = [("training", n) for n in LENGTHS] + [("generation", n) for n in POSITIONS]
    return markdown_table(
        header, [[f"`{name}`", *[_shown(cells.get((what, name, n))) for what, n in columns]] for name in NAMES]
    )


def readme_table() -> str:
    """What the README shows of the stored results."""
    rows = json.loads((Path(__file__).parent / "results" / "length.json").read_text())["rows"]
    cells = {(row["what"], row["preset"], row["length"]): row["us_per_token"] for row in rows}
    names = {PRESETS[0]: "FLASH", PEER: "FLASH-pytorch", PRESETS[-1]: "Transformer++"}
    columns = [*(("training", n) for n in (512, 8192, 65536)), *(("generation", n) for n in (POSITIONS[0], POSITIONS[-1]))]
    header = ["µs for a token", *(f"{'train' if what == 'training' else 'generate'} at {n:,}" for what, n in columns)]
    return markdown_table(
        header, [[own, *(_shown(cells.get((what, name, n))) for what, n in columns)] for name, own in names.items()]
    )


def _shown(microseconds: Any) -> str:
    return "-" if microseconds is None else f"{microseconds:,.0f}"


def draw(rows: list[dict[str, object]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, what in zip(figure.subplots(1, 2), ("training", "generation"), strict=True):
        for name in NAMES:
            own = [row for row in rows if (row["what"], row["preset"]) == (what, name) and row["us_per_token"] is not None]
            points = [(row["length"], row["us_per_token"]) for row in own]
            if points:
                axes.plot(*zip(*points, strict=True), label=name, **looks_of(NAMES)[name])
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", title=what)
        axes.set(xlabel="tokens in a sequence" if what == "training" else "tokens already read", ylabel="µs per token")
        axes.legend()
        label_axes(axes, x_values=LENGTHS if what == "training" else POSITIONS)
    documented = Path(__file__).parent / "results" == RESULTS
    figure.savefig(Path(__file__).parents[1] / "docs" / "length.png" if documented else RESULTS / "length.png", dpi=110)


if __name__ == "__main__":
    main()
