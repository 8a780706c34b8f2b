"""Ways to continue the streams of a batch: by many tokens at once, by a prefix, and by one token in place.

Shapes: B streams, N new tokens, d model width, L blocks, whose inputs are returned if all hidden vectors are requested.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lineartime.generation.prompts import pieces
from lineartime.layers.streams import take_streams, tensors_of
from lineartime.models.backbone import Backbone
from lineartime.models.streams import BackboneState

Read = Callable[[Tensor, Any], tuple[Tensor, BackboneState]]


def width(backbone: Backbone, every: bool) -> int:
    """The number of features of a token in an output, which also holds the inputs of all blocks if `every` is True."""
    d_model: int = backbone.embedding.weight.shape[1]
    return d_model * (len(list(backbone.blocks)) + 1 if every else 1)


def reader(backbone: Backbone, every: bool) -> Read:
    """Make a function that continues streams at one position, [B, N, d], piece by piece.

    It returns [B, N, d], or [B, N, (L + 1) d] with the inputs of all blocks in front if `every` is True, and the state.
    """

    def read(x: Tensor, state: BackboneState) -> tuple[Tensor, BackboneState]:
        read_pieces = []
        for piece in pieces(x):
            inputs: list[Tensor] | None = [] if every else None
            hidden, state = backbone.extend_embedded(piece, state, inputs=inputs)
            read_pieces.append(torch.cat([*(inputs or ()), hidden], -1))
        return torch.cat(read_pieces, 1), state

    return read


def prefix_reader(backbone: Backbone, every: bool) -> Read:
    """Make a function that reads the prefix with which streams begin, with the same arguments and results."""

    def read(x: Tensor, state: BackboneState) -> tuple[Tensor, BackboneState]:
        inputs: list[Tensor] | None = [] if every else None
        hidden, state = backbone.prefix_embedded(x, inputs=inputs)
        return torch.cat([*(inputs or ()), hidden], -1), state

    return read


def step_streams(backbone: Backbone, embedded: Tensor, mask: Tensor | None, streams: BackboneState, every: bool) -> Tensor:
    """Continue joined streams by one token, [B, 1, d] and bool [B, 1] or None, where it is real; updates `streams` in place."""
    inputs: list[Tensor] | None = [] if every else None
    if mask is None:
        hidden = backbone.step_embedded(embedded, streams, inputs=inputs)
        return torch.cat([*(inputs or ()), hidden], -1)
    real = mask[:, 0].nonzero()[:, 0]
    part = take_streams(streams, real)
    hidden = backbone.step_embedded(embedded[real], part, inputs=inputs)
    for whole, changed in zip(tensors_of(streams), tensors_of(part), strict=True):
        whole[real] = changed
    read = torch.cat([*(inputs or ()), hidden], -1)
    return read.new_zeros(len(embedded), 1, read.shape[-1]).index_copy(0, real, read)
