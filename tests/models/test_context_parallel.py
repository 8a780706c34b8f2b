"""Sequences split over processes: what each of them computes is in `context_parallel_process.py`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROCESS = Path(__file__).with_name("context_parallel_process.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, ["split_is_whole", "recomputation_repeats_the_exchange", "only_states_cross", "what_cannot_be_split_is_refused"]),
        (4, ["split_is_whole"]),
        (2, ["compiled_is_whole"]),
    ],
)
def test_a_sequence_that_is_split_over_processes_is_the_whole(
    size: int, cases: list[str], fork: Callable[[str], Any], tmp_path: Path
) -> None:
    code = "import runpy; runpy.run_path({!r})['run']({}, {}, {!r}, {!r})"
    processes = [fork(code.format(str(PROCESS), rank, size, str(tmp_path / "store"), cases)) for rank in range(size)]
    for process in processes:
        assert process.wait() == 0, process.output
