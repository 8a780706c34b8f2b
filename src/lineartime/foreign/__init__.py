"""Checkpoints of other packages: GAU-alpha, and FLASH-pytorch in both directions."""

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
