"""Streams at different positions, for models whose mixers cannot step them together: one group per position.

Shapes: B streams, d model width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lineartime.layers.streams import RaggedState, join_groups, single_streams

Extend = Callable[[Tensor, Any], tuple[Tensor, Any]]


class GroupedStreams:
    """Streams of a model, grouped by position. Streams at the same position always stay in one group.

    Args:
        states: states of the model, each of one or more streams at the same position. They are not modified.
        device: the model's device.
    """

    def __init__(self, states: Sequence[Any], device: torch.device) -> None:
        sizes = [len(next(iter(state[0]))) for state in states]
        of_row = [place for place, size in enumerate(sizes) for _ in range(size)]
        positions = [state[0].position for state in states]
        self._states: list[Any] = []
        self._rows: list[Tensor] = []
        for position in sorted(set(positions)):
            chosen = [state for state, found in zip(states, positions, strict=True) if found == position]
            self._states.append(tuple(join_groups(parts) for parts in zip(*chosen, strict=True)))
            rows = [row for row, place in enumerate(of_row) if positions[place] == position]
            self._rows.append(torch.tensor(rows, device=device, dtype=torch.long))
        self._order = torch.cat(self._rows).argsort()

    def __len__(self) -> int:
        """The number of streams, B."""
        return len(self._order)

    @property
    def position(self) -> Tensor:
        """The number of tokens that each stream has read: int64 [B]."""
        counts = [torch.full_like(rows, state[0].position) for rows, state in zip(self._rows, self._states, strict=True)]
        return torch.cat(counts)[self._order]

    def separate(self) -> list[Any]:
        """The state of each stream."""
        return single_streams(RaggedState(tuple(tuple(rows.tolist()) for rows in self._rows), tuple(self._states)))

    def step(self, x: Tensor, extend: Extend) -> Tensor:
        """Continue every stream by one token: [B, 1, d] -> [B, 1, d]. `extend` continues the streams of one group."""
        outputs = []
        for place, rows in enumerate(self._rows):
            out, self._states[place] = extend(x[rows], self._states[place])
            outputs.append(out)
        return torch.cat(outputs)[self._order]
