"""Weights of other packages: models of GAU-alpha and FLASH-pytorch, layers of several, and those that only they need."""

from importlib import import_module
from typing import Any

_NAMES = {
    "conversion": ("convert", "is_foreign"),
    "flash_pytorch": ("from_flash_pytorch", "from_flash_quad"),
    "gau_alpha": ("from_gau_alpha",),
    "mixers": ("ForeignFLASH", "ForeignGAU"),
    "mossformer": ("MossFormerFLASH", "MossFormerStack", "from_mossformer", "replace_mossformer"),
    "rtmpose": ("PoseGAU", "PoseScaleNorm", "from_rtmpose", "sine_encoding"),
    "weights": ("read_weights",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:  # at first use: models have the layers of `mixers`, and converters have models
    if name in _HOMES:
        return getattr(import_module(f"lineartime.foreign.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
