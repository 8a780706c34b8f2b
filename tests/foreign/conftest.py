from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn


@pytest.fixture
def theirs() -> Callable[..., Any]:
    """`theirs("FLASH", dim=16)`: that class of FLASH-pytorch with random weights; skips if the package is not installed."""

    def build(name: str, **arguments: Any) -> Any:
        if find_spec("flash_pytorch") is None:
            pytest.skip("FLASH-pytorch is not installed: pip install --constraint constraints.txt '.[peers]'")
        built = getattr(import_module("flash_pytorch.flash_pytorch"), name)(**arguments).eval()
        return randomized(built)

    return build


def randomized(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # but not the frequencies of rotary positions
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture
def assert_agree() -> Callable[..., None]:
    """`assert_agree(ours, theirs, x, real)`: two functions have equal values and gradients at real tokens."""

    def check(
        ours: Callable[[Tensor], Tensor],
        other: Callable[[Tensor], Tensor],
        x: Tensor,
        real: Tensor | None = None,
        tolerance: float = 1e-5,
    ) -> None:
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

    return check


@pytest.fixture
def formulas() -> Any:
    """The module gau_alpha.py beside this file."""
    spec = spec_from_file_location("formulas", Path(__file__).with_name("gau_alpha.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
