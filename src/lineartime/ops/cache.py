"""A cache of the keys and values of all tokens that a stream has read."""

from typing import NamedTuple

import torch
from torch import Tensor

from lineartime.ops.operator import is_traced

SMALLEST_ROOM = 64
"""The number of tokens that a cache has room for when it first grows."""


class _KeysAndValues(NamedTuple):
    k: Tensor
    v: Tensor


class KVCache(_KeysAndValues):
    """Keys [..., T, s] and values [..., T, e] of the T tokens so far; the leading dimensions are streams, and perhaps heads."""

    _room: "_Room | None" = None
    """The memory that begins with the tensors; not a field, because it is not part of the contents."""

    @property
    def position(self) -> int:
        """The number of tokens read so far."""
        return self.k.shape[-2]

    def append(self, k: Tensor, v: Tensor) -> "KVCache":
        """Return the cache extended by more tokens; this one is not modified.

        Memory grows by doubling. If the room after this cache is unused, its tokens are not copied.
        """
        k, v = k.to(self.k.dtype), v.to(self.v.dtype)
        differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (k, v, self.k, self.v))
        if differentiated or is_traced():  # both need results that are never written to again
            return KVCache(torch.cat([self.k, k], -2), torch.cat([self.v, v], -2))
        start, stop = self.position, self.position + k.shape[-2]
        room = self._room
        if room is None or not room.claim(self.k, start, stop):
            capacity = max(SMALLEST_ROOM, stop, 2 * start)
            room = _Room(_with_capacity(self.k, capacity), _with_capacity(self.v, capacity), stop)
        for memory, new in ((room.k, k), (room.v, v)):
            memory.narrow(-2, start, stop - start).copy_(new)
        grown = KVCache(room.k.narrow(-2, 0, stop), room.v.narrow(-2, 0, stop))
        grown._room = room
        return grown

    def visible(self, new: int) -> Tensor:
        """Which keys are visible to each of the last `new` tokens, bool [new, T]: its own and all earlier ones."""
        total = self.position
        return torch.ones(new, total, dtype=torch.bool, device=self.k.device).tril(total - new)


class _Room:
    """Memory shared by several caches, each the beginning of the next; the first to extend the last one gets the free room."""

    def __init__(self, k: Tensor, v: Tensor, used: int) -> None:
        self.k, self.v = k, v
        self._used = [used]  # at most one number: taking it out is atomic, so that threads cannot claim the same place

    def claim(self, k: Tensor, start: int, stop: int) -> bool:
        """Reserve the places from `start` to `stop`, if free, for a caller whose keys `k` are the first `start` tokens."""
        if k.data_ptr() != self.k.data_ptr() or stop > self.k.shape[-2]:  # from other memory, or no more room
            return False
        if self.k.is_inference() and not torch.is_inference_mode_enabled():  # PyTorch refuses to write to it
            return False
        try:
            used = self._used.pop()
        except IndexError:
            return False
        granted = used == start
        self._used.append(stop if granted else used)
        return granted


def _with_capacity(x: Tensor, capacity: int) -> Tensor:
    """Allocate memory for `capacity` tokens, the first of which are copied from x [..., T, f]."""
    memory = x.new_empty(*x.shape[:-2], capacity, x.shape[-1])
    memory.narrow(-2, 0, x.shape[-2]).copy_(x)
    return memory
