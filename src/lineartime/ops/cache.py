"""Keys and values of all tokens that a stream has read: a cache that grows with them."""

from typing import NamedTuple

import torch
from torch import Tensor


class KVCache(NamedTuple):
    """Keys [..., T, s] and values [..., T, e] of the T tokens so far; the leading dimensions are streams, and perhaps heads."""

    k: Tensor
    v: Tensor

    @property
    def position(self) -> int:
        """The number of tokens read so far."""
        return self.k.shape[-2]

    def append(self, k: Tensor, v: Tensor) -> "KVCache":
        """The cache after more tokens; this one stays as it is."""
        return KVCache(torch.cat([self.k, k.to(self.k.dtype)], -2), torch.cat([self.v, v.to(self.v.dtype)], -2))

    def visible(self, new: int) -> Tensor:
        """Which keys each of the last `new` tokens reads, bool [new, T]: itself and all before."""
        total = self.position
        return torch.ones(new, total, dtype=torch.bool, device=self.k.device).tril(total - new)
