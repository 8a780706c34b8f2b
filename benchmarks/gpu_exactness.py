"""How exact kernels are, beside plain PyTorch in the same dtype: a part of `benchmarks/gpu.py`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Comparison(NamedTuple):
    """Errors of values and gradients against float64, the largest relative to the largest number.

    Attributes:
        kernels, pytorch: the largest error of each.
        worst_ratio: the largest error of the kernels over that of PyTorch, of any result.
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


def compared(dtype: torch.dtype, inputs: list[Tensor], bias: Tensor, op: Callable[..., Tensor]) -> Comparison:
    """Compare `op(*inputs, bias=bias, backend=...)` and its gradients in a dtype."""

    def run(backend: str, number: torch.dtype) -> list[Tensor]:
        *own, own_bias = (x.to(dtype).to(number).requires_grad_() for x in (*inputs, bias))
        out = op(*own, bias=own_bias, backend=backend)
        upstream = (torch.arange(out.numel(), device=out.device) * 7 % 17 - 8).view_as(out)  # exact in every dtype
        gradients = torch.autograd.grad(out, [*own, own_bias], upstream.to(out.dtype))
        return [x.detach().double() for x in (out, *gradients)]

    exact = run("torch", torch.float64)
    kernels, again, plain = run("triton", dtype), run("triton", dtype), run("torch", dtype)
    errors = [
        [float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in zip(result, exact, strict=True)]
        for result in (kernels, plain)
    ]
    # Kernels may round where PyTorch happens to be exact: the result, and the last two bits of sums in float32.
    smallest = max(torch.finfo(dtype).eps / 8, 4 * torch.finfo(torch.float32).eps)
    worst = max(a / max(b, smallest) for a, b in zip(*errors, strict=True))
    same_bits = all(torch.equal(a, b) for a, b in zip(kernels, again, strict=True))
    return Comparison(max(errors[0]), max(errors[1]), worst, same_bits)
