"""The kernels run on the GPU where there is one, and in Triton's interpreter, on the CPU, where there is none."""

import importlib
import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = "lineartime.ops.triton.kernels"

if find_spec("triton") is not None and DEVICE == "cpu":
    with pytest.MonkeyPatch.context() as patch:  # what the environment says when a kernel is defined chooses the interpreter
        patch.setenv("TRITON_INTERPRET", "1")
        runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "interpreter.py"))  # repairs it
        importlib.import_module(KERNELS)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton find the environment as it was when the kernels were defined; other tests need not know."""
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def allocations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of all that the kernels' functions have allocated so far, and filled with NaN: what is not written shows."""
    shapes: list[tuple[int, ...]] = []

    def poisoned(shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        shapes.append(tuple(shape))
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    for name in (KERNELS, "lineartime.ops.triton.quadratic"):
        monkeypatch.setattr(importlib.import_module(name), "workspace", poisoned)
    return shapes


@pytest.fixture
def device() -> str:
    return DEVICE
