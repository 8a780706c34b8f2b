"""What the functions in C++ bring in training, beside other systems: `python benchmarks/native.py` (5 minutes, one core).

A step is forward and backward, with the sizes of `lineartime reproduce --scale cpu`: 4,096 tokens, a vocabulary of 4,096, one
thread. All systems of a context are measured in turn, and the medians of the rounds count.
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from measure import save

import lineartime
from lineartime.host import freed_memory_kept
from lineartime.machine import autocast, choose_precision, using_threads
from lineartime.markdown import markdown_table
from lineartime.models.language_model import LanguageModel
from lineartime.native import SWITCH, native_functions

TOKENS = VOCABULARY = 4096
WITHOUT = "flash, without C++"
SYSTEMS = ("flash", WITHOUT, "flash-quad", "transformer++", "mc-tfm++", "combiner", "performer-chunked")


@contextmanager
def native(on: bool) -> Iterator[None]:
    """Use functions in C++ or not, in this process."""
    os.environ[SWITCH] = "1" if on else "0"
    native_functions.cache_clear()
    try:
        yield
    finally:
        os.environ.pop(SWITCH)


def step_seconds(model: LanguageModel, context: int, precision: str) -> float:
    """The seconds of a forward and a backward pass."""
    ids = torch.randint(0, VOCABULARY, (TOKENS // context, context + 1))
    start = time.perf_counter()
    with autocast(torch.device("cpu"), precision == "bf16"):
        loss = model.loss(ids[:, :-1], ids[:, 1:])
    loss.backward()
    model.zero_grad()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default=choose_precision("auto", torch.device("cpu")))
    options = parser.parse_args()
    torch.manual_seed(0)
    models = {name: lineartime.build(f"{name.split(',')[0]}-tiny", vocab_size=VOCABULARY) for name in SYSTEMS}
    rows: list[dict[str, object]] = []
    lines = {name: [name] for name in SYSTEMS}
    with using_threads(1), freed_memory_kept():
        for context in options.contexts:
            seconds: dict[str, list[float]] = {name: [] for name in SYSTEMS}
            for number in range(options.rounds + 1):
                for name, model in models.items():
                    with native(name != WITHOUT):
                        measured = step_seconds(model, context, options.precision)
                    if number:  # the first one builds functions and caches
                        seconds[name].append(measured)
            for name, all_rounds in seconds.items():
                median = statistics.median(all_rounds)
                rows.append({"system": name, "context": context, "precision": options.precision, "seconds": all_rounds})
                lines[name].append(f"{1e6 * median / TOKENS:.0f}")
        header = [f"µs per token, {options.precision}", *(f"{context:,}" for context in options.contexts)]
        table = markdown_table(header, list(lines.values()))
        save(f"native-{options.precision}", rows, table)  # here, where a thread is what the machine has


if __name__ == "__main__":
    main()
