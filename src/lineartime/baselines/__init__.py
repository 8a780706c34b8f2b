"""The systems that GAU and FLASH are compared with, and the variants of both: one mechanism, one file."""

from lineartime.baselines.bigbird import BigBird
from lineartime.baselines.combiner import Combiner
from lineartime.baselines.combiner_fixed import CombinerFixed
from lineartime.baselines.cosformer import CosFormer
from lineartime.baselines.deltanet import DeltaNet
from lineartime.baselines.efficient import Efficient
from lineartime.baselines.explicit_topk import ExplicitTopK
from lineartime.baselines.flash_cls import FLASHCLS
from lineartime.baselines.flash_first_to_all import FLASHFirstToAll
from lineartime.baselines.flash_global import FLASHGlobal
from lineartime.baselines.flash_local import FLASHLocal
from lineartime.baselines.flash_overlapping import FLASHOverlapping
from lineartime.baselines.flash_weighted import FLASHWeighted
from lineartime.baselines.flowformer import Flowformer
from lineartime.baselines.gated_deltanet import GatedDeltaNet
from lineartime.baselines.gau_multi_head import GAUMultiHead
from lineartime.baselines.gau_ungated import GAUUngated
from lineartime.baselines.gla import GLA
from lineartime.baselines.kernel_attention import KernelAttention
from lineartime.baselines.lact import LaCT
from lineartime.baselines.linear_elu import LinearELU
from lineartime.baselines.linear_taylor import LinearTaylor
from lineartime.baselines.linformer import Linformer
from lineartime.baselines.longformer import Longformer
from lineartime.baselines.mamba2 import Mamba2
from lineartime.baselines.mc_tfm import MCTFM
from lineartime.baselines.mhsa_gated import MHSAGated
from lineartime.baselines.mhsa_relu2 import MHSARelu2
from lineartime.baselines.mixed_chunk import MixedChunk
from lineartime.baselines.nystromformer import Nystromformer
from lineartime.baselines.performer import Performer
from lineartime.baselines.reformer import Reformer
from lineartime.baselines.retnet import RetNet
from lineartime.baselines.rwkv7 import RWKV7
from lineartime.baselines.sparse import Sparse

__all__ = [
    "FLASHCLS",
    "GLA",
    "MCTFM",
    "RWKV7",
    "BigBird",
    "Combiner",
    "CombinerFixed",
    "CosFormer",
    "DeltaNet",
    "Efficient",
    "ExplicitTopK",
    "FLASHFirstToAll",
    "FLASHGlobal",
    "FLASHLocal",
    "FLASHOverlapping",
    "FLASHWeighted",
    "Flowformer",
    "GAUMultiHead",
    "GAUUngated",
    "GatedDeltaNet",
    "KernelAttention",
    "LaCT",
    "LinearELU",
    "LinearTaylor",
    "Linformer",
    "Longformer",
    "MHSAGated",
    "MHSARelu2",
    "Mamba2",
    "MixedChunk",
    "Nystromformer",
    "Performer",
    "Reformer",
    "RetNet",
    "Sparse",
]
