"""Our systems against packages that others published: the same weights and inputs must give the same outputs.

Every file compares with one or two packages. Its first docstring names how they differ from ours and why; what differs is
switched off or made equal, so that the rest can be compared to rounding.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

# The packages that are compared with, by the names they are imported by.
PACKAGES = {
    "flash_pytorch": "FLASH-pytorch",
    "linformer": "linformer",
    "local_attention": "local-attention",
    "performer_pytorch": "performer-pytorch",
    "reformer_pytorch": "reformer-pytorch",
    "transformers": "transformers",
    "x_transformers": "x-transformers",
}


@pytest.fixture
def packages() -> list[str]:
    """The packages that are compared with, by the names they are installed by."""
    return list(PACKAGES.values())


@pytest.fixture
def peer() -> Callable[[str], Any]:
    """`peer("linformer.linformer")`: that module, imported only here, for some take seconds; skips if it is not installed."""

    def module(name: str) -> Any:
        package = name.partition(".")[0]
        if find_spec(package) is None:
            pytest.skip(f"{PACKAGES[package]} is not installed: pip install --constraint constraints.txt '.[peers,others]'")
        return import_module(name)

    return module


@pytest.fixture
def randomized() -> Callable[[nn.Module], Any]:
    """`randomized(module)`: the module in float64, with noise on all parameters, so that no bias is 0 and no scale 1."""

    def randomize(module: nn.Module) -> nn.Module:
        module = module.double().eval()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        return module

    return randomize


@pytest.fixture
def interleaved() -> Callable[..., Tensor]:
    """`interleaved(weights, n_heads)`: weights [H h, ...] for code that rotates neighbouring features instead of halves."""

    def interleave(weights: Tensor, n_heads: int = 1) -> Tensor:
        pairs: Tensor = weights.unflatten(0, (n_heads, 2, -1)).transpose(1, 2)
        return pairs.flatten(0, 2)

    return interleave
