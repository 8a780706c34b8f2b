"""States of streams as layers check them, and streams at different positions, one group after another.

Shapes: B streams, N new tokens, d model width.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.ops.batch import Batch, Needs
from lineartime.ops.make_batch import stream_batch
from lineartime.ops.state import State

ADVICE = "give it the state that init_state or extend of the same layer returned"


@dataclass(eq=False)
class ShiftedState(State):
    """What a mixer with a token shift remembers of streams.

    Attributes:
        last: [B, h], the normed features of the last token that are shifted into the next one.
        own: the state of the mixer itself.
    """

    last: Tensor
    own: Any

    @property
    def position(self) -> Tensor:
        """int64 [B], the number of tokens that each stream has read."""
        position: Tensor = self.own.position
        return position


def by_position(
    mix_next: Callable[[Tensor, Any, Batch], tuple[Tensor, Any]], x: Tensor, state: Any, batch: Batch, needs: Needs
) -> tuple[Tensor, Any]:
    """Continue streams in groups that stand at one position and get the same number of tokens: [B, N, d] -> [B, N, d].

    Real tokens come first in their row. The outputs of others are zeros.
    """
    streams, new = x.shape[:2]
    counts = [new] * streams if batch.counts is None else batch.counts.tolist()
    groups: dict[tuple[int, int], list[int]] = {}
    for row, group in enumerate(zip(state.position.tolist(), counts, strict=True)):
        groups.setdefault(group, []).append(row)
    out, parts = torch.zeros_like(x), []
    for (start, count), rows in groups.items():
        index = torch.tensor(rows, device=x.device)
        own = state.take(index)
        if count:
            here = replace(stream_batch(own.position, (len(rows), count), needs=needs), start=start)
            read, own = mix_next(x[index, :count], own, here)
            tokens = torch.arange(count, device=x.device)
            out = out.to(read.dtype).index_put((index[:, None], tokens), read)
        parts.append(own)
    if not parts:
        return out, state
    order = torch.tensor([row for rows in groups.values() for row in rows], device=x.device)
    return out, State.concatenate(parts).take(order.argsort())


def check_state(state: Any, template: Any, layer: str, device: torch.device, name: str = "state") -> None:
    """Raise ArgumentError unless a state has the structure of `template`, the layer's own state of zero streams.

    The first dimension of a tensor counts the streams. Any other dimension that is 0 in the template grows with the tokens.
    """
    if type(state) is not type(template):
        raise ArgumentError(name, f"is a {type(state).__name__}, but {layer} needs a {type(template).__name__}: {ADVICE}.")
    for field in fields(template):
        part, own, named = getattr(state, field.name), getattr(template, field.name), f"{name}.{field.name}"
        if isinstance(own, State):
            check_state(part, own, layer, device, named)
        elif isinstance(own, Tensor):
            wanted = own.shape[1:]
            fits = part.dim() == own.dim() and all(b in (0, a) for a, b in zip(part.shape[1:], wanted, strict=True))
            if not fits:
                expected = ", ".join(["B", *(str(size) if size else "any" for size in wanted)])
                raise ArgumentError(named, f"has shape {list(part.shape)}, but {layer} needs [{expected}]: {ADVICE}.")
            if part.dtype.is_floating_point != own.dtype.is_floating_point:
                raise ArgumentError(named, f"has dtype {part.dtype}, but {layer} needs {own.dtype}: {ADVICE}.")
            if part.device != device:
                raise ArgumentError(name, f"is on {part.device}, but must be on {device}, like x.")
