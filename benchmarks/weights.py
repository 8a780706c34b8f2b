"""What each format of weights costs: `python benchmarks/weights.py RUN TEXT [--tokens 200000]` (some minutes).

Of a trained model of FLASH: the bits per byte of the test split of a text, read in windows of 512 tokens with the weights of
the format, and the bytes of matrices that a token reads. The speed is that of `generate` with default sampling, for the run and
for flash-base with random weights: the formats take turns. `--threads 1 --cpu-time` is for busy machines.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from measure import median_seconds, save

import lineartime
from lineartime.generation import generate
from lineartime.host import threads_in_words
from lineartime.machine import using_threads
from lineartime.models import CausalLM, build
from lineartime.units import markdown_table

FORMATS = {"fp32": 4, "bf16": 2, "int8": 1}
"""The bytes of a weight."""
TIMED = 20
"""Tokens in each measurement."""


def converted(model: CausalLM, form: str) -> CausalLM:
    """The model with the weights of a format; vectors and the state stay in fp32, but for bf16."""
    if form == "bf16":
        return model.bfloat16()
    if form == "int8":
        model.quantize()
    return model


def matrices(model: CausalLM) -> int:
    """The number of weights that a token reads: with tied weights, the embedding is the output layer."""
    return sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)


def drawing(model: CausalLM) -> Callable[[], None]:
    """A step that draws some more tokens of an endless text."""
    tokens: Iterator[int] = generate(model, list(range(100)), 10**9, lineartime.Sampling(seed=0))

    def step() -> None:
        for _ in range(TIMED):
            next(tokens)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="folder of a run")
    parser.add_argument("text", help="text, of which the test split is read")
    parser.add_argument("--tokens", type=int, default=200_000, help="the number of tokens to read")
    parser.add_argument("--rounds", type=int, default=7, help="timings of each format, of which the median is taken")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="time of the processor in place of that of the clock")
    options = parser.parse_args()
    tokenizer, clock = lineartime.load_tokenizer(options.run), time.process_time if options.cpu_time else time.perf_counter
    found: dict[str, dict[str, Any]] = {}
    steps: dict[tuple[str, str], Callable[[], None]] = {}
    for form in FORMATS:
        trained: Any = lineartime.load(options.run).eval()
        model = converted(trained, form)
        like = {"tokenizer": tokenizer, "context_length": 512, "max_tokens": options.tokens, "precision": "fp32"}
        found[form] = {"bytes": matrices(model) * FORMATS[form]}
        found[form]["bits_per_byte"] = lineartime.evaluate(model, options.text, **like).bits_per_byte
        torch.manual_seed(0)
        large: Any = build("flash-base").eval()
        steps |= {(form, "run"): drawing(model), (form, "flash-base"): drawing(converted(large, form))}
    with using_threads(options.threads):
        seconds = median_seconds(steps, options.rounds, clock)
    rows = []
    for form, of_form in found.items():
        speeds = {name: TIMED / value for name in ("run", "flash-base") if (value := seconds[form, name])}
        of_form |= {"tokens_per_second": speeds}
        more = of_form["bits_per_byte"] / found["fp32"]["bits_per_byte"] - 1
        numbers = f"{of_form['bytes'] / 1e6:.1f} MB", f"{of_form['bits_per_byte']:.4f}", f"{more:+.2%}"
        rows.append((form, *numbers, *(f"{speed:,.0f}" for speed in speeds.values())))
    header = ("format", "size", "bits per byte", "over fp32", "tokens/s", "tokens/s of flash-base")
    setting = f"{threads_in_words(options.threads)}, {'time of the processor' if options.cpu_time else 'time of the clock'}"
    save(
        "weights",
        [{"format": form, "setting": setting, **of_form} for form, of_form in found.items()],
        markdown_table(header, rows),
    )


if __name__ == "__main__":
    main()
