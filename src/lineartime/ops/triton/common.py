"""Shared parts of the Triton kernels: number formats, memory, tuning, and how a tile is read, written and activated.

A kernel sees row-major matrices [n_rows, n_columns] and works on tiles of them. What lies beyond the edges of a matrix reads as
zero and is never written, so sizes need not be multiples of anything.

    relu2:    f(x) = max(x, 0)^2                                   f'(x) = 2 max(x, 0)
    laplace:  f(x) = (1 + erf(sqrt(2 pi) (x - sqrt(1/2)))) / 2     f'(x) = sqrt(2) exp(-2 pi (x - sqrt(1/2))^2)
"""

# Triton may be absent, has no types, and writes the constants of a kernel in capitals.
# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"
# ruff: noqa: N803

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lineartime.ops.backends import GPU_LOCK

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


def length_bucket(length: int) -> int:
    """A length as the autotuner sees it: within a bucket, the same blocks are best."""
    return next((size for size in (64, 256, 1024) if length <= size), 8192)


def token_bucket(tokens: int) -> int:
    """The number of all tokens as the autotuner sees it: few programs want smaller blocks than many."""
    return next((size for size in (4096, 32768) if tokens <= size), 262144)


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context in which kernels are launched on the device of the tensor."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


TUNERS: list[Any] = []
"""The autotuners of all kernels, with what each has chosen; none in the interpreter."""
_pinned = False


def pin_configurations(pinned: bool = True) -> None:
    """Use the preferred configuration of every kernel, or tune every kernel again.

    Tuning can end differently on another machine, or at another time, and other blocks add up in another order. Pinned, the
    same inputs give the same bits on all GPUs of a kind, and the first step does not wait for timings.
    """
    global _pinned
    _pinned = pinned
    for tuner in TUNERS:
        tuner.cache_of_device.clear()
        tuner.cache = {}


def configurations(blocks: tuple[str, ...], *rows: tuple[int, ...]) -> list[Any]:
    """Configurations for `tuned`, the preferred one first; a row has the sizes of the blocks, the warps and the stages."""
    return [
        triton.Config(dict(zip(blocks, sizes, strict=True)), num_warps=warps, num_stages=stages)
        for *sizes, warps, stages in rows
    ]


def tuned(
    configs: list[Any],
    key: list[str],
    interpreted: dict[str, int],
    unfit: Callable[[dict[str, Any]], bool] = lambda _arguments: False,
) -> Callable[[Any], Any]:
    """`triton.autotune` over the configurations that fit, the preferred one first, which remembers its choice on disk.

    Args:
        configs: blocks, warps and stages to try.
        key: the arguments by which the best configuration may differ.
        interpreted: the blocks in the interpreter, where there is no choice.
        unfit: whether a configuration needs too many registers or too much shared memory, given all arguments of the kernel,
            IN_REGISTERS: whether tensor cores read what they multiply from registers, not from shared memory, which leaves
            fewer for sums.
    """
    if INTERPRETED:
        return triton.autotune([triton.Config(interpreted)], key)  # type: ignore[no-any-return]  # Triton has no types

    def fitting(configs: list[Any], arguments: dict[str, Any], **constants: Any) -> list[Any]:
        largest = 256 if constants["COMPUTE"] == tl.bfloat16 else 64
        longest = arguments.get("bucket", largest)
        lengths = ("BLOCK_M", "BLOCK_N")
        target = triton.runtime.driver.active.get_current_target()
        in_registers = target.backend == "cuda" and target.arch // 10 not in (9, 10)
        known = {**arguments, **constants, "IN_REGISTERS": in_registers}
        fit = [
            config
            for config in configs
            if all(size <= min(largest, longest if name in lengths else largest) for name, size in config.kwargs.items())
            and not unfit({**known, **config.kwargs})
        ]
        return fit[:1] if _pinned else fit

    def tune(kernel: Any) -> Any:
        prune = {"early_config_prune": fitting} if len(configs) > 1 else None
        tuner = triton.autotune(configs, key, prune_configs_by=prune, do_bench=_timed, cache_results=True)(kernel)
        _guard(tuner)
        TUNERS.append(tuner)
        return tuner

    return tune


def _guard(tuner: Any) -> None:
    """Let one thread at a time launch a tuned kernel, with the choices for its GPU.

    Triton keeps the arguments of a call in the tuner, so that two threads mix them up while a kernel is tuned
    (triton-lang/triton#11494), and it keeps its choices by arguments, not by GPU.
    """
    tuner.cache_of_device = {}

    def run_alone(*arguments: Any, **options: Any) -> Any:
        with GPU_LOCK:
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
            tuner.cache = tuner.cache_of_device.setdefault(device, {})
            return type(tuner).run(tuner, *arguments, **options)

    tuner.run = run_alone


def _timed(launch: Callable[[], None], quantiles: tuple[float, ...]) -> list[float]:
    """Time a launch for the autotuner. Pinned kernels are not timed: Triton 3.6 asks even for a single configuration."""
    if _pinned:
        return [0.0] * len(quantiles)
    times: list[float] = triton.runtime.driver.active.get_benchmarker()(launch, quantiles=quantiles)
    return times


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
