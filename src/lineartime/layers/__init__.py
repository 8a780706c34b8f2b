"""Layers to drop into any network: [B, T, d] -> [B, T, d], with norm and residual inside."""

from lineartime.layers.attention import Attention
from lineartime.layers.contract import check_mixer
from lineartime.layers.cross import CrossGAU
from lineartime.layers.feedforward import GLU, MLP
from lineartime.layers.flash import FLASH, GAU, set_backend
from lineartime.layers.mesa import FLASHMesa
from lineartime.layers.mixer import Mixer
from lineartime.layers.positions import LearnedPositions, RotaryBias, ScaledSin, TableBias
from lineartime.layers.residual import RMSNorm, ScaleNorm

__all__ = [
    "FLASH",
    "GAU",
    "GLU",
    "MLP",
    "Attention",
    "CrossGAU",
    "FLASHMesa",
    "LearnedPositions",
    "Mixer",
    "RMSNorm",
    "RotaryBias",
    "ScaleNorm",
    "ScaledSin",
    "TableBias",
    "check_mixer",
    "set_backend",
]
