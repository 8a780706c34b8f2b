"""`lineartime bench`: measure what models cost."""

from lineartime.bench.config import BenchConfig as BenchOptions


def run(options: BenchOptions) -> None:
    """Measure, print the results and write them."""
    from lineartime.bench.command import run_benchmark

    run_benchmark(options)
