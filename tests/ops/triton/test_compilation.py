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
    command = [sys.executable, str(SCRIPT), *arguments, "--preferred", "--out", str(out)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    rows: list[dict[str, Any]] = json.loads((out / "kernels.json").read_text())["rows"]
    return rows


WITH_PRODUCTS = {"attention_weights", "score_gradient"}
SPILLED = {"bf16": 160, "fp32": 400}
"""Bytes of registers that may go to memory: few beside a tile."""


@pytest.mark.nightly
def test_every_kernel_fits_a_gpu_in_its_preferred_configuration_and_keeps_its_numbers_in_registers(tmp_path: Path) -> None:
    cases = ("flash-quad bf16, rotary bias", "flash-quad fp32, rotary bias", "loss bf16")
    rows = compiled(tmp_path, *cases, "--gpus", "90")
    assert {row["kernel"] for row in rows} == {*WITH_PRODUCTS, "cross_entropy"}
    assert {row["case"] for row in rows} == set(cases)
    launches = [(row["case"], row["kernel"], row["variant"]) for row in rows]
    assert len(set(launches)) == len(launches), "a pinned kernel is tuned"
    for row in rows:
        assert not row["error"], row
        assert row["shared"] <= 227 * 1024, row
        assert row["spilled"] <= SPILLED[row["case"].split()[1].rstrip(",")], row
        if row["kernel"] in WITH_PRODUCTS:
            assert "wgmma" in row["products"], f"the tensor cores of compute capability 9.0 are not used: {row}"


@pytest.mark.nightly
def test_an_older_gpu_has_room_and_registers_for_the_preferred_configurations(tmp_path: Path) -> None:
    rows = compiled(tmp_path, "flash-quad bf16, rotary bias", "loss bf16", "--gpus", "80")
    assert len(rows) >= 3
    for row in rows:
        assert not row["error"], row
        assert row["shared"] <= 163 * 1024, row
        assert row["spilled"] <= 128, row
        assert row["kernel"] not in WITH_PRODUCTS or "mma.sync" in row["products"], row


@pytest.mark.nightly
def test_a_gpu_with_little_shared_memory_has_room_for_the_preferred_configurations(tmp_path: Path) -> None:
    rows = compiled(tmp_path, "flash-quad bf16, rotary bias", "--gpus", "89")  # needs most of all in benchmarks/results
    assert {"attention_weights", "score_gradient"} <= {row["kernel"] for row in rows}
    for row in rows:
        assert not row["error"], row
        assert row["shared"] <= 99 * 1024, row
