"""The kernels compile for GPUs that are not here: what `benchmarks/kernels.py` says of them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "kernels.py"


def compiled(out: Path, *arguments: str) -> list[dict[str, Any]]:
    """The rows of a run in a process of its own, in which kernels are not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), *arguments, "--out", str(out)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    rows: list[dict[str, Any]] = json.loads((out / "kernels.json").read_text())["rows"]
    return rows


SPILLED = {"bf16": 160, "fp32": 400}
"""Bytes of registers that may go to memory: few beside a tile."""
ROTARY = "flash-quad bf16, rotary bias"  # needs most of all in benchmarks/results
GPUS = {  # compute capability: bytes of shared memory, the instructions that multiply, cases
    90: (227 * 1024, "wgmma", (ROTARY, "flash-quad fp32, rotary bias", "loss bf16")),
    80: (163 * 1024, "mma.sync", (ROTARY, "loss bf16")),
    89: (99 * 1024, "mma.sync", (ROTARY,)),
}


@pytest.mark.nightly
@pytest.mark.parametrize("gpu", GPUS)
def test_every_kernel_fits_and_keeps_its_numbers_in_registers(gpu: int, tmp_path: Path) -> None:
    shared, products, cases = GPUS[gpu]
    rows = compiled(tmp_path, *cases, "--gpus", str(gpu))
    assert {row["kernel"] for row in rows} >= {"attention_weights", "score_gradient"}
    assert {row["case"] for row in rows} == set(cases)
    launches = [(row["case"], row["kernel"], row["variant"]) for row in rows]
    assert len(set(launches)) == len(launches)
    for row in rows:
        assert not row["error"], row
        assert row["shared"] <= shared, row
        assert row["spilled"] <= SPILLED[row["case"].split()[1].rstrip(",")], row
        assert row["kernel"] == "cross_entropy" or products in row["products"], f"the tensor cores are not used: {row}"
