"""Every system of the paper and of its related work at any size, each derived from another.

A new system is a function here and a line in `SYSTEMS`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from lineartime.models.config import GLUConfig, MLPConfig, ModelConfig, Task
from lineartime.models.mixers import (
    AttentionConfig,
    CLSFLASHConfig,
    CombinerConfig,
    EfficientAttentionConfig,
    FirstToAllFLASHConfig,
    FLASHConfig,
    GatedAttentionConfig,
    GAUConfig,
    GlobalFLASHConfig,
    LinearELUConfig,
    LinearTaylorConfig,
    LinformerConfig,
    LocalFLASHConfig,
    MixedChunkHeadsConfig,
    MixerConfig,
    MultiHeadGAUConfig,
    OverlappingFLASHConfig,
    PerformerConfig,
    PerformerMatmulConfig,
    ReformerConfig,
    Relu2AttentionConfig,
    SparseAttentionConfig,
    UngatedGAUConfig,
    WeightedFLASHConfig,
)


@dataclass(frozen=True)
class Size:
    """How large a model is, in the terms of both families.

    Attributes:
        d_model: width of the residual stream.
        gated_blocks: blocks of a model of gated units, one layer each.
        attention_blocks: blocks of a Transformer, attention and feed-forward each.
        n_heads: heads of a Transformer.
        d_qk: query/key width of a gated unit.
        chunk_size: tokens of a chunk.
        vocab_size: number of tokens.
    """

    d_model: int
    gated_blocks: int
    attention_blocks: int
    n_heads: int
    d_qk: int = 128
    chunk_size: int = 256
    vocab_size: int = 32_000


def gated(mixer: MixerConfig, size: Size, task: Task) -> ModelConfig:
    """A model of gated units, which need no feed-forward layers."""
    return ModelConfig(
        task=task,
        vocab_size=size.vocab_size,
        d_model=size.d_model,
        n_blocks=size.gated_blocks,
        mixer=mixer,
        norm="layernorm" if task == "clm" else "scalenorm",
    )


def flash(size: Size, task: Task) -> ModelConfig:
    """FLASH: gated units with mixed chunk attention."""
    return gated(FLASHConfig(d_qk=size.d_qk, chunk_size=size.chunk_size), size, task)


def flash_quad(size: Size, task: Task) -> ModelConfig:
    """FLASH-Quad: gated units with quadratic attention (GAU)."""
    return gated(GAUConfig(d_qk=size.d_qk), size, task)


def flash_local(size: Size, task: Task) -> ModelConfig:
    """FLASH that reads nothing beyond a token's own chunk."""
    return gated(LocalFLASHConfig(d_qk=size.d_qk, chunk_size=size.chunk_size), size, task)


def flash_global(size: Size, task: Task) -> ModelConfig:
    """FLASH with linear attention across chunks of 64 alone."""
    return gated(GlobalFLASHConfig(d_qk=size.d_qk), size, task)


def flash_overlapping(size: Size, task: Task) -> ModelConfig:
    """FLASH whose chunks also read their neighbours."""
    return gated(OverlappingFLASHConfig(d_qk=size.d_qk, chunk_size=size.chunk_size), size, task)


def flash_weighted(size: Size, task: Task) -> ModelConfig:
    """FLASH with attention between chunk summaries."""
    return gated(WeightedFLASHConfig(d_qk=size.d_qk, chunk_size=size.chunk_size), size, task)


