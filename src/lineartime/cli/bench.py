"""`lineartime bench`: what models cost."""

from dataclasses import dataclass

import tyro

from lineartime.bench.config import BenchConfig


@dataclass(frozen=True)
class Options(BenchConfig):
    """Measure what models cost: time, tokens/s, memory and use of the machine; leaves JSON, a table and plots in --out."""

    presets: tyro.conf.Positional[tuple[str, ...]] = BenchConfig.presets


def run(options: Options) -> None:
    """Measure, print the results and write them."""
    from lineartime.bench.command import run_benchmark

    run_benchmark(options)
