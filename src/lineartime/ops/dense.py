"""The product of a few rows with a matrix.

For one row, the time is that of reading the matrix. Matrix libraries, which are made for many rows, then reach only a third to
a half of the memory bandwidth.
"""

from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from lineartime.native import NATIVE_DTYPES, native_functions
from lineartime.ops.tracing import is_plain, is_traced

SOURCE = Path(__file__).with_name("dense.cpp")
MAX_ROWS = 32
"""The maximum number of rows for which the C++ function is at least as fast as matrix libraries."""


def dense(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: [..., K], weight [N, K], bias [N] -> [..., N]. On a CPU, a few rows are computed in C++."""
    if is_traced():  # which would specialise the recorded program to the number of rows
        return F.linear(x, weight, bias)
    width = x.shape[-1]
    few = 0 < x.numel() <= MAX_ROWS * width and x.device.type == "cpu" and x.dtype in NATIVE_DTYPES
    fits = weight.shape[1:] == (width,) and weight.dtype == x.dtype
    if bias is not None:
        fits = fits and bias.shape == weight.shape[:1] and bias.dtype == x.dtype
    if not few or not fits or not is_plain(x, weight, bias):
        return F.linear(x, weight, bias)
    functions = native_functions(SOURCE)
    if functions is None:
        return F.linear(x, weight, bias)
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    functions.call("dense", x.dtype, x, weight, bias, out, x.numel() // width, width, weight.shape[0])
    return out
