"""The product of a few rows with a matrix.

One row takes as long as reading the matrix, which matrix libraries do at a third of the speed of memory, or at half of it. They
are made for many rows.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.native import NATIVE_DTYPES, native_functions
from lineartime.ops.operator import is_plain

SOURCE = Path(__file__).with_name("dense.cpp")
MOST_ROWS = 32
"""The most rows for which the function in C++ is as fast as matrix libraries are, or faster."""


def dense(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, [..., K] with a weight [N, K] and a bias [N] -> [..., N]: on a processor, for a few rows, in C++."""
    if torch.compiler.is_compiling():  # which would make the number of rows a condition of what it compiles
        return F.linear(x, weight, bias)
    width = x.shape[-1]
    few = 0 < x.numel() <= MOST_ROWS * width and x.device.type == "cpu" and x.dtype in NATIVE_DTYPES
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
