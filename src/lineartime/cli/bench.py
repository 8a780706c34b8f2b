"""`lineartime bench`: measure what models cost."""

from dataclasses import dataclass

import tyro

from lineartime.bench.config import BenchConfig


@dataclass(frozen=True)
class Options(BenchConfig):
    """Measure what models cost: time, tokens/s, memory and hardware utilisation; writes JSON, a table and plots to --out."""

    presets: tyro.conf.Positional[tuple[str, ...]] = BenchConfig.presets

    def __post_init__(self) -> None:
        """Leave the checks to `BenchConfig`: tyro would show its errors as those of the parser."""


def run(options: Options) -> None:
    """Measure, print the results and write them."""
    from lineartime.bench.command import run_benchmark

    run_benchmark(BenchConfig(**vars(options)))
