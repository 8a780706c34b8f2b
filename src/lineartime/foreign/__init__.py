"""Checkpoints of other packages, from GAU-alpha and FLASH-pytorch, and the layers that only they need."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lineartime.foreign.conversion import convert, is_foreign
    from lineartime.foreign.flash_pytorch import from_flash_pytorch
    from lineartime.foreign.gau_alpha import from_gau_alpha
    from lineartime.foreign.mixers import ForeignFLASH, ForeignGAU
    from lineartime.foreign.weights import read_weights

_MODULE_OF = {
    "ForeignFLASH": "mixers",
    "ForeignGAU": "mixers",
    "convert": "conversion",
    "from_flash_pytorch": "flash_pytorch",
    "from_gau_alpha": "gau_alpha",
    "is_foreign": "conversion",
    "read_weights": "weights",
}
__all__ = [
    "ForeignFLASH",
    "ForeignGAU",
    "convert",
    "from_flash_pytorch",
    "from_gau_alpha",
    "is_foreign",
    "read_weights",
]


def __getattr__(name: str) -> Any:
    # Imported at first use: models have the layers of `mixers`, and converters have models. A module with the name of a
    # function would take its place.
    if name in _MODULE_OF:
        return getattr(import_module(f"lineartime.foreign.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
