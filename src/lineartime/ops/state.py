"""What a causal mixer remembers of streams: one class for each mechanism, all with the same operations.

Shapes: B streams, N new tokens, K places of a cache, s key width, e value width; after B, there may be heads.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Self

from lineartime.ops.checks import check_continues, is_readable
from lineartime.ops.modes import is_traced, under_transform
from lineartime.ops.packing import Packing


class State:
    """Base of all states: a dataclass of tensors [B, ...]; `position`, int64 [B], counts the tokens that each stream has read.

    A call that continues streams consumes their state: it may write into its memory, so that only the state that it returns may
    be used afterwards. `clone` keeps a branch.

    A tensor may be longer than the tokens of a stream need; the position tells. An integer field is an upper bound of a size.
    """

    position: Any
    """int64 [B]."""

    def __len__(self) -> int:
        """The number of streams, B."""
        return len(self.position)

    def clone(self) -> Self:
        """A copy in memory of its own, to continue the same streams in several ways."""
        with normal_tensors():
            return self.map(torch.clone)

    def take(self, rows: Tensor) -> Self:
        """A copy of the streams with the indices `rows`, int64, in this order; one may be taken several times."""
        with normal_tensors(torch.is_grad_enabled()):
            return self.map(lambda tensor: tensor[rows])

    @staticmethod
    def concatenate(states: "Sequence[Any]") -> Any:
        """A copy of the streams of several states of one layer or model, at any positions, one after the other."""
        with normal_tensors(torch.is_grad_enabled()):
            return states[0].map(_concatenated, *states[1:])

    def map(self, function: Callable[..., Tensor], *others: Self) -> Self:
        """The state whose tensors are a function of the corresponding tensors of this state and `others`."""
        same = zip(*(leaves(state) for state in (self, *others)), strict=True)
        parts = ([part for _, part in of_states] for of_states in same)
        made = (function(*of) if isinstance(of[0], Tensor) else None if of[0] is None else max(of) for of in parts)
        result: Self = rebuilt(self, made)
        return result

    def tensors(self) -> Iterator[Tensor]:
        """All tensors, in order."""
        return (part for _, part in leaves(self) if isinstance(part, Tensor))

    @property
    def nbytes(self) -> int:
        """The memory of all tensors, in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors())


def leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors, numbers and Nones of a state or a tuple of states, by name: a path of fields, "0.own.position"."""
    if isinstance(state, State):
        parts = [(field.name, getattr(state, field.name)) for field in fields(cast("Any", state))]
    elif isinstance(state, tuple):
        parts = [(str(place), part) for place, part in enumerate(state)]
    else:
        yield name, state
        return
    for field, part in parts:
        yield from leaves(part, f"{name}.{field}" if name else field)


def rebuilt(like: Any, parts: Iterator[Any]) -> Any:
    """A state, or a tuple of states, with other leaves in the same order."""
    if isinstance(like, tuple):
        return tuple(rebuilt(part, parts) for part in like)
    if not isinstance(like, State):
        return next(parts)
    return type(like)(*(rebuilt(getattr(like, field.name), parts) for field in fields(cast("Any", like))))


def _concatenated(*tensors: Tensor) -> Tensor:
    """Tensors [B, ...] one after the other, with zeros at the end of dimensions that are shorter than others."""
    sizes = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    grown = []
    for x in tensors:
        missing = [size - own for size, own in zip(sizes, x.shape[1:], strict=True)]
        grown.append(F.pad(x, [padding for more in reversed(missing) for padding in (0, more)]) if any(missing) else x)
    return torch.cat(grown)


@contextmanager
def normal_tensors(unchanged: bool = False) -> Iterator[None]:
    """Make tensors that can be updated in every mode: PyTorch updates those of inference mode only there."""
    if unchanged or not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def in_place(*tensors: Tensor) -> bool:
    """Whether a token may be written into the memory of a state: nothing that is computed of the tensors needs a derivative."""
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)) and not under_transform()


def writable(x: Tensor) -> Tensor:
    """The tensor, or a copy of it if PyTorch refuses to update it here. Code that is traced has its own rules."""
    return x if is_traced() or not x.is_inference() or torch.is_inference_mode_enabled() else x.clone()


def renewed(old: Tensor, new: Tensor, packing: Packing) -> Tensor:
    """What streams remember in place of `old`: `new`, in the same memory if they have read one token."""
    return writable(old).copy_(new) if packing.longest == 1 and in_place(new, old) else new.contiguous()


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

    def append(self, k: Tensor, v: Tensor, packing: Packing) -> tuple["KVCache", Tensor, Tensor, Tensor]:
        """Append to every stream its new tokens, the first of the rows [B, ..., L, s] and [B, ..., L, e].

        Returns:
            The cache, the keys and values [B, ..., K, f] of all places up to those of the longest stream, and the last place
            that each new token sees, int64 [L], or [B, L] for streams at different positions.

        Raises:
            ArgumentError: if the new tokens have other heads or widths than the earlier ones.
        """
        check_continues(k=(k, self.k), v=(v, self.v))
        new, start = k.shape[-2], packing.common_start if packing.even else None
        longest = self.longest if start is None else start
        if start is None and is_readable(self.position):
            longest = int(self.position.max())
        total = longest + new
        keys, values = (self._with(x, added, longest, start) for x, added in ((self.k, k), (self.v, v)))
        tokens = torch.arange(new, device=k.device)
        last = self.position[:, None] + tokens if start is None else start + tokens
        cache = KVCache(self.position + packing.new, keys, values, total)
        return cache, keys[..., :total, :], values[..., :total, :], last

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
