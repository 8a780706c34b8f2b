"""What a causal mixer remembers of streams: one class for each mechanism, all with the same operations.

Shapes: B streams.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Self

from lineartime.ops.tracing import is_traced, under_transform


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
        return type(self)(*(_mapped(function, *parts) for parts in zip(*map(_parts, (self, *others)), strict=True)))

    def tensors(self) -> Iterator[Tensor]:
        """All tensors, in order."""
        for part in _parts(self):
            yield from _tensors(part)

    @property
    def nbytes(self) -> int:
        """The memory of all tensors, in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors())


def _parts(state: Any) -> list[Any]:
    return [getattr(state, field.name) for field in fields(state)]


def _mapped(function: Callable[..., Tensor], *parts: Any) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return function(*parts)
    if isinstance(first, State):
        return first.map(function, *parts[1:])
    if isinstance(first, tuple):
        return tuple(_mapped(function, *of_item) for of_item in zip(*parts, strict=True))
    return None if first is None else max(parts)


def _tensors(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, State):
        yield from part.tensors()
    elif isinstance(part, tuple):
        for item in part:
            yield from _tensors(item)


def _concatenated(*tensors: Tensor) -> Tensor:
    """Tensors [B, ...] one after the other, with zeros at the end of dimensions that are shorter than others."""
    sizes = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    return torch.cat([_grown(tensor, sizes) for tensor in tensors])


def _grown(x: Tensor, sizes: Sequence[int]) -> Tensor:
    missing = [size - own for size, own in zip(sizes, x.shape[1:], strict=True)]
    return F.pad(x, [padding for more in reversed(missing) for padding in (0, more)]) if any(missing) else x


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
