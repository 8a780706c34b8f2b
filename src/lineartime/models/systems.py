"""All systems of the paper and of its related work, in a table with one row per system.

A row states what the class of its mixer does not: the rest of the block, and the options that differ from the class's
defaults. To add a system, add a row to `SYSTEMS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import lineartime.baselines as baselines
from lineartime.choices import VOCAB_SIZE
from lineartime.layers.attention import Attention
from lineartime.layers.feedforward import GLU, MLP
from lineartime.layers.flash import FLASH
from lineartime.layers.gau import GAU, InitialScores
from lineartime.layers.mixer import Mixer
from lineartime.layers.residual import ResidualLayer, constructor_options


@dataclass(frozen=True)
class Size:
    """The size of a model, for both families: gated units and Transformers.

    Attributes:
        d_model: width of the residual stream.
        gated_blocks: number of blocks in a model of gated units; each block is one layer.
        attention_blocks: number of blocks in a Transformer; each block is attention and a feed-forward layer.
        n_heads: number of heads in a Transformer.
        d_qk: query/key width of a gated unit.
        chunk_size: number of tokens in a chunk.
        vocab_size: number of tokens in the vocabulary.
        initial_scores: the magnitude of a GAU's attention scores at initialisation.
    """

    d_model: int
    gated_blocks: int
    attention_blocks: int
    n_heads: int
    d_qk: int = 128
    chunk_size: int = 256
    vocab_size: int = VOCAB_SIZE
    initial_scores: InitialScores = "small"


SIZED = ("d_qk", "n_heads", "chunk_size")
"""The options of mixers that are taken from the size, unless a row sets them."""


@dataclass(frozen=True)
class System:
    """One row of the table.

    Attributes:
        mixer: the class of the layer that moves information between tokens.
        feed_forward: the class of the layer after the mixer in a Transformer block; None for gated units, which need none and
            have twice as many blocks instead.
        options: options of the mixer that differ from its class's defaults and from the size.
        scaled: options of the mixer that are computed from the size, instead of copied from its field of the same name.
        fields: fields of the model that differ from the usual ones, such as the `pattern` of a hybrid. A name in it stands for
            the mixer of this row or, of another kind, of the row that sets the fewest options.
        places: options of single mixers of the pattern, such as "pattern.2.memory".
        clips_gradient: whether the paper's recipes clip its gradient.
        description: a one-line description; the default is the first line of the mixer's docstring.
    """

    mixer: type[Mixer]
    feed_forward: type[ResidualLayer] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    scaled: Mapping[str, Callable[[Size], int | str]] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, Any] = field(default_factory=dict)
    clips_gradient: bool = True
    description: str = ""

    @property
    def mixers(self) -> list[type[Mixer]]:
        """The classes of all its mixers: those in the pattern among its fields, too."""
        kinds = [getattr(each, "kind", each) for each in self.fields.get("pattern", ())]
        others = [system.mixer for system in SYSTEMS.values() if system.mixer.name in kinds]
        return list(dict.fromkeys([self.mixer, *others]))

    @cached_property
    def sized_options(self) -> tuple[str, ...]:
        """The options of the mixer that the row leaves to the size."""
        own = {*self.options, *self.scaled}
        return tuple(name for name in SIZED if name in constructor_options(self.mixer) and name not in own)

    def mixer_options(self, size: Size) -> dict[str, Any]:
        """The options of the mixer at a size that differ from its class's defaults."""
        sized = {name: getattr(size, name) for name in self.sized_options}
        return {**sized, **self.options, **{name: of(size) for name, of in self.scaled.items()}}

    def describe(self) -> str:
        """A one-line description of the system."""
        return self.description or (self.mixer.__doc__ or "").partition("\n")[0].rstrip(".")


# The paper's sizes for fine-tuning (arXiv 2202.10447, section 4.3): s = 512 and chunks of 128 at the base size.
FINE_TUNING: dict[str, Callable[[Size], int]] = {
    "d_qk": lambda size: 4 * size.d_qk,
    "chunk_size": lambda size: size.chunk_size // 2,
}

# GAU and its ablations share their initialisation.
GAU_START: dict[str, Callable[[Size], str]] = {"initial_scores": lambda size: size.initial_scores}


