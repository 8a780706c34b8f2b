"""States of streams as trees of tensors [B, ...], with or without a token shift, and streams at different positions.

Shapes: B streams, N new tokens, d model width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, SupportsIndex

import torch
from torch import Tensor

from lineartime.errors import ArgumentError


class StreamState(Protocol):
    """What a causal mixer remembers of streams: a NamedTuple whose first field is a tensor [B, ...]."""

    @property
    def position(self) -> int:
        """The number of tokens read so far."""

    def __getitem__(self, index: SupportsIndex, /) -> Any:
        """A field."""


class ShiftedState(NamedTuple):
    """What a mixer with a token shift remembers of streams, whether they stand at one position or were joined.

    Attributes:
        last: [B, h], the normed features of the last token that are shifted into the next one.
        own: the state of the mixer itself.
    """

    last: Tensor
    own: Any

    @property
    def position(self) -> Any:
        """The number of tokens read so far, as the mixer's own state holds it."""
        return self.own.position


class RaggedState(NamedTuple):
    """What a mixer remembers of streams at different positions, as `extend` with a mask returns it.

    Attributes:
        rows: the indices of the streams in each group; a group has the streams at one position.
        states: the state of each group.
    """

    rows: tuple[tuple[int, ...], ...]
    states: tuple[Any, ...]

    @property
    def position(self) -> list[int]:
        """The number of tokens that each stream has read."""
        positions = [(row, state.position) for rows, state in zip(self.rows, self.states, strict=True) for row in rows]
        return [position for _, position in sorted(positions)]


def extend_ragged(
    extend: Callable[[Tensor, Any], tuple[Tensor, Any]], x: Tensor, state: Any, mask: Tensor | None
) -> tuple[Tensor, Any]:
    """Continue each stream by its own real tokens; streams with equal positions and token counts are computed together.

    Args:
        extend: continues streams at the same position by tokens without padding.
        x: [B, N, d].
        state: the state of streams at the same position, or a `RaggedState`.
        mask: bool [B, N], True for real tokens; None if all are real.

    Returns:
        What `extend` returns: outputs [B, N, ...], with zeros at padding, and the state, which is a `RaggedState` unless all
        streams are at the same position. If all is padding, zeros of the shape of x.
    """
    if mask is None and not isinstance(state, RaggedState):
        return extend(x, state)
    batch, length = x.shape[:2]
    if not batch:
        return torch.zeros_like(x), state
    counts = [length] * batch if mask is None else mask.sum(1).tolist()
    groups = list(zip(*state, strict=True)) if isinstance(state, RaggedState) else [(tuple(range(batch)), state)]
    out: Tensor | None = None
    after: dict[int, list[tuple[tuple[int, ...], Any]]] = {}
    for rows, group_state in groups:
        for count in sorted({counts[row] for row in rows}):
            places = [place for place, row in enumerate(rows) if counts[row] == count]
            chosen = tuple(rows[place] for place in places)
            part = group_state if len(places) == len(rows) else take_streams(group_state, torch.tensor(places, device=x.device))
            if count:
                index = torch.tensor(chosen, device=x.device)
                real = torch.ones_like(x[..., 0], dtype=torch.bool) if mask is None else mask
                tokens = real[index].nonzero()[:, 1].view(len(chosen), count)
                read, part = extend(x[index[:, None], tokens], part)
                out = read.new_zeros(batch, length, *read.shape[2:]) if out is None else out
                out = out.index_put((index[:, None], tokens), read)
            after.setdefault(part.position, []).append((chosen, part))
    return torch.zeros_like(x) if out is None else out, _grouped(after, x.device)


def group_streams(states: Sequence[Any]) -> Any:
    """Join states of streams, each at one position: a `RaggedState` unless all of them, at least one, are at the same."""
    groups: dict[int, list[tuple[tuple[int, ...], Any]]] = {}
    row = 0
    for state in states:
        rows = tuple(range(row, row := row + count_streams(state)))
        groups.setdefault(state.position, []).append((rows, state))
    return _grouped(groups, next(tensors_of(states[0])).device)


def _grouped(groups: dict[int, list[tuple[tuple[int, ...], Any]]], device: torch.device) -> Any:
    """Merge the groups at each position; a state in the order of the rows if only one is left, else a `RaggedState`."""
    joined = [_join(parts) for _, parts in sorted(groups.items())]
    if len(joined) == 1:
        ((rows, one),) = joined
        in_order = rows == tuple(range(len(rows)))
        return one if in_order else take_streams(one, torch.tensor(rows, device=device).argsort())
    return RaggedState(tuple(rows for rows, _ in joined), tuple(one for _, one in joined))


