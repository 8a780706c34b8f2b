"""The table of decoding beside other packages, and what is said of those that are absent."""

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def peers() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        return importlib.import_module("peers")


def test_table_has_medians_and_ratios_of_the_same_round(peers: Any) -> None:
    setting = {"preset": "flash-tiny", "format": "fp32", "position": 4096, "threads": 2}
    idle = {peers.OURS: [600.0, 900.0, 300.0], peers.NEOX: [100.0, 300.0, 60.0]}  # 6, 3 and 5 times as fast
    beside = {peers.OURS: [300.0, 450.0, 150.0], peers.NEOX: [10.0, 30.0, 6.0]}
    rows = [{**setting, "busy": busy, "tokens_per_second": speeds} for busy, speeds in enumerate((idle, beside))]
    lines = peers.table(rows).splitlines()
    assert lines[0].endswith("| busy | lineartime | GPT-NeoX | over GPT-NeoX | lineartime over idle | GPT-NeoX over idle |")
    assert lines[2:] == [
        "| flash-tiny | fp32 | 4,096 | 2 | 0 | 600 | 100 | 5.00 | 1.00 | 1.00 |",
        "| flash-tiny | fp32 | 4,096 | 2 | 1 | 300 | 10 | 25.00 | 0.50 | 0.10 |",
    ]


def test_a_model_that_was_not_measured_leaves_its_cells_empty(peers: Any) -> None:
    common = {"preset": "flash-base", "position": 100, "threads": 1, "busy": 0}
    rows = [{**common, "format": form, "tokens_per_second": {peers.OURS: [2.0]}} for form in peers.FORMATS]
    rows[1]["tokens_per_second"][peers.LLAMA] = [4.0]
    lines = peers.table(rows).splitlines()
    assert lines[2:] == [
        "| flash-base | fp32 | 100 | 1 | 0 | 2 | - | - | 1.00 | - |",
        "| flash-base | 16 bits | 100 | 1 | 0 | 2 | 4 | 0.50 | 1.00 | 1.00 |",
    ]
