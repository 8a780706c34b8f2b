"""How fast models generate, one token after another: `python benchmarks/generation.py` (about 10 minutes on 2 cores).

The script times `prepare(...).step`, which reads one token of each of B streams after `position` tokens. All models and
positions take turns. The first token of a long prompt is compared with a forward pass over the prompt, which keeps no state.
"""

import argparse
import json
from functools import partial
from itertools import product
from typing import Any

import torch
from measure import save

from lineartime.bench.measure import median_seconds, synchronized
from lineartime.bench.subjects import Case, Subject, prepare
from lineartime.machine import choose_precision
from lineartime.markdown import markdown_table
from lineartime.models.presets import resolve

CPU = torch.device("cpu")
PRESETS = ("flash-tiny", "flash-next-tiny", "transformer++-tiny")
POSITIONS = {1: (512, 1024, 65_536), 32: (1024,)}
"""The positions at which a step is timed, by the number of streams."""
PROMPTS = (32_000, 65_536)
QUADRATIC = "transformer++-tiny"
"""It reads the shorter prompt only: the longer one would take it minutes."""


def subject(name: str) -> Subject:
    return Subject(name, "eager", resolve(name))


def steps(dtype: Any, rounds: int) -> list[dict[str, Any]]:
    """Seconds of a step, by model, position and number of streams."""
    rows = []
    for streams, positions in POSITIONS.items():
        found = {
            (name, position): prepare(subject(name), Case("decode", position, dtype, streams), CPU).step
            for name, position in product(PRESETS, positions)
        }
        for step in found.values():
            step()  # the first call is not timed
        seconds = median_seconds(found, rounds, partial(synchronized, CPU), min_seconds=0.05)
        rows += [
            {"preset": name, "dtype": dtype, "position": position, "streams": streams, "seconds": value}
            for (name, position), value in seconds.items()
        ]
        print(json.dumps(rows[-len(found) :]), flush=True)
    return rows


def first_token(dtype: Any) -> list[dict[str, Any]]:
    """Seconds to read a long prompt, which gives the logits of the first token and a state, and of a forward pass."""
    rows = []
    for name, prompt in product(PRESETS, PROMPTS):
        if name == QUADRATIC and prompt > min(PROMPTS):
            continue
        found = {kind: prepare(subject(name), Case(kind, prompt, dtype, 1), CPU).step for kind in ("prefill", "forward")}
        seconds = median_seconds(found, 3, partial(synchronized, CPU))
        rows.append({"preset": name, "dtype": dtype, "prompt": prompt, **seconds})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="timings of each case, of which the median is taken")
    rounds = parser.parse_args().rounds
    dtypes: tuple[Any, ...] = ("fp32", "bf16") if choose_precision("auto", CPU) == "bf16" else ("fp32",)
    rows = [row for dtype in dtypes for row in [*steps(dtype, rounds), *first_token(dtype)]]
    save("generation", rows, table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """Two Markdown tables: milliseconds of a step, and the first token of a prompt beside a forward pass."""
    cases: dict[tuple[str, str], list[str]] = {(row["preset"], row["dtype"]): [] for row in rows}
    prompts = []
    for row in rows:
        if "prompt" in row:
            times = [f"{row[kind]:.2f}" if row[kind] else "out of memory" for kind in ("prefill", "forward")]
            prompts.append([f"`{row['preset']}`", row["dtype"], f"{row['prompt']:,}", *times])
        else:
            cases[row["preset"], row["dtype"]].append(f"{1e3 * row['seconds']:.2f}" if row["seconds"] else "out of memory")
    timed = [(streams, position) for streams, positions in POSITIONS.items() for position in positions]
    columns = [f"{streams} stream{'s' if streams > 1 else ''} at {position:,}" for streams, position in timed]
    lines = [[f"`{name}`", dtype, *times] for (name, dtype), times in cases.items()]
    return "\n".join(
        [
            markdown_table(["ms for a step", "precision", *columns], lines),
            markdown_table(["model", "precision", "tokens of the prompt", "first token, s", "forward pass, s"], prompts),
        ]
    )


if __name__ == "__main__":
    main()