def _join(parts: list[tuple[tuple[int, ...], Any]]) -> tuple[tuple[int, ...], Any]:
    """Merge groups of streams at the same position into one group."""
    rows = tuple(row for rows, _ in parts for row in rows)
    return rows, parts[0][1] if len(parts) == 1 else join_groups([state for _, state in parts])


def join_groups(states: Sequence[Any]) -> Any:
    """Join several states at the same position into one state of all their streams."""
    return map_tensors(lambda *tensors: torch.cat(tensors), *states)


def take_streams(state: Any, rows: Tensor) -> Any:
    """Select the streams with the indices `rows`, int64, in this order."""
    if isinstance(state, RaggedState):
        return _take_ragged(state, rows)
    return map_tensors(lambda tensor: tensor[rows], state)


def count_streams(state: Any) -> int:
    """The number of streams, B."""
    return sum(map(len, state.rows)) if isinstance(state, RaggedState) else len(next(tensors_of(state)))


def single_streams(state: Any) -> list[Any]:
    """The states of the streams one by one, in order; the tensors are views."""
    groups = zip(*state, strict=True) if isinstance(state, RaggedState) else [(range(count_streams(state)), state)]
    of_row = {
        row: map_tensors(lambda tensor, place=place: tensor[place : place + 1], part)
        for rows, part in groups
        for place, row in enumerate(rows)
    }
    return [of_row[row] for row in sorted(of_row)]


def _take_ragged(state: RaggedState, rows: Tensor) -> Any:
    wanted = rows.tolist()
    taken: dict[int, list[tuple[tuple[int, ...], Any]]] = {}
    for group, part in zip(*state, strict=True):
        places = [place for place, row in enumerate(wanted) if row in group]
        if places:
            own = torch.tensor([group.index(wanted[place]) for place in places], device=rows.device)
            taken.setdefault(part.position, []).append((tuple(places), take_streams(part, own)))
    return _grouped(taken, rows.device) if taken else take_streams(state.states[0], rows)


def tensors_of(state: Any) -> Iterator[Tensor]:
    """All tensors of a state, in order."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, tuple):
        for part in state:
            yield from tensors_of(part)


def map_tensors(function: Callable[..., Any], *states: Any) -> Any:
    """Apply a function to the corresponding tensors of states of the same structure; keep the rest of the first state."""
    first = states[0]
    if isinstance(first, Tensor):
        return function(*states)
    if isinstance(first, tuple):
        mapped = [map_tensors(function, *parts) for parts in zip(*states, strict=True)]
        return type(first)(*mapped) if hasattr(first, "_fields") else tuple(mapped)
    return first


@dataclass(frozen=True)
class TensorKind:
    """The shape and the dtype of a tensor. A layer that is being exported can keep them, but no tensor of the export."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def structure_of(state: Any) -> Any:
    """A state with a `TensorKind` in place of each tensor."""
    return map_tensors(lambda tensor: TensorKind(tuple(tensor.shape), tensor.dtype), state)


def check_state(state: Any, template: Any, layer: str, name: str = "state") -> None:
    """Raise ArgumentError unless a state has the structure of `template`, that of the layer's own state of zero streams.

    The first dimension of a tensor counts the streams. Any other dimension that is 0 in the template grows with the tokens.
    """
    advice = "give it the state that init_state or extend of the same layer returned"
    kind = Tensor if isinstance(template, TensorKind) else type(template)
    if not isinstance(state, Tensor) if kind is Tensor else type(state) is not kind:
        raise ArgumentError(name, f"is a {type(state).__name__}, but {layer} needs a {kind.__name__}: {advice}.")
    if isinstance(template, TensorKind):
        wanted = template.shape[1:]
        if state.dtype.is_floating_point != template.dtype.is_floating_point:
            raise ArgumentError(name, f"has dtype {state.dtype}, but {layer} needs {template.dtype}: {advice}.")
        fits = state.dim() == len(template.shape) and all(b in (0, a) for a, b in zip(state.shape[1:], wanted, strict=True))
        if not fits:
            expected = ", ".join(["B", *(str(size) if size else "any" for size in wanted)])
            raise ArgumentError(name, f"has shape {list(state.shape)}, but {layer} needs [{expected}]: {advice}.")
    elif isinstance(template, tuple):
        fields = getattr(template, "_fields", range(len(template)))
        for field, part, own in zip(fields, state, template, strict=True):
            check_state(part, own, layer, f"{name}.{field}")
    elif isinstance(template, int) and state < 0:
        raise ArgumentError(name, f"is {state}, but must not be negative: {advice}.")
