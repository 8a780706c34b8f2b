"""`lineartime bench`: measure what models cost."""

from dataclasses import dataclass

import tyro

from lineartime.bench.config import BenchConfig


@dataclass(frozen=True)
class BenchOptions(BenchConfig):
    """The options of `lineartime bench`."""

    presets: tyro.conf.Positional[tuple[str, ...]] = BenchConfig.presets

    def __post_init__(self) -> None:
        """Leave the checks to `BenchConfig`: tyro would show its errors as those of the parser."""


def run(options: BenchOptions) -> None:
    """Measure, print the results and write them."""
    from lineartime.bench.command import run_benchmark

    run_benchmark(BenchConfig(**vars(options)))
