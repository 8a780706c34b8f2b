"""How exact kernels are, beside plain PyTorch in the same dtype: a part of `benchmarks/gpu.py`."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lineartime.ops.backends import Backend

Computation = Callable[[Backend, torch.dtype], list[Tensor]]
"""Computes by a backend in a dtype, from the same numbers, and returns all results."""


class Comparison(NamedTuple):
    """Errors of results against float64.

    Attributes:
        kernels, pytorch: the largest error of each, relative to the largest number.
        worst_ratio: the error of the kernels over that of PyTorch, of any result: of the root mean squares, or half of that of
            the largest errors, whichever is larger. The largest error of a small result varies with the numbers drawn.
        same_bits: whether two calls of the kernels gave the same bits.
    """

    kernels: float
    pytorch: float
    worst_ratio: float
    same_bits: bool

    def row(self) -> dict[str, Any]:
        """What a table shows."""
        errors = {"kernels": f"{self.kernels:.1e}", "pytorch": f"{self.pytorch:.1e}"}
        return {**errors, "worst_ratio": round(self.worst_ratio, 2), "same_bits": self.same_bits}


def compared(dtype: torch.dtype, run: Computation) -> Comparison:
    """Compare the kernels with plain PyTorch in a dtype."""
    runs: list[tuple[Backend, torch.dtype]] = [("torch", torch.float64), ("triton", dtype), ("triton", dtype), ("torch", dtype)]
    exact, kernels, again, plain = ([x.detach().double() for x in run(*of)] for of in runs)
    errors = [[_errors(a, b) for a, b in zip(result, exact, strict=True)] for result in (kernels, plain)]
    # Kernels may round where PyTorch happens to be exact: the result, and the last two bits of sums in float32.
    smallest = max(torch.finfo(dtype).eps / 8, 4 * torch.finfo(torch.float32).eps)

    def ratio(ours: float, theirs: float) -> float:
        return ours / max(theirs, smallest) if math.isfinite(ours) else ours

    pairs = list(zip(*errors, strict=True))
    worst = max(max(ratio(ours.mean, theirs.mean), ratio(ours.largest, theirs.largest) / 2) for ours, theirs in pairs)
    same_bits = all(torch.equal(a, b) for a, b in zip(kernels, again, strict=True))
    kernel_error, plain_error = (max(error.largest for error in of_one) for of_one in errors)
    return Comparison(kernel_error, plain_error, worst, same_bits)


class _Errors(NamedTuple):
    """The root mean square and the largest error of a result, relative to those of the exact one."""

    mean: float
    largest: float


def _errors(found: Tensor, exact: Tensor) -> _Errors:
    """Infinite for results that are not finite: max() of Python passes over NaN."""
    off = found - exact
    sizes = exact.square().mean().sqrt().clamp(min=1e-30), exact.abs().max().clamp(min=1e-30)
    errors = off.square().mean().sqrt() / sizes[0], off.abs().max() / sizes[1]
    return _Errors(*(float(error.nan_to_num(math.inf, math.inf)) for error in errors))


def op_and_gradients(dtype: torch.dtype, inputs: Sequence[Tensor], bias: Tensor, op: Callable[..., Tensor]) -> Computation:
    """`op(*inputs, bias=bias, backend=...)` and its gradients, of inputs rounded to a dtype."""

    def run(backend: Backend, number: torch.dtype) -> list[Tensor]:
        *own, own_bias = (x.to(dtype).to(number).requires_grad_() for x in (*inputs, bias))
        out = op(*own, bias=own_bias, backend=backend)
        upstream = (torch.arange(out.numel(), device=out.device) * 7 % 17 - 8).view_as(out)  # exact in every dtype
        return [out, *torch.autograd.grad(out, [*own, own_bias], upstream.to(out.dtype))]

    return run
