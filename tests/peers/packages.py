"""Our systems against packages that others published: the same weights and inputs must give the same outputs.

Every file compares with one or two packages. Its first docstring names how they differ from ours and why; what differs is
switched off or made equal, so that the rest can be compared to rounding. Beside these, FLASH-pytorch is compared with in
tests/foreign.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

# The packages that are compared with, by the names they are imported by.
PACKAGES = {
    "fla": "flash-linear-attention",
    "flash_pytorch": "FLASH-pytorch",
    "linformer": "linformer",
    "local_attention": "local-attention",
    "performer_pytorch": "performer-pytorch",
    "reformer_pytorch": "reformer-pytorch",
    "transformers": "transformers",
    "x_transformers": "x-transformers",
}


def peer(name: str) -> Any:
    """`peer("linformer.linformer")`: that module, imported only here, for some take seconds; skips if it is not installed."""
    package = name.partition(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"{PACKAGES[package]} is not installed: pip install --constraint constraints.txt '.[peers,others]'")
    return import_module(name)


def randomized(module: nn.Module) -> Any:
    """The module in float64, with noise on all parameters, so that no bias is 0 and no scale 1."""
    module = module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:  # but not the frequencies of rotary positions
                parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def interleaved(weights: Tensor, n_heads: int = 1) -> Tensor:
    """Weights [H h, ...] for code that rotates neighbouring features instead of halves."""
    pairs: Tensor = weights.unflatten(0, (n_heads, 2, -1)).transpose(1, 2)
    return pairs.flatten(0, 2)
