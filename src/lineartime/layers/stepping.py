"""Mixers that continue streams at different positions together, token by token.

Shapes: B streams, d model width.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.layers.mixer import Mixer, State
from lineartime.layers.streams import ShiftedState, check_state
from lineartime.ops.layout import Layout
from lineartime.ops.token_shift import shift_next


class JoinedStreams(Protocol):
    """What a mixer remembers of streams at different positions, which `step` updates in place.

    It is a NamedTuple of tensors if the mixer `steps_in_place`.
    """

    @property
    def position(self) -> Tensor:
        """int64 [B], the number of tokens that each stream has read."""


Streams = TypeVar("Streams", bound=JoinedStreams)


class SteppingMixer(Mixer[State], Generic[State, Streams]):
    """A mixer that can continue streams at different positions together, token by token."""

    @abstractmethod
    def join_own_streams(self, states: Sequence[State]) -> Streams:
        """Join states of `mix_next` to continue them with `mix_step`; only called for a causal mixer."""

    @abstractmethod
    def mix_step(self, normed: Tensor, streams: Streams, layout: Layout) -> Tensor:
        """Map one more normed token of every stream to what is added to it, [B, 1, d]; updates `streams` in place."""

    def join_streams(self, states: Sequence[State | ShiftedState]) -> Streams | ShiftedState:
        """Join streams at different positions, to continue them with `step`.

        Args:
            states: states that `extend` returned, each of one or more streams; they are not modified.

        Raises:
            ArgumentError: if the mixer is not causal, there is no state, or a state belongs to another layer.
        """
        self.check_causal()
        if not states:
            raise ArgumentError("states", "is empty, but must hold the state of at least one group of streams.")
        for state in states:
            check_state(state, self.no_streams, type(self).__name__, "states")
        own = self.join_own_streams([state.own if isinstance(state, ShiftedState) else state for state in states])
        shifted = [state.last for state in states if isinstance(state, ShiftedState)]
        return ShiftedState(torch.cat(shifted), own) if self.token_shift else own

    def step(self, x: Tensor, streams: Streams | ShiftedState) -> Tensor:
        """Continue joined streams by one token, [B, 1, d] -> [B, 1, d]; updates `streams` in place.

        Raises:
            ValueError: if x is not one token for each stream.
        """
        self.check_input(x)
        if not isinstance(getattr(streams, "position", None), Tensor):
            raise ArgumentError("streams", f"is a {type(streams).__name__}, but must be what join_streams returned.")
        if x.shape[:2] != (len(streams.position), 1):
            raise ArgumentError(
                "x", f"has shape {list(x.shape)}, but must be [B, 1, d_model] for B = {len(streams.position)} streams."
            )
        return self.read_step(x, streams, self.step_layout(streams.position))

    def read_step(self, x: Tensor, streams: Streams | ShiftedState, layout: Layout) -> Tensor:
        """`step` with a layout."""
        normed = self.before(x)
        if isinstance(streams, ShiftedState):
            normed, last = shift_next(normed, streams.last)
            streams.last.copy_(last)
        own: Streams = streams.own if isinstance(streams, ShiftedState) else streams
        return self.after(x, self.mix_step(normed, own, layout))
