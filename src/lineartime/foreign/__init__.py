"""Conversion of checkpoints of other packages: from GAU-alpha, and from and to FLASH-pytorch."""

from lineartime.foreign.convert import convert, is_foreign
from lineartime.foreign.flash_pytorch import from_flash_pytorch
from lineartime.foreign.gau_alpha import from_gau_alpha
from lineartime.foreign.to_flash_pytorch import to_flash_pytorch, write_flash_pytorch
from lineartime.foreign.weights import read_weights

__all__ = [
    "convert",
    "from_flash_pytorch",
    "from_gau_alpha",
    "is_foreign",
    "read_weights",
    "to_flash_pytorch",
    "write_flash_pytorch",
]
