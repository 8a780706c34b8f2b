"""The interpreter that the kernels are tested in computes what a GPU does."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
interpreter = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "interpreter.py")))


def test_products_of_exact_float32_keep_22_bits_of_each_factor() -> None:
    numbers = torch.randn(4096).numpy()
    first, rest = interpreter._split(interpreter.interpreter.TensorHandle(numbers, interpreter.tl.float32))
    for part in (first, rest):
        assert not (part.data.view(np.uint32) & 0x1FFF).any(), "tensor cores read no more than the first 10 bits of a fraction"
    left = numbers.astype(np.float64) - first.data - rest.data
    assert (np.abs(left) <= 2.0**-22 * np.abs(numbers)).all()