def heads_of(width: int) -> Callable[[Size], int]:
    """As many heads as divide the model into even parts at least so wide; one for a narrower model."""

    def count(size: Size) -> int:
        d, most = size.d_model, max(1, size.d_model // width)
        return max((heads for heads in range(1, most + 1) if d % heads == 0 and d // heads % 2 == 0), default=1)

    return count


FLASH_NEXT = {"normalization": "paper", "initial_scores": "unit"}

SYSTEMS: dict[str, System] = {
    "flash": System(FLASH, description="FLASH: gated units with mixed chunk attention"),
    "flash-quad": System(GAU, scaled=GAU_START, description="FLASH-Quad: gated units with quadratic attention (GAU)"),
    "flash-next": System(
        FLASH, options=FLASH_NEXT, description="flash-next: FLASH with the published divisor, and scores that start near 1"
    ),
    "flash-memory": System(
        FLASH,
        options=FLASH_NEXT,
        fields={"pattern": ("flash", "flash", "flash", "flash")},
        places={"pattern.2.memory": "mesa"},
        description="flash-memory: flash-next with a memory that recalls, in every fourth unit",
    ),
    "hybrid-gau": System(
        FLASH,
        options=FLASH_NEXT,
        fields={"pattern": ("flash", "flash", "flash", "gau")},
        description="A hybrid: three units of flash-next, then a GAU",
    ),
    "hybrid-attention": System(
        FLASH,
        options=FLASH_NEXT,
        fields={"pattern": ("flash", "flash", "flash", "attention")},
        description="A hybrid: three units of flash-next, then softmax attention",
    ),
    "transformer": System(
        Attention,
        MLP,
        options={"rope": False},
        fields={"norm": "layernorm", "absolute_position": "learned", "max_positions": 1024},
        clips_gradient=False,
        description="The vanilla Transformer, with 1,024 learned positions",
    ),
    "transformer+": System(Attention, MLP, description="Transformer+: rotary positions, MLP"),
    "transformer++": System(Attention, GLU, description="Transformer++: rotary positions and GEGLU"),
    "performer": System(baselines.Performer, MLP),
    "performer-matmul": System(
        baselines.Performer, MLP, options={"causal_sums": "matmul"}, description="Performer, causal by all T x T products"
    ),
    "performer-chunked": System(
        baselines.Performer, MLP, options={"causal_sums": "chunked"}, description="Performer, causal by sums over chunks"
    ),
    "combiner": System(baselines.Combiner, MLP),
    "combiner-fixed": System(baselines.CombinerFixed, MLP),
    "mc-tfm++": System(baselines.MCTFM, GLU, description="MC-TFM++: Transformer++ with mixed chunk attention"),
    "mixed-chunk": System(baselines.MixedChunk, GLU),
    "flash-local": System(baselines.FLASHLocal),
    "flash-global": System(baselines.FLASHGlobal, options={"chunk_size": 64}),
    "flash-overlapping": System(baselines.FLASHOverlapping),
    "flash-weighted": System(baselines.FLASHWeighted),
    "flash-first-to-all": System(baselines.FLASHFirstToAll, scaled=FINE_TUNING),
    "flash-cls": System(baselines.FLASHCLS, scaled=FINE_TUNING),
    "gau-softmax": System(
        GAU, options={"activation": "softmax"}, scaled=GAU_START, description="GAU with softmax instead of relu^2"
    ),
    "gau-multi-head": System(baselines.GAUMultiHead, options={"n_heads": 4}, scaled=GAU_START),
    "gau-ungated": System(baselines.GAUUngated, scaled=GAU_START),
    "mhsa-relu2": System(baselines.MHSARelu2, GLU, description="Transformer++ with relu^2 instead of softmax"),
    "mhsa-single-head": System(Attention, GLU, options={"n_heads": 1}, description="Transformer++ with a single head"),
    "mhsa-gated": System(baselines.MHSAGated, GLU, description="Transformer++ with a gate on attention"),
    "linear-elu": System(baselines.LinearELU, MLP),
    "efficient": System(baselines.Efficient, MLP),
    "linear-taylor": System(baselines.LinearTaylor, MLP),
    "cosformer": System(baselines.CosFormer, MLP, options={"rope": False}),
    "flowformer": System(baselines.Flowformer, MLP, options={"rope": False}),
    "linformer": System(baselines.Linformer, MLP),
    "nystromformer": System(baselines.Nystromformer, MLP),
    "sparse": System(baselines.Sparse, MLP, scaled={"stride": lambda size: size.chunk_size // 2}),
    "longformer": System(baselines.Longformer, MLP, scaled={"window": lambda size: size.chunk_size}),
    "bigbird": System(baselines.BigBird, MLP, scaled={"block_size": lambda size: size.chunk_size // 4}),
    "explicit-topk": System(baselines.ExplicitTopK, MLP),
    "reformer": System(baselines.Reformer, MLP, options={"chunk_size": 64}),
    "retnet": System(baselines.RetNet, GLU, scaled={"n_heads": heads_of(128)}),
    "gla": System(baselines.GLA, GLU, options={"n_heads": 4}),
    "mamba2": System(baselines.Mamba2, scaled={"n_heads": heads_of(32)}),
    "deltanet": System(baselines.DeltaNet, GLU, scaled={"n_heads": heads_of(128)}),
    "gated-deltanet": System(baselines.GatedDeltaNet, GLU, scaled={"n_heads": heads_of(128)}),
    "rwkv7": System(baselines.RWKV7, MLP, scaled={"n_heads": heads_of(64)}),
    "lact": System(baselines.LaCT, GLU),
}
