"""The keys and values of all tokens that streams have read.

Shapes: B streams, N new tokens, K places of the cache, s key width, e value width; after B, there may be heads.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.batch import Batch
from lineartime.ops.checks import check_continues, is_readable
from lineartime.ops.state import State, normal_tensors, writable
from lineartime.ops.tracing import is_traced, under_transform

MIN_ROOM = 64
"""The number of tokens that a cache has room for when it first grows."""


@dataclass(eq=False)
class KVCache(State):
    """Keys and values of streams at any positions, with room for more; memory grows by doubling.

    Attributes:
        position: int64 [B], the number of tokens that each stream has read.
        k, v: [B, ..., room, s] and [B, ..., room, e]; the places after a stream's tokens hold finite numbers.
        longest: an upper bound of the positions, known without reading the tensor.
    """

    position: Tensor
    k: Tensor
    v: Tensor
    longest: int = 0

    def append(self, k: Tensor, v: Tensor, batch: Batch) -> tuple["KVCache", Tensor, Tensor, Tensor]:
        """Append N tokens to every stream, or the first ones that are real: [B, ..., N, s] and [B, ..., N, e].

        Returns:
            The cache, the keys and values [B, ..., K, f] of all places up to those of the longest stream, and which of them
            each new token sees, bool [N, K], or [B, N, K] for streams at different positions.

        Raises:
            ArgumentError: if the new tokens have other heads or widths than the earlier ones.
        """
        check_continues(k=(k, self.k), v=(v, self.v))
        new, start = k.shape[-2], batch.start if batch.counts is None else None
        longest = self._longest if start is None else start
        total = longest + new
        keys, values = (self._with(x, added, longest, start) for x, added in ((self.k, k), (self.v, v)))
        position = self.position + (new if batch.counts is None else batch.counts)
        tokens = torch.arange(total, device=k.device)
        if start is None:
            visible = tokens <= (self.position[:, None] + torch.arange(new, device=k.device))[..., None]
        else:
            visible = tokens <= torch.arange(start, total, device=k.device)[:, None]
        cache = KVCache(position, keys, values, total)
        return cache, keys[..., :total, :], values[..., :total, :], visible

    @property
    def _longest(self) -> int:
        """The largest position, exactly where the host can read it."""
        return int(self.position.max()) if is_readable(self.position) else self.longest

    def _with(self, memory: Tensor, new: Tensor, longest: int, start: int | None) -> Tensor:
        """Memory that holds new tokens after those of each stream, of which the longest has `longest`."""
        new = new.to(memory.dtype)
        total = longest + new.shape[-2]
        # A derivative or a traced program needs results that are never written to again.
        functional = torch.is_grad_enabled() or is_traced() or under_transform()
        if functional and start is not None:
            return torch.cat([memory[..., :start, :], new], -2)
        if memory.shape[-2] < total:
            with normal_tensors(torch.is_grad_enabled()):
                memory = F.pad(memory[..., :longest, :], (0, 0, 0, max(MIN_ROOM, total, 2 * longest) - longest))
        elif not functional:
            memory = writable(memory)
        if not functional and start is not None:
            memory.narrow(-2, start, new.shape[-2]).copy_(new)
            return memory
        places = self.position[:, None] + torch.arange(new.shape[-2], device=new.device)
        index = places.view(len(places), *[1] * (new.dim() - 3), new.shape[-2], 1).expand_as(new)
        return memory.scatter(-2, index, new) if functional else memory.scatter_(-2, index, new)
