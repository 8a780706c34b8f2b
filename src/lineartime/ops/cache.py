"""A cache of the keys and values of all tokens that a stream has read."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.ops.tracing import is_traced, under_transform

MIN_ROOM = 64
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
        # A derivative or a traced program needs results that are never written to again.
        if torch.is_grad_enabled() or is_traced() or under_transform():
            return KVCache(torch.cat([self.k, k], -2), torch.cat([self.v, v], -2))
        start, stop = self.position, self.position + k.shape[-2]
        room = self._room
        if room is None or not room.claim(self.k, start, stop):
            capacity = max(MIN_ROOM, stop, 2 * start)
            room = _Room(_with_capacity(self.k, capacity), _with_capacity(self.v, capacity), stop)
        for memory, new in ((room.k, k), (room.v, v)):
            memory.narrow(-2, start, stop - start).copy_(new)
        grown = KVCache(room.k.narrow(-2, 0, stop), room.v.narrow(-2, 0, stop))
        grown._room = room
        return grown

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and send only the contents: two processes would write their tokens to the same place of a shared room."""
        return type(self), ((self.k, self.v) if self._room is None else (self.k.clone(), self.v.clone()))

    def visible(self, new: int) -> Tensor:
        """Which keys are visible to each of the last `new` tokens, bool [new, T]: its own and all earlier ones."""
        total = self.position
        return torch.ones(new, total, dtype=torch.bool, device=self.k.device).tril(total - new)


def each_stream(x: Tensor) -> list[Tensor]:
    """The part of each stream of [B, ...], each in memory of its own: what keeps or saves one must not hold the others."""
    return [part.clone() for part in x.split(1)]


class KVStreams:
    """Keys [B, ..., R, s] and values [B, ..., R, e] of B streams at different positions, with room for R tokens each.

    Zeros follow the tokens of a stream. `append` writes in place; the room grows by doubling.

    Args:
        states: caches to join, each of one or more streams. They are not modified.

    Attributes:
        position: int64 [B], the number of tokens that each stream has read.
        longest: the largest of them, known without reading the tensor.
    """

    def __init__(self, states: Sequence[KVCache]) -> None:
        self.longest = max((state.position for state in states), default=0)
        room = max(MIN_ROOM, 2 * self.longest)
        self._k, self._v = (torch.cat([_with_zeros(x, room) for x in parts]) for parts in zip(*states, strict=True))
        self._features = _features(self._k), _features(self._v)
        positions = [state.position for state in states for _ in range(len(state.k))]
        self.position = torch.tensor(positions, dtype=torch.long, device=self._k.device)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Append one token to every stream, [B, ..., 1, s] and [B, ..., 1, e].

        Returns:
            The keys and values of the longest stream's tokens, [B, ..., T, s] and [B, ..., T, e], and which of them are tokens
            of a stream, bool [B, T].

        Raises:
            ArgumentError: if the new tokens have other heads or widths than the earlier ones.
        """
        found, wanted = self._features, (_features(k), _features(v))
        if found != wanted:
            raise ArgumentError(
                "streams",
                f"has {_described(*found)}, but must have {_described(*wanted)}: give it join_streams([state]) of the same "
                "layer.",
            )
        if self.longest == self._k.shape[-2]:
            with normal_tensors():
                self._k, self._v = (_with_zeros(x, 2 * self.longest) for x in (self._k, self._v))
        rows = torch.arange(len(self.position), device=self.position.device)
        for memory, new in ((self._k, k), (self._v, v)):
            memory.movedim(-2, 1)[rows, self.position] = new.squeeze(-2).to(memory.dtype)
        self.position += 1
        self.longest += 1
        visible = torch.arange(self.longest, device=self.position.device) < self.position[:, None]
        return self._k[..., : self.longest, :], self._v[..., : self.longest, :], visible

    def separate(self, positions: Sequence[int]) -> list[KVCache]:
        """The cache of each stream, whose `positions` are given on the host."""
        parts = zip(self._k.split(1), self._v.split(1), positions, strict=True)
        return [KVCache(k[..., :position, :].clone(), v[..., :position, :].clone()) for k, v, position in parts]


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


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Make new tensors that can be updated in every mode; PyTorch updates those of inference mode only in inference mode."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _with_capacity(x: Tensor, capacity: int) -> Tensor:
    """Allocate memory for `capacity` tokens, the first of which are copied from x [..., T, f]."""
    memory = x.new_empty(*x.shape[:-2], capacity, x.shape[-1])
    memory.narrow(-2, 0, x.shape[-2]).copy_(x)
    return memory


def _with_zeros(x: Tensor, capacity: int) -> Tensor:
    """Append zeros to x [..., T, f] up to `capacity` tokens: a weight of zero does not hide the NaN of unwritten memory."""
    return F.pad(x, (0, 0, 0, capacity - x.shape[-2]))


def _features(x: Tensor) -> tuple[int, ...]:
    """The heads, if any, and the width of x [B, ..., T, f]."""
    return (*x.shape[1:-2], x.shape[-1])


def _described(*features: tuple[int, ...]) -> str:
    shapes = (", ".join(map(str, ("B", *heads, "T", width))) for *heads, width in features)
    return "keys [{}] and values [{}]".format(*shapes)
