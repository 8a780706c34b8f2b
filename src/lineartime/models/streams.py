"""What a model remembers of streams, and how models continue streams at different positions group by group.

Shapes: B streams, d model width.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from lineartime.layers.streams import RaggedState, count_streams, extend_ragged, group_streams, single_streams

Extend = Callable[[Tensor, Any], tuple[Tensor, Any]]


class BackboneState(NamedTuple):
    """What a model remembers of streams: those that `extend` continues, or joined ones that `step` continues in place.

    Attributes:
        blocks: the state of each block.
    """

    blocks: tuple[Any, ...]

    @property
    def position(self) -> Any:
        """The number of tokens read so far: an int, or int64 [B] for joined streams, each at its own position."""
        return self.blocks[0].position


def is_joined(state: object) -> TypeGuard[BackboneState]:
    """Whether `join_streams` has joined the streams of a state, so that `step` continues them in place."""
    return isinstance(state, BackboneState) and isinstance(state.position, Tensor)


class GroupedStreams:
    """Joined streams of a model whose mixers cannot step them together: one group is continued after another.

    Args:
        states: states of the model, each of one or more streams at the same position. They are not modified.
    """

    def __init__(self, states: Sequence[BackboneState]) -> None:
        self._state: BackboneState | RaggedState = group_streams(states)

    def __len__(self) -> int:
        """The number of streams, B."""
        return count_streams(self._state)

    @property
    def position(self) -> Tensor:
        """The number of tokens that each stream has read: int64 [B], on the CPU."""
        known = self._state.position
        return torch.tensor(
            known if isinstance(self._state, RaggedState) else [known] * len(self), dtype=torch.long, device="cpu"
        )

    def separate(self) -> list[BackboneState]:
        """The state of each stream."""
        return single_streams(self._state)

    def step(self, x: Tensor, extend: Extend) -> Tensor:
        """Continue every stream by one token: [B, 1, d] -> [B, 1, d]. `extend` continues the streams of one group."""
        out, self._state = extend_ragged(extend, x, self._state, None)
        return out
