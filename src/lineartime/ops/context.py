"""The processes that hold every sequence together, a slice each, and what they tell each other."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lineartime.ops.operator import register_operator, under_transform


class ContextGroup(NamedTuple):
    """The processes that hold every sequence together, an equal slice each, in the order of their ranks.

    Attributes:
        name: of the process group; compiled code can carry nothing else.
        rank: which slice this process holds, 0 for the first.
        size: the number of processes.
    """

    name: str
    rank: int
    size: int


def context_group(group: "dist.ProcessGroup") -> ContextGroup:
    """The processes of a group, to share sequences; ValueError in a process outside the group."""
    if dist.get_rank(group) < 0:
        raise ValueError("This process is not in the group: make a context group in those that are.")
    return ContextGroup(group.group_name, dist.get_rank(group), dist.get_world_size(group))


def check_equal_slices(shape: torch.Size, group: ContextGroup, device: torch.device) -> None:
    """Raise ValueError, in all processes alike, unless all of them hold slices of the same shape."""
    own = torch.tensor(shape, device=device)
    gathered = [torch.empty_like(own) for _ in range(group.size)]
    dist.all_gather(gathered, own, group=_process_group(group.name))
    shapes = torch.stack(gathered).tolist()
    if any(other != shapes[0] for other in shapes):
        raise ValueError(
            f"The slices of a sequence have shapes {', '.join(map(str, shapes))} in the {group.size} processes, but must all "
            "be alike: cut every sequence into equal slices."
        )


Elsewhere = Literal["before", "just before", "after", "just after", "others"]
"""Other processes: all or the nearest of those that hold what stands before this process's slice, or behind it, or all."""

_TRANSPOSED = {"before": "after", "just before": "just after", "others": "others"}
_TRANSPOSED |= {after: before for before, after in _TRANSPOSED.items()}
"""Whose gradients a process collects: those of the processes that read it."""


def sum_elsewhere(x: Tensor, group: ContextGroup, reach: Elsewhere) -> Tensor:
    """The sum of x over other processes, zeros if there are none. Every process calls it; gradients flow back across them.

    Raises:
        RuntimeError: under a transform of torch.func.
    """
    if under_transform():
        raise RuntimeError(
            "Sequences that several processes hold together have no forward-mode derivatives and no rules for torch.func: give "
            "every process whole sequences."
        )
    out: Tensor = _sum_elsewhere_operator(x, group.name, reach)
    return out


def _process_group(name: str) -> "dist.ProcessGroup":
    # PyTorch's own compilable collectives find their groups in this way; not every build of it has the module.
    from torch.distributed import distributed_c10d

    resolve: Callable[[str], dist.ProcessGroup] = distributed_c10d._resolve_process_group  # type: ignore[assignment]
    return resolve(name)


def _sum_elsewhere(x: Tensor, group: str, reach: str) -> Tensor:
    processes = _process_group(group)
    if reach == "others":
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=processes)
        return total - x
    rank = dist.get_rank(processes)
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(processes))]
    dist.all_gather(parts, x.contiguous(), group=processes)
    total = torch.zeros_like(parts[rank])
    before, after = parts[:rank], parts[rank + 1 :]
    for part in {"before": before, "just before": before[-1:], "after": after, "just after": after[:1]}[reach]:
        total += part
    return total


def _fake(x: Tensor, group: str, reach: str) -> Tensor:
    return x.new_empty(x.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.group, ctx.reach = inputs


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return _sum_elsewhere_operator(gradient, ctx.group, _TRANSPOSED[ctx.reach]), None, None


_sum_elsewhere_operator = register_operator(
    _sum_elsewhere, _fake, keep_for_backward=_keep_for_backward, differentiate=_differentiate
)
