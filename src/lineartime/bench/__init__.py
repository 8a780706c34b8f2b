"""What models cost in time and memory: `lineartime bench`."""

from lineartime.bench.command import run_benchmark
from lineartime.bench.config import BenchConfig

__all__ = ["BenchConfig", "run_benchmark"]
