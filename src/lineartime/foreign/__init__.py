"""Weights of other packages: models of GAU-alpha and FLASH-pytorch, layers of several, and those that only they need."""

from importlib import import_module
from typing import Any

_HOMES = {
    "ForeignFLASH": "mixers",
    "ForeignGAU": "mixers",
    "MossFormerFLASH": "mossformer",
    "MossFormerStack": "mossformer",
    "PoseGAU": "rtmpose",
    "PoseScaleNorm": "rtmpose",
    "convert": "conversion",
    "from_flash_pytorch": "flash_pytorch",
    "from_flash_quad": "flash_pytorch",
    "from_gau_alpha": "gau_alpha",
    "from_mossformer": "mossformer",
    "from_rtmpose": "rtmpose",
    "is_foreign": "conversion",
    "read_weights": "weights",
    "replace_mossformer": "mossformer",
    "sine_encoding": "rtmpose",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:  # at first use: models have the layers of `mixers`, and converters have models
    if name in _HOMES:
        return getattr(import_module(f"lineartime.foreign.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
