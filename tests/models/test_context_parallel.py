"""Sequences split over processes: what each of them computes is in `context_parallel_process.py`."""

import subprocess
import sys
from pathlib import Path

import pytest

PROCESS = Path(__file__).with_name("context_parallel_process.py")


def run(cases: list[str], size: int, folder: Path) -> None:
    """Start the processes; fail with what the first one says that does not end well."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROCESS), str(rank), str(size), str(folder / "store"), *cases],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, ["split_is_whole", "recomputation_repeats_the_exchange", "only_states_cross", "what_cannot_be_split_is_refused"]),
        (4, ["split_is_whole"]),
        (2, ["compiled_is_whole"]),
    ],
)
def test_a_sequence_that_is_split_over_processes_is_the_whole(size: int, cases: list[str], tmp_path: Path) -> None:
    run(cases, size, tmp_path)
