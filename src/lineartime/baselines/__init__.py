"""The systems that GAU and FLASH are compared with, and the variants of both: one mechanism, one file."""

from lineartime.baselines.combiner import Combiner
from lineartime.baselines.efficient import EfficientAttention
from lineartime.baselines.flash_first_to_all import CLSFLASH, FirstToAllFLASH
from lineartime.baselines.flash_global import GlobalFLASH
from lineartime.baselines.flash_local import LocalFLASH
from lineartime.baselines.flash_overlapping import OverlappingFLASH
from lineartime.baselines.flash_weighted import WeightedFLASH
from lineartime.baselines.gau_multi_head import MultiHeadGAU
from lineartime.baselines.gau_ungated import UngatedGAU
from lineartime.baselines.linear_elu import LinearELU
from lineartime.baselines.linear_taylor import LinearTaylor
from lineartime.baselines.linformer import Linformer
from lineartime.baselines.mc_tfm import MixedChunkHeads
from lineartime.baselines.mhsa_gated import GatedAttention
from lineartime.baselines.mhsa_relu2 import Relu2Attention
from lineartime.baselines.performer import Performer, PerformerMatmul
from lineartime.baselines.reformer import Reformer
from lineartime.baselines.sparse import SparseAttention

__all__ = [
    "CLSFLASH",
    "Combiner",
    "EfficientAttention",
    "FirstToAllFLASH",
    "GatedAttention",
    "GlobalFLASH",
    "LinearELU",
    "LinearTaylor",
    "Linformer",
    "LocalFLASH",
    "MixedChunkHeads",
    "MultiHeadGAU",
    "OverlappingFLASH",
    "Performer",
    "PerformerMatmul",
    "Reformer",
    "Relu2Attention",
    "SparseAttention",
    "UngatedGAU",
    "WeightedFLASH",
]
