"""Transformer quality in linear time: GAU, FLASH-Quad and FLASH for PyTorch."""

from typing import TYPE_CHECKING, Any

from lineartime.layers import FLASH, GAU
from lineartime.models import build, presets

if TYPE_CHECKING:
    from lineartime.training.checkpoint import load

__all__ = ["FLASH", "GAU", "build", "load", "presets"]


def __getattr__(name: str) -> Any:
    # Reading checkpoints takes more packages than torch, which layers and models do without.
    if name == "load":
        from lineartime.training.checkpoint import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
