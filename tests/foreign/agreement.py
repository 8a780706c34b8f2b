"""Modules of FLASH-pytorch, and the comparison of two functions."""

from collections.abc import Callable
from typing import Any

import torch
from tests.peers.packages import peer, randomized
from torch import Tensor


def theirs(name: str, **arguments: Any) -> Any:
    """`theirs("FLASH", dim=16)`: that class of FLASH-pytorch with random weights; skips if the package is not installed."""
    return randomized(getattr(peer("flash_pytorch.flash_pytorch"), name)(**arguments)).float()


def assert_agree(
    ours: Callable[[Tensor], Tensor],
    other: Callable[[Tensor], Tensor],
    x: Tensor,
    real: Tensor | None = None,
    tolerance: float = 1e-5,
) -> None:
    """Assert that two functions have equal values and gradients at real tokens."""
    found = []
    direction: Tensor | None = None
    for function in (ours, other):
        given = x.detach().clone().requires_grad_()
        out = function(given)
        out = out if real is None else out[real]
        direction = torch.randn_like(out) if direction is None else direction
        (gradient,) = torch.autograd.grad((out * direction).sum(), given)
        found.append((out.detach(), gradient if real is None else gradient[real]))
    for one, two in zip(*found, strict=True):
        size = max(1.0, float(two.abs().max()))
        torch.testing.assert_close(one, two, atol=tolerance * size, rtol=0)
