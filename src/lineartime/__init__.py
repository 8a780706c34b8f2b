"""Transformer quality in linear time: GAU, FLASH-Quad and FLASH for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lineartime.checkpoint import load
    from lineartime.layers import FLASH, GAU
    from lineartime.models import build, presets

__all__ = ["FLASH", "GAU", "build", "load", "presets"]

_HOMES = {
    "FLASH": "lineartime.layers",
    "GAU": "lineartime.layers",
    "build": "lineartime.models",
    "presets": "lineartime.models",
    "load": "lineartime.checkpoint",
}
_ROOMS = ("baselines", "bench", "data", "evaluation", "generation", "layers", "models", "ops", "training")


def __getattr__(name: str) -> Any:
    # Imported when first used: reading checkpoints takes more packages than torch, which layers and models do without; and
    # the command line has to be able to handle an interrupt while torch is being imported.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _ROOMS:
        return import_module(f"lineartime.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_ROOMS]
