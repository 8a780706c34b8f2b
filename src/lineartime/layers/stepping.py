"""Mixers that continue streams at different positions together, token by token.

Shapes: B streams, d model width.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar, get_args, get_origin

import torch
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.layers.mixer import Mixer, State
from lineartime.layers.streams import RaggedState, ShiftedState, check_state, single_streams
from lineartime.ops.cache import each_stream, normal_tensors
from lineartime.ops.layout import Layout
from lineartime.ops.token_shift import shift_next, shifted_width


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

    streams_type: ClassVar[type[Any]] = object
    """The class of its joined streams: the last type argument that a subclass gives to `SteppingMixer`."""

    def __init_subclass__(cls) -> None:
        """Take `streams_type` from the type argument."""
        super().__init_subclass__()
        for base in vars(cls).get("__orig_bases__", ()):
            if get_origin(base) is SteppingMixer and isinstance(get_args(base)[-1], type):
                cls.streams_type = get_args(base)[-1]

    @abstractmethod
    def join_own_streams(self, states: Sequence[State]) -> Streams:
        """Join states of `mix_next` to continue them with `mix_step`; only called for a causal mixer."""

    @abstractmethod
    def separate_own_streams(self, streams: Streams, positions: Sequence[int]) -> Sequence[State]:
        """The state of each stream, to continue it with `mix_next`: the inverse of `join_own_streams`.

        `positions` are those of the streams, on the host.
        """

    @abstractmethod
    def mix_step(self, normed: Tensor, streams: Streams, layout: Layout) -> Tensor:
        """Map one more normed token of every stream to what is added to it, [B, 1, d]; updates `streams` in place."""

    def join_streams(self, states: Sequence[State | ShiftedState | RaggedState]) -> Streams | ShiftedState:
        """Join streams at different positions, to continue them with `step`, in inference mode and outside.

        Args:
            states: states that `extend` returned, each of one or more streams; they are not modified.

        Raises:
            ArgumentError: if the mixer is not causal, there is no state, or a state belongs to another layer.
        """
        self.check_causal()
        if not isinstance(states, (list, tuple)) or hasattr(states, "_fields"):
            found = f"is a {type(states).__name__}, but must be a list of states"
            raise ArgumentError("states", f"{found}, each as extend returns it: write [state] for one.")
        groups = [group for state in states for group in (single_streams(state) if isinstance(state, RaggedState) else [state])]
        if not groups:
            raise ArgumentError("states", "is empty, but must hold the state of at least one group of streams.")
        for state in groups:
            check_state(state, self.no_streams(), type(self).__name__, "states")
        with normal_tensors():
            own = self.join_own_streams([state.own if isinstance(state, ShiftedState) else state for state in groups])
            shifted = [state.last for state in groups if isinstance(state, ShiftedState)]
            return ShiftedState(torch.cat(shifted), own) if self.token_shift else own

    def separate_streams(
        self, streams: Streams | ShiftedState, positions: Sequence[int] | None = None
    ) -> list[State | ShiftedState]:
        """The state of each joined stream, which `extend` continues by many tokens at once: the inverse of `join_streams`.

        Args:
            streams: joined streams; they are not modified, and stepping them later does not change the states.
            positions: `streams.position` if it is known on the host: copying it from a GPU waits for all that the GPU computes.

        Raises:
            ArgumentError: if the streams belong to another layer.
        """
        self.check_streams(streams)
        known: Sequence[int] = streams.position.tolist() if positions is None else positions
        if not known:
            return []
        if isinstance(streams, ShiftedState):
            own: Sequence[State] = self.separate_own_streams(streams.own, known)
            return [ShiftedState(*parts) for parts in zip(each_stream(streams.last), own, strict=True)]
        return list(self.separate_own_streams(streams, known))

    def step(self, x: Tensor, streams: Streams | ShiftedState) -> Tensor:
        """Continue joined streams by one token, [B, 1, d] -> [B, 1, d]; updates `streams` in place.

        Raises:
            ArgumentError: if x is not one token for each stream, or the streams belong to another layer.
        """
        self.check_input(x)
        self.check_streams(streams)
        if x.shape[:2] != (len(streams.position), 1):
            raise ArgumentError(
                "x", f"has shape {list(x.shape)}, but must be [B, 1, d_model] for B = {len(streams.position)} streams."
            )
        return self._step_with_layout(x, streams, self.step_layout(streams.position))

    def step_with_layout(self, x: Tensor, streams: Streams | ShiftedState, layout: Layout) -> Tensor:
        """`step` with a layout; ArgumentError for streams of another layer."""
        self.check_streams(streams)
        return self._step_with_layout(x, streams, layout)

    @torch.no_grad()
    def _step_with_layout(self, x: Tensor, streams: Streams | ShiftedState, layout: Layout) -> Tensor:
        """`step_with_layout` without its checks. It has no gradient, whose graph would grow with every token."""
        normed = self.before(x)
        if isinstance(streams, ShiftedState):
            normed, last = shift_next(normed, streams.last)
            streams.last.copy_(last)
        own: Streams = streams.own if isinstance(streams, ShiftedState) else streams
        return self.after(x, self.mix_step(normed, own, layout))

    def check_streams(self, streams: object) -> None:
        """Raise ArgumentError for streams of another kind of layer. `mix_step` compares the widths of what it updates."""
        shifted = isinstance(streams, ShiftedState)
        own = streams.own if isinstance(streams, ShiftedState) else streams
        layer, advice = type(self).__name__, "give it join_streams([state]) of the same layer"
        if shifted != self.token_shift or not isinstance(own, self.streams_type):
            given, needed = _described(type(own), shifted), _described(self.streams_type, self.token_shift)
            raise ArgumentError("streams", f"is a {given}, but this {layer} needs a {needed}: {advice}.")
        if isinstance(streams, ShiftedState) and streams.last.shape[1] != shifted_width(self.d_model):
            found, wanted = streams.last.shape[1], shifted_width(self.d_model)
            raise ArgumentError("streams", f"has {found} shifted features, but this {layer} needs {wanted}: {advice}.")


def _described(kind: type[Any], shifted: bool) -> str:
    return f"{kind.__name__}{' with a token shift' if shifted else ''}"
