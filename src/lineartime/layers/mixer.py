"""The contract of a mixer, a layer that moves information between tokens, for whole sequences and for streams.

Shapes: B batch, T tokens, N new tokens of a stream, D documents of a pack, d model width.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from lineartime.errors import ArgumentError, LineartimeError
from lineartime.layers.residual import LayerOptions, ResidualLayer, zero_padding
from lineartime.layers.streams import (
    RaggedState,
    ShiftedState,
    StreamState,
    check_state,
    count_streams,
    extend_ragged,
    structure_of,
)
from lineartime.ops.backends import define_operators
from lineartime.ops.checks import as_mask
from lineartime.ops.context import ContextGroup
from lineartime.ops.layout import Layout, LayoutPlan
from lineartime.ops.make_layout import make_layout, prefix_layout, step_layout, stream_layout
from lineartime.ops.token_shift import shift_next, shift_tokens, shifted_width

READ_PREFIX = "GAU, FLASH and softmax attention"  # the mixers that can, for messages

State = TypeVar("State", bound=StreamState)


class MixerOptions(LayerOptions, total=False):
    """What every mixer takes: see `Mixer`."""

    causal: bool
    token_shift: bool


class Mixer(ResidualLayer, ABC, Generic[State]):
    """Base of the layers that move information between tokens: the contract they share.

    y = mixer(x, mask=None, cu_seqlens=None) is parallel over T. A causal mixer also streams: state = mixer.init_state(batch),
    then y, state = mixer.extend(x, state) for any number of new tokens. A `PrefixMixer` takes `prefix_lengths` too.

    Inside a model, `layout` makes the layout of a batch once, for `forward_with_layout` of every layer. For streams,
    `stream_layout` and `extend_with_layout` do the same. The norm and the residual are those of `ResidualLayer`. A subclass
    implements what is between them: `mix`, `mix_next` and `init_own_state`. If it uses more of a layout than positions and
    rows, it also implements `plan`.

    Args:
        causal: whether a token attends only to itself and earlier tokens; required for streaming.
        token_shift: whether the first half of each normed token's features is taken from the previous token, with zeros for the
            first token of a document; see `lineartime.ops.token_shift`.
        **options: the options of `ResidualLayer`.
    """

    why_not_causal: ClassVar[str | None] = None
    """Why a mixer cannot be causal, as the end of a sentence; None for a mixer that can be."""
    splits_context: ClassVar[bool] = False
    """Whether it supports sequences that are split over several processes."""
    steps_in_place: ClassVar[bool] = False
    """Whether it is a `SteppingMixer` whose streams keep their buffers, so that a step can be recorded or compiled."""
    reads_prefix: ClassVar[bool] = False
    """Whether a causal mixer can attend bidirectionally within the first tokens of a sequence."""

    def __init__(
        self, d_model: int, *, causal: bool = False, token_shift: bool = False, **options: Unpack[LayerOptions]
    ) -> None:
        super().__init__(d_model, **options)
        define_operators()
        if causal and self.why_not_causal is not None:
            raise ArgumentError("causal", f"is True, but {type(self).__name__} must have causal=False: {self.why_not_causal}.")
        self.causal = causal
        self.token_shift = token_shift
        self._no_streams: Any = None

    @property
    def longest_sequence(self) -> int | None:
        """The maximum length of a sequence, or None if there is no limit."""
        return None

    @property
    def any_parameter(self) -> Tensor:
        """One of the parameters, which tells the dtype and device of new states; any projection may be another module."""
        return next(self.parameters())

    @abstractmethod
    def mix(self, normed: Tensor, layout: Layout) -> Tensor:
        """Map whole sequences of normed tokens to what is added to the tokens: [B, T, d] -> [B, T, d]."""

    @abstractmethod
    def mix_next(self, normed: Tensor, state: State, layout: Layout) -> tuple[Tensor, State]:
        """Do the same for N more tokens of streams, [B, N, d], and return the new state; `state` is not modified."""

    @abstractmethod
    def init_own_state(self, batch_size: int) -> State:
        """The state before the first token of `batch_size` streams, for `mix_next`; only called for a causal mixer."""

    def plan(self) -> LayoutPlan:
        """What the mixer needs from a layout."""
        return LayoutPlan(token_shift=self.token_shift)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
    ) -> Tensor:
        """Process whole sequences at once.

        Args:
            x: [B, T, d].
            mask: [B, T], bool or integers 0 and 1, True for real tokens. Padding may be anywhere; its outputs are zero.
            cu_seqlens: int [D + 1], the boundaries of D documents packed into a single row.
            prefix_lengths: int [B], or [D] with `cu_seqlens`, for a causal mixer: the number of real tokens at the start of
                each row, or document, that attend to each other bidirectionally. Later tokens attend causally.

        Returns:
            [B, T, d].

        Raises:
            ArgumentError: if shapes do not match, or a sequence is longer than the mixer allows.
            LineartimeError: if prefixes are given and the mixer does not support them.
        """
        self.check_input(x)
        return self.forward_with_layout(x, self.layout(x.shape, mask, cu_seqlens, prefix_lengths, device=x.device))

    def layout(
        self,
        shape: tuple[int, ...],
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
        *,
        device: torch.device,
        context: ContextGroup | None = None,
        whole_chunks: bool = False,
    ) -> Layout:
        """Make the layout of a batch [B, T, ...] with all that this mixer needs. Mixers with equal plans can share it.

        See `make_layout` for `whole_chunks`.

        Raises:
            ArgumentError: if `mask`, `cu_seqlens` or `prefix_lengths` do not match the batch, or this mixer cannot split
                sequences over the processes of a `context`.
            LineartimeError: if prefixes are given and this mixer does not support them.
        """
        if prefix_lengths is not None:
            self.check_prefix()
        if context is not None and not self.splits_context:
            raise ArgumentError(
                "context",
                f"is given, but {type(self).__name__} needs its whole sequence in one process: only FLASH can split sequences "
                "over several.",
            )
        plan = self.plan()
        return make_layout(
            shape, mask, cu_seqlens, prefix_lengths, device=device, plan=plan, context=context, whole_chunks=whole_chunks
        )

    def forward_with_layout(self, x: Tensor, layout: Layout) -> Tensor:
        """`forward` with a given layout, [B, T, d] -> [B, T, d]; ArgumentError for one of another mixer or another batch."""
        self.check_layout(layout, x)
        x = zero_padding(x, layout.mask)
        return zero_padding(self.after(x, layout.by_part(self.mix, self.normed(x, layout))), layout.mask)

    def normed(self, x: Tensor, layout: Layout) -> Tensor:
        """The input of `mix`: tokens after the norm, if it is a pre-norm, and after the token shift, if it is on."""
        normed = self.before(x)
        return shift_tokens(normed, layout.previous, layout.context) if self.token_shift else normed

    def init_state(self, batch_size: int) -> State | ShiftedState | RaggedState:
        """The state before the first token of `batch_size` streams; ArgumentError unless the mixer is causal."""
        return self._init_state(batch_size)

    def _init_state(self, batch_size: int) -> State | ShiftedState:
        """`init_state`, whose type allows what later states may be."""
        self.check_causal()
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 0:
            raise ArgumentError("batch_size", f"is {batch_size!r}, but must be a non-negative integer.")
        own = self.init_own_state(batch_size)
        if not isinstance(own, tuple) or not hasattr(own, "position"):
            found = f"{type(self).__name__}.init_own_state returned a {type(own).__name__}"
            raise LineartimeError(f"{found}, but must return a NamedTuple of a tensor [B, ...] first, and a position.")
        if not self.token_shift:
            return own
        like = self.any_parameter
        nothing = torch.zeros(batch_size, shifted_width(self.d_model), dtype=like.dtype, device=like.device)
        return ShiftedState(nothing, own)

    def extend(
        self, x: Tensor, state: State | ShiftedState | RaggedState | None, mask: Tensor | None = None
    ) -> tuple[Tensor, State | ShiftedState | RaggedState]:
        """Continue streams by N tokens; each stream has the same outputs as if it were continued alone.

        Args:
            x: [B, N, d].
            state: the state that `extend` returned, or None to begin B streams; it is not modified.
            mask: [B, N], bool or integers 0 and 1, True for real tokens. Positions count only real tokens, so prompts of
                different lengths can be padded on the left, read in one call and continued without a mask. Streams at the same
                position that get the same number of tokens are computed together, and one such group after another.

        Returns:
            [B, N, d], with zeros at padding, and the state: a `RaggedState` if streams are at different positions.

        Raises:
            ArgumentError: if the mixer is not causal, shapes do not match, or the state has another batch size or layer.
        """
        self.check_causal()
        self.check_input(x)
        mask = as_mask("mask", mask, x.shape[0], x.shape[1], x.device)
        if state is None:
            state = self._init_state(x.shape[0])
        self._check_state(state, x)
        return extend_ragged(self._extend_together, x, state, mask)

    def prefix_layout(self, shape: tuple[int, ...], device: torch.device) -> Layout:
        """The layout of the first tokens [B, N, ...] of streams, all in a prefix; LineartimeError without prefix support."""
        self.check_prefix()
        return prefix_layout(shape, device=device, plan=self.plan())

    def _extend_together(self, x: Tensor, state: State | ShiftedState) -> tuple[Tensor, State | ShiftedState]:
        """`extend` for streams at the same position, with tokens without padding."""
        return self._extend_with_layout(x, state, self.stream_layout(state.position, x.shape[1], x.device))

    def stream_layout(self, position: int, count: int, device: torch.device) -> Layout:
        """The layout of the next `count` tokens of streams that have read `position` tokens."""
        return stream_layout(position, count, device=device, plan=self.plan())

    def step_layout(self, positions: Tensor) -> Layout:
        """The layout of one more token for each of B streams at their own positions, int64 [B]."""
        return step_layout(positions, plan=self.plan())

    def extend_with_layout(self, x: Tensor, state: State | ShiftedState, layout: Layout) -> tuple[Tensor, State | ShiftedState]:
        """`extend` with a layout; ArgumentError for a state or a layout of another batch or another mixer."""
        self._check_state(state, x)
        self.check_layout(layout, x)
        return self._extend_with_layout(x, state, layout)

    def _extend_with_layout(
        self, x: Tensor, state: State | ShiftedState, layout: Layout
    ) -> tuple[Tensor, State | ShiftedState]:
        """`extend_with_layout` without its checks."""
        normed = self.before(x)
        if isinstance(state, ShiftedState):
            normed, last = shift_next(normed, state.last)
            out, own = self.mix_next(normed, state.own, layout)
            return self.after(x, out), ShiftedState(last, own)
        out, state = self.mix_next(normed, state, layout)
        return self.after(x, out), state

    def _check_state(self, state: State | ShiftedState | RaggedState, x: Tensor) -> None:
        batch = x.shape[0]
        for part in state.states if isinstance(state, RaggedState) else [state]:
            check_state(part, self.no_streams(), type(self).__name__)
            if part[0].device != x.device:
                raise ArgumentError("state", f"is on {part[0].device}, but must be on {x.device}, like x.")
        own = count_streams(state)
        if batch != own:
            raise ArgumentError(
                "state", f"is of {own} streams, but there are tokens of {batch}: give the state of these streams."
            )

    def no_streams(self) -> Any:
        """The structure of the state of zero streams, to which other states are compared."""
        if self._no_streams is not None:
            return self._no_streams
        structure = structure_of(self.init_state(0))
        if not torch.compiler.is_compiling():  # a traced program must not change the layer
            self._no_streams = structure
        return structure

    def check_layout(self, layout: Layout, x: Tensor) -> None:
        """Raise ArgumentError unless the layout was made for a mixer like this one, and for a batch of the shape of x."""
        if layout.plan != self.plan():
            raise ArgumentError("layout", f"was made for {layout.plan}, but this {type(self).__name__} needs {self.plan()}.")
        problem = layout.misfit(x.shape[0], x.shape[1])
        if problem is not None:
            raise ArgumentError("layout", f"was made for {problem}, but x has shape {list(x.shape)}: make one for this batch.")

    def check_prefix(self) -> None:
        """Raise LineartimeError unless this mixer is causal and supports prefixes."""
        if not self.reads_prefix:
            raise LineartimeError(f"{type(self).__name__} does not support prefixes: only {READ_PREFIX} do.")
        if not self.causal:
            problem = f"is False, but prefixes need a causal {type(self).__name__}"
            raise ArgumentError("causal", f"{problem}: build it with causal=True.")

    def check_causal(self) -> None:
        """Raise ArgumentError unless this mixer is causal, which streaming requires."""
        if not self.causal:
            why = self.why_not_causal
            advice = ": build it with causal=True" if why is None else f" and does not support causal=True: {why}"
            raise ArgumentError("causal", f"is False, so that {type(self).__name__} cannot stream{advice}.")
