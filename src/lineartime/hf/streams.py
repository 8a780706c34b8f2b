"""The streams of a batch, and the ways to continue them: by many tokens at once, by a prefix, and by one token in place.

Shapes: B streams, N new tokens, d model width, L blocks, whose inputs are returned if all hidden vectors are requested.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lineartime.generation.prompts import pieces
from lineartime.layers.streams import RaggedState, take_streams, tensors_of
from lineartime.models.backbone import Backbone, BackboneState
from lineartime.models.grouped import GroupedStreams


class Streams(NamedTuple):
    """Streams that are all at the same position.

    Attributes:
        blocks: the state of each block.
    """

    blocks: BackboneState

    @property
    def position(self) -> int:
        """The number of tokens read so far."""
        position: int = self.blocks[0].position
        return position


class SteppedStreams(NamedTuple):
    """Streams that are continued together, token by token, and updated in place; they may be at different positions.

    Attributes:
        blocks: the streams of each block.
    """

    blocks: BackboneState


Read = Callable[[Tensor, Any], tuple[Tensor, Any]]


def width(backbone: Backbone, every: bool) -> int:
    """How many vectors of width d a token has in the output, which also holds the inputs of all blocks if `every` is True."""
    return len(list(backbone.blocks)) + 1 if every else 1


def reader(backbone: Backbone, every: bool) -> Read:
    """Make a function that continues streams at one position, piece by piece, from the first d features of its input."""
    d_model = backbone.embedding.weight.shape[1]

    def read(x: Tensor, state: Streams) -> tuple[Tensor, Streams]:
        read_pieces = []
        for piece in pieces(x[..., :d_model]):
            inputs: list[Tensor] | None = [] if every else None
            hidden, blocks = backbone.extend_embedded(piece, state.blocks, inputs=inputs)
            read_pieces.append(torch.cat([*(inputs or ()), hidden], -1))
            state = Streams(blocks)
        return torch.cat(read_pieces, 1), state

    return read


def prefix_reader(backbone: Backbone, every: bool) -> Read:
    """Make a function that reads the prefix with which streams begin, in the same form."""
    d_model = backbone.embedding.weight.shape[1]

    def read(x: Tensor, state: Streams) -> tuple[Tensor, Streams]:
        inputs: list[Tensor] | None = [] if every else None
        hidden, blocks = backbone.prefix_embedded(x[..., :d_model], inputs=inputs)
        return torch.cat([*(inputs or ()), hidden], -1), Streams(blocks)

    return read


def joined_streams(backbone: Backbone, state: Streams | RaggedState) -> SteppedStreams:
    """Join streams in the order of the batch, to continue them together; `state` is not modified."""
    groups = state.states if isinstance(state, RaggedState) else (state,)
    joined = backbone.join_streams([group.blocks for group in groups])
    assert not isinstance(joined, GroupedStreams)  # the backbone steps in place
    if isinstance(state, RaggedState):
        order = torch.tensor([row for rows in state.rows for row in rows], device=joined[0].position.device).argsort()
        joined = take_streams(joined, order)
    return SteppedStreams(joined)


def step_streams(backbone: Backbone, embedded: Tensor, mask: Tensor | None, streams: SteppedStreams, every: bool) -> Tensor:
    """Continue joined streams by one token, [B, 1, d] and bool [B, 1] or None, where it is real; updates `streams` in place."""
    inputs: list[Tensor] | None = [] if every else None
    if mask is None:
        hidden = backbone.step_embedded(embedded, streams.blocks, inputs=inputs)
        return torch.cat([*(inputs or ()), hidden], -1)
    real = mask[:, 0].nonzero()[:, 0]
    part = take_streams(streams, real)
    hidden = backbone.step_embedded(embedded[real], part.blocks, inputs=inputs)
    for whole, changed in zip(tensors_of(streams), tensors_of(part), strict=True):
        whole[real] = changed
    read = torch.cat([*(inputs or ()), hidden], -1)
    return read.new_zeros(len(embedded), 1, read.shape[-1]).index_copy(0, real, read)
