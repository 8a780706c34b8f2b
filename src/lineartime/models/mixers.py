"""Every mixer that a model can be made of: a frozen dataclass for each, which builds what it describes, and the registry.

A new mixer is a class here and a line in `MIXER_KINDS`.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from lineartime.baselines import (
    CLSFLASH,
    Combiner,
    EfficientAttention,
    FirstToAllFLASH,
    GatedAttention,
    GlobalFLASH,
    LinearELU,
    LinearTaylor,
    Linformer,
    LocalFLASH,
    MixedChunkHeads,
    MultiHeadGAU,
    OverlappingFLASH,
    Performer,
    PerformerMatmul,
    Reformer,
    Relu2Attention,
    SparseAttention,
    UngatedGAU,
    WeightedFLASH,
)
from lineartime.layers import FLASH, GAU, Attention
from lineartime.layers.cross import CrossGAU
from lineartime.layers.norms import Norm
from lineartime.layers.positions import LARGEST_TABLE
from lineartime.layers.residual import Mixer
from lineartime.ops.activations import Activation, Normalization


@dataclass(frozen=True)
class MixerConfig:
    """A mixer, described by its own arguments; width, direction, norm and dropout are those of the model."""

    layer: ClassVar[type[Any]]
    """The class of the layer this describes."""

    def build(self, d_model: int, *, causal: bool, norm: Norm, dropout: float) -> Mixer:
        """The layer this describes."""
        arguments = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        mixer: Mixer = self.layer(d_model, causal=causal, norm=norm, dropout=dropout, **arguments)
        return mixer

    @property
    def longest_sequence(self) -> int | None:
        """The most tokens that the layer can read, or None where there is no limit."""
        return None


# Gated units ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GAUConfig(MixerConfig):
    """Gated attention unit with quadratic attention; a model of these is FLASH-Quad."""

    layer = GAU
    d_qk: int = 128
    expansion: int = 2
    activation: Activation = "relu2"
    normalization: Normalization = "count"
    rope: bool = True
    relative_bias: bool = True
    max_length: int | None = None

    @property
    def longest_sequence(self) -> int | None:
        """The end of the table of relative biases, if there is one."""
        has_table = self.relative_bias and self.max_length is not None and self.max_length <= LARGEST_TABLE
        return self.max_length if has_table else None


@dataclass(frozen=True)
class UngatedGAUConfig(GAUConfig):
    """GAU without its gate, values twice as wide."""

    layer = UngatedGAU


@dataclass(frozen=True)
class MultiHeadGAUConfig(MixerConfig):
    """GAU with several heads."""

    layer = MultiHeadGAU
    n_heads: int = 4
    d_qk: int = 128
    expansion: int = 2
    activation: Activation = "relu2"
    normalization: Normalization = "count"
    rope: bool = True
    relative_bias: bool = True


@dataclass(frozen=True)
class FLASHConfig(MixerConfig):
    """Gated attention unit with mixed chunk attention, linear in the length."""

    layer = FLASH
    d_qk: int = 128
    expansion: int = 2
    chunk_size: int = 256
    activation: Activation = "relu2"
    normalization: Normalization = "count"
    rope: bool = True
    relative_bias: bool = True


@dataclass(frozen=True)
class LocalFLASHConfig(FLASHConfig):
    """FLASH without attention across chunks."""

    layer = LocalFLASH


@dataclass(frozen=True)
class GlobalFLASHConfig(MixerConfig):
    """FLASH without attention inside chunks."""

    layer = GlobalFLASH
    d_qk: int = 128
    expansion: int = 2
    chunk_size: int = 64
    normalization: Normalization = "count"
    rope: bool = True


@dataclass(frozen=True)
class OverlappingFLASHConfig(FLASHConfig):
    """FLASH whose chunks also read their neighbours."""

    layer = OverlappingFLASH


@dataclass(frozen=True)
class WeightedFLASHConfig(FLASHConfig):
    """FLASH with attention between chunk summaries."""

    layer = WeightedFLASH


@dataclass(frozen=True)
class FirstToAllFLASHConfig(FLASHConfig):
    """FLASH whose first token of every chunk attends to all tokens with softmax."""

    layer = FirstToAllFLASH


@dataclass(frozen=True)
class CLSFLASHConfig(FLASHConfig):
    """FLASH whose first token attends to its chunk with softmax."""

    layer = CLSFLASH


# Heads ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionConfig(MixerConfig):
    """Softmax multi-head attention."""

    layer: ClassVar[type[Any]] = Attention
    n_heads: int = 12
    rope: bool = True


@dataclass(frozen=True)
class Relu2AttentionConfig(AttentionConfig):
    """Multi-head attention with relu^2."""

    layer = Relu2Attention


@dataclass(frozen=True)
class GatedAttentionConfig(AttentionConfig):
    """Softmax multi-head attention with a gate."""

    layer = GatedAttention


@dataclass(frozen=True)
class PerformerConfig(AttentionConfig):
    """Linear attention with ReLU features, causal by a prefix sum over tokens."""

    layer = Performer


@dataclass(frozen=True)
class PerformerMatmulConfig(AttentionConfig):
    """Linear attention with ReLU features, causal by all products."""

    layer = PerformerMatmul


@dataclass(frozen=True)
class LinearELUConfig(AttentionConfig):
    """Linear attention with features elu + 1."""

    layer = LinearELU


@dataclass(frozen=True)
class LinearTaylorConfig(AttentionConfig):
    """Linear attention with similarity 1 + cos."""

    layer = LinearTaylor


@dataclass(frozen=True)
class EfficientAttentionConfig(AttentionConfig):
    """Efficient attention: softmax over features and over positions."""

    layer = EfficientAttention


@dataclass(frozen=True)
class MixedChunkHeadsConfig(AttentionConfig):
    """Softmax attention inside chunks and linear attention across them."""

    layer = MixedChunkHeads
    chunk_size: int = 256


@dataclass(frozen=True)
class CombinerConfig(AttentionConfig):
    """Softmax attention over the own chunk and summaries of the others."""

    layer = Combiner
    chunk_size: int = 256


@dataclass(frozen=True)
class LinformerConfig(AttentionConfig):
    """Softmax attention over learned landmarks."""

    layer = Linformer
    n_landmarks: int = 128
    max_length: int = 512

    @property
    def longest_sequence(self) -> int | None:
        """The positions that its maps mix."""
        return self.max_length


@dataclass(frozen=True)
class SparseAttentionConfig(AttentionConfig):
    """Softmax attention over near tokens and every so many-th one."""

    layer = SparseAttention
    stride: int = 128


@dataclass(frozen=True)
class ReformerConfig(AttentionConfig):
    """Softmax attention inside buckets of a hash."""

    layer = Reformer
    n_buckets: int = 8
    n_rounds: int = 2
    chunk_size: int = 64


# From one sequence to another -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CrossGAUConfig:
    """Gated attention unit by which a decoder reads the source."""

    n_heads: int = 1
    d_qk: int = 128
    expansion: int = 2
    activation: Activation = "relu2"

    def build(self, d_model: int, *, norm: Norm, dropout: float) -> CrossGAU:
        """The layer this describes."""
        return CrossGAU(d_model, norm=norm, dropout=dropout, **dataclasses.asdict(self))


# The names under which mixers appear in dictionaries, as "kind".
MIXER_KINDS: dict[str, type[MixerConfig]] = {
    "flash": FLASHConfig,
    "gau": GAUConfig,
    "attention": AttentionConfig,
    "flash_local": LocalFLASHConfig,
    "flash_global": GlobalFLASHConfig,
    "flash_overlapping": OverlappingFLASHConfig,
    "flash_weighted": WeightedFLASHConfig,
    "flash_first_to_all": FirstToAllFLASHConfig,
    "flash_cls": CLSFLASHConfig,
    "gau_ungated": UngatedGAUConfig,
    "gau_multi_head": MultiHeadGAUConfig,
    "attention_relu2": Relu2AttentionConfig,
    "attention_gated": GatedAttentionConfig,
    "performer": PerformerConfig,
    "performer_matmul": PerformerMatmulConfig,
    "linear_elu": LinearELUConfig,
    "linear_taylor": LinearTaylorConfig,
    "efficient": EfficientAttentionConfig,
    "mixed_chunk_heads": MixedChunkHeadsConfig,
    "combiner": CombinerConfig,
    "linformer": LinformerConfig,
    "sparse": SparseAttentionConfig,
    "reformer": ReformerConfig,
}
