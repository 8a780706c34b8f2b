"""Sequences split over processes: what each of them computes is in `context_parallel_process.py`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, ["only_states_cross", "what_cannot_be_split_is_refused"]),
        (3, ["split_is_whole"]),
        pytest.param(2, ["compiled_is_whole"], marks=pytest.mark.nightly),
    ],
)
def test_sequence_that_is_split_over_processes_is_the_whole(
    size: int, cases: list[str], fork: Callable[[str], Any], tmp_path: Path
) -> None:
    code = "import sys; sys.path.insert(0, {!r}); from context_parallel_process import run; run({}, {}, {!r}, {!r})"
    processes = [fork(code.format(str(HERE), rank, size, str(tmp_path / "store"), cases)) for rank in range(size)]
    codes = [process.wait() for process in processes]
    assert codes == [0] * size, "\n".join(process.output for process in processes)
