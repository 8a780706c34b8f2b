"""Shared parts of the Triton kernels: number formats, sizes of blocks, and how a tile is read, written and activated.

A kernel sees row-major matrices [n_rows, n_columns] and works on tiles of them. What lies beyond the edges of a matrix reads as
zero and is never written, so sizes need not be multiples of anything.

    relu2:    f(x) = max(x, 0)^2                                   f'(x) = 2 max(x, 0)
    laplace:  f(x) = (1 + erf(sqrt(2 pi) (x - sqrt(1/2)))) / 2     f'(x) = sqrt(2) exp(-2 pi (x - sqrt(1/2))^2)
"""

# Triton may be absent, has no types, and writes the constants of a kernel in capitals.
# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"
# ruff: noqa: N803

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run as Python on the CPU: set by the environment variable TRITON_INTERPRET when they are imported."""

jit: Callable[[Callable[..., Any]], Any] = triton.jit
"""`triton.jit`, with a type."""


def number_formats(dtype: torch.dtype) -> dict[str, Any]:
    """The constants that tell a kernel how to multiply tiles of `dtype`: COMPUTE, the operands', ACC, the sums', PRECISION.

    float32 is multiplied as three products of tf32 where PyTorch is told to be exact: as exact as a sum in float32 and, unlike
    exact products, made for the tensor cores. float16 is widened to float32, because a squared score overflows it.
    """
    if dtype == torch.bfloat16:
        return {"COMPUTE": tl.bfloat16, "ACC": tl.float32, "PRECISION": "ieee"}
    if dtype == torch.float64:
        return {"COMPUTE": tl.float64, "ACC": tl.float64, "PRECISION": "ieee"}
    # torch.get_float32_matmul_precision may raise where a program has set the newer option.
    exact = torch.backends.cuda.matmul.fp32_precision != "tf32"
    return {"COMPUTE": tl.float32, "ACC": tl.float32, "PRECISION": "tf32x3" if exact else "tf32"}


def width_block(width: int, dtype: torch.dtype) -> int:
    """The columns of queries and keys that a kernel holds at a time: all of them, as far as shared memory has room."""
    padded: int = triton.next_power_of_2(max(width, 16))
    if INTERPRETED:
        return min(padded, 32)
    if dtype != torch.bfloat16:
        return min(padded, 64)
    return padded if padded <= 256 else 128


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context in which kernels are launched on the device of the tensor."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def launch_sizes(
    blocks: tuple[str, ...], rows: Sequence[tuple[int, ...]], dtype: torch.dtype, pairs: tuple[int, int],
    unfit: Callable[[dict[str, int], bool], bool],
) -> dict[str, int]:  # fmt: skip
    """The sizes of blocks, the warps and the stages of a launch: those of the first row that fits, and the last if none does.

    They depend on the kind of GPU alone, not on timings: the same inputs give the same bits on all GPUs of a kind.

    Args:
        blocks: the names of the blocks.
        rows: their sizes, the warps and the stages, the preferred ones first.
        dtype: that of the inputs.
        pairs: how many queries and keys the launch computes.
        unfit: whether sizes need too many registers or too much shared memory, where tensor cores read what they multiply from
            registers, if the second argument says so, or from shared memory, which leaves more registers for sums.
    """
    if INTERPRETED:
        return dict.fromkeys(blocks, 32)
    target = triton.runtime.driver.active.get_current_target()
    in_registers = target.backend == "cuda" and target.arch // 10 not in (9, 10)
    largest = 64 if dtype != torch.bfloat16 or min(pairs) <= 64 else 128
    found: dict[str, int] = {}
    for *sizes, warps, stages in rows:
        found = {**dict(zip(blocks, sizes, strict=True)), "num_warps": warps, "num_stages": stages}
        if max(sizes) <= largest and not unfit(found, in_registers):
            break
    return found


_LAPLACE_MEAN = tl.constexpr(math.sqrt(1 / 2))
_LAPLACE_STEEPNESS = tl.constexpr(math.sqrt(2 * math.pi))
_LAPLACE_PEAK = tl.constexpr(math.sqrt(2))


@jit
def load_tile(matrix, rows, columns, n_rows, n_columns, DTYPE: tl.constexpr):
    """matrix[rows, columns], zero beyond the edges."""
    # In 64 bits, because a long sequence of wide values has more than 2^31 elements.
    offsets = rows.to(tl.int64)[:, None] * n_columns + columns[None, :]
    inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    return tl.load(matrix + offsets, mask=inside, other=0.0).to(DTYPE)


@jit
def store_tile(matrix, tile, rows, columns, n_rows, n_columns):
    """matrix[rows, columns] = tile, within the edges."""
    offsets = rows.to(tl.int64)[:, None] * n_columns + columns[None, :]
    inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    tl.store(matrix + offsets, tile.to(matrix.dtype.element_ty), mask=inside)


@jit
def add_product(total, a, b, PRECISION: tl.constexpr):
    """Total + a b."""
    # Triton 3.6 takes float32 for the dtype of every sum, unless told.
    return tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)


@jit
def relu(x):
    """max(x, 0); NaN stays NaN."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@jit
def activate(scores, ACTIVATION: tl.constexpr):
    """f(scores)."""
    if ACTIVATION == "relu2":
        positive = relu(scores)
        weights = positive * positive
    else:
        weights = 0.5 * (1.0 + tl.erf((scores - _LAPLACE_MEAN) * _LAPLACE_STEEPNESS))
    return weights


@jit
def activation_slope(scores, ACTIVATION: tl.constexpr):
    """f'(scores)."""
    if ACTIVATION == "relu2":
        slopes = 2.0 * relu(scores)
    else:
        distance = (scores - _LAPLACE_MEAN) * _LAPLACE_STEEPNESS
        slopes = _LAPLACE_PEAK * tl.exp(-distance * distance)
    return slopes