def flash_first_to_all(size: Size, task: Task) -> ModelConfig:
    """FLASH for fine-tuning: first tokens of chunks read all."""
    return gated(FirstToAllFLASHConfig(d_qk=4 * size.d_qk, chunk_size=size.chunk_size // 2), size, task)


def flash_cls(size: Size, task: Task) -> ModelConfig:
    """FLASH for fine-tuning: [CLS] attends with softmax."""
    return gated(CLSFLASHConfig(d_qk=4 * size.d_qk, chunk_size=size.chunk_size // 2), size, task)


def gau_softmax(size: Size, task: Task) -> ModelConfig:
    """GAU with softmax in the place of relu^2."""
    return gated(GAUConfig(d_qk=size.d_qk, activation="softmax"), size, task)


def gau_multi_head(size: Size, task: Task) -> ModelConfig:
    """GAU with several heads."""
    return gated(MultiHeadGAUConfig(n_heads=4, d_qk=size.d_qk), size, task)


def gau_ungated(size: Size, task: Task) -> ModelConfig:
    """GAU without its gate, values twice as wide."""
    return gated(UngatedGAUConfig(d_qk=size.d_qk), size, task)


def transformer_plus_plus(size: Size, task: Task) -> ModelConfig:
    """Transformer++: rotary positions and GEGLU."""
    return replace(
        gated(AttentionConfig(n_heads=size.n_heads), size, task), n_blocks=size.attention_blocks, feed_forward=GLUConfig()
    )


def transformer_plus(size: Size, task: Task) -> ModelConfig:
    """Transformer+: rotary positions, MLP."""
    return replace(transformer_plus_plus(size, task), feed_forward=MLPConfig())


def transformer(size: Size, task: Task) -> ModelConfig:
    """The vanilla Transformer, with 1,024 learned positions."""
    return replace(
        transformer_plus(size, task),
        mixer=AttentionConfig(n_heads=size.n_heads, rope=False),
        norm="layernorm",
        absolute_position="learned",
        max_positions=1024,
    )


def mhsa_relu2(size: Size, task: Task) -> ModelConfig:
    """Transformer++ with relu^2 in the place of softmax."""
    return replace(transformer_plus_plus(size, task), mixer=Relu2AttentionConfig(n_heads=size.n_heads))


def mhsa_single_head(size: Size, task: Task) -> ModelConfig:
    """Transformer++ with a single head."""
    return replace(transformer_plus_plus(size, task), mixer=AttentionConfig(n_heads=1))


def mhsa_gated(size: Size, task: Task) -> ModelConfig:
    """Transformer++ with a gate on attention."""
    return replace(transformer_plus_plus(size, task), mixer=GatedAttentionConfig(n_heads=size.n_heads))


def mc_tfm(size: Size, task: Task) -> ModelConfig:
    """MC-TFM++: Transformer++ with mixed chunk attention."""
    return replace(
        transformer_plus_plus(size, task), mixer=MixedChunkHeadsConfig(n_heads=size.n_heads, chunk_size=size.chunk_size)
    )


def performer(size: Size, task: Task) -> ModelConfig:
    """Performer with its ReLU kernel, as published."""
    return replace(transformer_plus(size, task), mixer=PerformerConfig(n_heads=size.n_heads))


def performer_matmul(size: Size, task: Task) -> ModelConfig:
    """Performer, causal by all T x T products."""
    return replace(transformer_plus(size, task), mixer=PerformerMatmulConfig(n_heads=size.n_heads))


def combiner(size: Size, task: Task) -> ModelConfig:
    """Combiner, rowmajor-axial."""
    return replace(transformer_plus(size, task), mixer=CombinerConfig(n_heads=size.n_heads, chunk_size=size.chunk_size))


def linear_elu(size: Size, task: Task) -> ModelConfig:
    """Linear attention with features elu + 1."""
    return replace(transformer_plus(size, task), mixer=LinearELUConfig(n_heads=size.n_heads))


def linear_taylor(size: Size, task: Task) -> ModelConfig:
    """Linear attention with similarity 1 + cos(q, k)."""
    return replace(transformer_plus(size, task), mixer=LinearTaylorConfig(n_heads=size.n_heads))


def efficient(size: Size, task: Task) -> ModelConfig:
    """Efficient attention: softmax over features and positions."""
    return replace(transformer_plus(size, task), mixer=EfficientAttentionConfig(n_heads=size.n_heads))


def linformer(size: Size, task: Task) -> ModelConfig:
    """Linformer: 512 positions mixed into 128 landmarks."""
    return replace(transformer_plus(size, task), mixer=LinformerConfig(n_heads=size.n_heads))


def sparse(size: Size, task: Task) -> ModelConfig:
    """Sparse Transformer: near tokens and every so many-th."""
    mixer = SparseAttentionConfig(n_heads=size.n_heads, stride=size.chunk_size // 2)
    return replace(transformer_plus(size, task), mixer=mixer)


def reformer(size: Size, task: Task) -> ModelConfig:
    """Reformer: attention inside buckets of a hash."""
    return replace(transformer_plus(size, task), mixer=ReformerConfig(n_heads=size.n_heads))


SYSTEMS: dict[str, Callable[[Size, Task], ModelConfig]] = {
    "flash": flash,
    "flash-quad": flash_quad,
    "transformer": transformer,
    "transformer+": transformer_plus,
    "transformer++": transformer_plus_plus,
    "performer": performer,
    "performer-matmul": performer_matmul,
    "combiner": combiner,
    "mc-tfm++": mc_tfm,
    "flash-local": flash_local,
    "flash-global": flash_global,
    "flash-overlapping": flash_overlapping,
    "flash-weighted": flash_weighted,
    "flash-first-to-all": flash_first_to_all,
    "flash-cls": flash_cls,
    "gau-softmax": gau_softmax,
    "gau-multi-head": gau_multi_head,
    "gau-ungated": gau_ungated,
    "mhsa-relu2": mhsa_relu2,
    "mhsa-single-head": mhsa_single_head,
    "mhsa-gated": mhsa_gated,
    "linear-elu": linear_elu,
    "efficient": efficient,
    "linear-taylor": linear_taylor,
    "linformer": linformer,
    "sparse": sparse,
    "reformer": reformer,
}
