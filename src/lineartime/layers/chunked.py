"""Gated units that cut documents into chunks: the base of FLASH and its variants.

Shapes: B batch, C chunk size, s query/key width, e value width.
"""

from typing import ClassVar

from torch import Tensor
from typing_extensions import Unpack

from lineartime.errors import check_choice
from lineartime.layers.dense import factory
from lineartime.layers.gated import GatedOptions, GatedUnit
from lineartime.layers.mixer import State
from lineartime.layers.opened import Part
from lineartime.layers.positions import BIAS_FORMS, BiasForm, RelativeBias, RotaryBias, build_relative_bias
from lineartime.ops.activations import CHUNK_NORMALIZATIONS
from lineartime.ops.checks import check_positive
from lineartime.ops.layout import Layout, LayoutPlan
from lineartime.ops.mixed_chunk.inputs import MixedChunkOptions
from lineartime.ops.mixed_chunk.stream import MixedChunkState, mixed_chunk_state


class ChunkedUnit(GatedUnit[State]):
    """A gated unit with chunks of C tokens and a relative bias inside them.

    Args:
        chunk_size: C; the length of the input need not be a multiple of it.
        relative_bias: whether to add a learned bias, which depends on the distance, to the scores of the quadratic part.
        bias_form: the form of the relative bias. "auto" is a table for chunks of up to 512 tokens, and the rotary form for
            longer ones; "buckets" has one value for each of T5's 32 buckets of distances.
        **options: the options of `GatedUnit`; the activation applies to the quadratic part.
    """

    n_maps = 4
    parts: ClassVar[tuple[Part, ...]] = ("local", "global")
    normalizations = CHUNK_NORMALIZATIONS
    bias_chunks: ClassVar[int] = 1
    """The number of consecutive chunks that the relative bias spans."""

    def __init__(
        self,
        d_model: int,
        *,
        chunk_size: int = 256,
        relative_bias: bool = True,
        bias_form: BiasForm = "auto",
        **options: Unpack[GatedOptions],
    ) -> None:
        super().__init__(d_model, **options)
        check_positive(chunk_size=chunk_size)
        self.chunk_size = chunk_size
        self.relative_bias = relative_bias
        check_choice("bias_form", bias_form, BIAS_FORMS)
        self.bias_form: BiasForm = bias_form
        self.bias: RelativeBias | None = None
        if relative_bias:
            self.bias = build_relative_bias(
                bias_form, self.bias_chunks * chunk_size, self.d_qk, self.causal, **factory(options)
            )

    @property
    def options(self) -> MixedChunkOptions:
        """The options of its attention."""
        return MixedChunkOptions(self.chunk_size, self.causal, self.activation, self.normalization)

    def plan(self) -> LayoutPlan:
        """Request chunks and rotations and, for a rotary bias, rotations of the slots of a chunk."""
        plan = super().plan()
        return plan._replace(
            bias_width=self.d_qk if isinstance(self.bias, RotaryBias) else None,
            bias_places=self.bias_chunks * self.chunk_size,
            chunk_size=self.chunk_size,
        )

    def chunk_bias(self, layout: Layout) -> Tensor | None:
        """The relative bias of the quadratic part, [C, C], or None; C is the chunk size of the layout."""
        if self.bias is None:
            return None
        slots = self.layout_chunk_size(layout)
        return self.bias.consecutive(slots, slots, rotations=layout.place_rotations)

    def layout_chunk_size(self, layout: Layout) -> int:
        """C, or less if the layout contains only short documents."""
        return self.chunk_size if layout.chunks is None else layout.chunks.chunk_size

    def init_mixed_state(self, batch_size: int) -> MixedChunkState:
        """The state of FLASH before the first token of `batch_size` streams."""
        return mixed_chunk_state(batch_size, self.chunk_size, self.d_qk, self.d_value, like=self.any_parameter)
