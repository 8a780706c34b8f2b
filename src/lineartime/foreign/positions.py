"""Positions of checkpoints of other packages: T5's relative bias, and rotations of a part of the features.

Shapes: Q queries, K keys, T tokens, s query/key width.
"""

import math

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.errors import ArgumentError
from lineartime.layers.dense import FactoryOptions
from lineartime.layers.positions import RelativeBias
from lineartime.ops.batch import Batch
from lineartime.ops.modes import look_up
from lineartime.ops.positions import by_distance

N_BUCKETS, FARTHEST_BUCKET = 32, 128
"""As in T5: the number of buckets, and the distance from which on all keys share one bucket."""


class BucketBias(RelativeBias):
    """A learned relative bias of any length by buckets of distances, as in T5: see `distance_buckets`."""

    def __init__(self, causal: bool, **factory: Unpack[FactoryOptions]) -> None:
        super().__init__()
        self.causal = causal
        self.values = nn.Parameter(torch.empty(N_BUCKETS, **factory))
        self.reset_parameters()

    def forward(self, query_positions: Tensor, key_positions: Tensor, batch: Batch | None = None) -> Tensor:
        """The bias [Q, K] for positions [Q] and [K]."""
        offsets = torch.arange(-FARTHEST_BUCKET, FARTHEST_BUCKET + 1, device=self.values.device)
        table = look_up(self.values, distance_buckets(offsets, self.causal))
        wanted = key_positions[None, :] - query_positions[:, None]
        return look_up(table, wanted.clamp(-FARTHEST_BUCKET, FARTHEST_BUCKET) + FARTHEST_BUCKET)

    def consecutive(self, n_queries: int, n_keys: int, first_query: int = 0, batch: Batch | None = None) -> Tensor:
        """The bias [Q, K] for queries first_query, ..., and keys 0, 1, ..., without indexing: see `by_distance`."""
        offsets = torch.arange(max(0, n_queries + n_keys - 1), device=self.values.device) - (first_query + n_queries - 1)
        chosen = distance_buckets(offsets, self.causal)[:, None] == torch.arange(N_BUCKETS, device=self.values.device)
        return by_distance(torch.where(chosen, self.values, 0.0).sum(-1), n_queries, n_keys)


def distance_buckets(offsets: Tensor, causal: bool) -> Tensor:
    """The bucket of each offset j - t, int64, as in T5 (arXiv 1910.10683): one for each near distance, then logarithmic.

    If causal, all buckets are for earlier keys, and later keys share the bucket of the token itself. Otherwise, half of the
    buckets are for later keys.
    """
    buckets = N_BUCKETS if causal else N_BUCKETS // 2
    near = buckets // 2
    distance = (-offsets).clamp(min=0) if causal else offsets.abs()
    # The 1e-3 decides at powers of two, where rounding could go either way; no other distance is within 1e-2 of a border.
    octaves = (distance.clamp(min=1).float() / near).log() / math.log(FARTHEST_BUCKET / near)
    far = (near + (octaves * (buckets - near) + 1e-3).long()).clamp(max=buckets - 1)
    bucket = torch.where(distance < near, distance, far)
    return bucket if causal else bucket + (offsets > 0) * buckets


def in_part(rotations: Tensor, width: int) -> Tensor:
    """Extend the rotations of some features by angles of zero for the others, [2, ..., f] -> [2, ..., width / 2].

    The first f features of each half of vectors of that width are rotated.
    """
    still = rotations.new_ones(*rotations.shape[1:-1], width // 2 - rotations.shape[-1])
    return torch.cat([rotations, torch.stack([still, torch.zeros_like(still)])], -1)


def check_rotary_width(rotary_width: int | None, width: int) -> None:
    """Raise ArgumentError unless `rotary_width` features of vectors of this width can be rotated; None means all."""
    if rotary_width is not None and (rotary_width % 2 or not 2 <= rotary_width <= width):
        raise ArgumentError(
            "rotary_width", f"is {rotary_width}, but must be an even number from 2 to {width}, or None for all."
        )
