"""Groups of processes that each hold a slice of every sequence, and their communication."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.ops.modes import under_transform
from lineartime.ops.operator import register_operator


class ContextGroup(NamedTuple):
    """Processes that each hold an equal slice of every sequence, in the order of their ranks.

    Attributes:
        name: the name of the process group, its only form that compiled code can carry.
        rank: the index of the slice that this process holds, 0 for the first.
        size: the number of processes.
    """

    name: str
    rank: int
    size: int


def context_group(group: "dist.ProcessGroup") -> ContextGroup:
    """Make a context group of a process group; ArgumentError in a process outside the group."""
    if dist.get_rank(group) < 0:
        raise ArgumentError("group", "does not contain this process: make a context group only in its own processes.")
    return ContextGroup(group.group_name, dist.get_rank(group), dist.get_world_size(group))


def check_equal_slices(shape: torch.Size, group: ContextGroup, device: torch.device) -> None:
    """Raise ArgumentError in all processes unless all of them hold slices of the same shape."""
    own = torch.tensor(shape, device=device)
    gathered = [torch.empty_like(own) for _ in range(group.size)]
    dist.all_gather(gathered, own, group=_process_group(group.name))
    shapes = torch.stack(gathered).tolist()
    if any(other != shapes[0] for other in shapes):
        raise ArgumentError(
            "ids",
            f"has the shapes {', '.join(map(str, shapes))} in the {group.size} processes, but must have the same in all: cut "
            "every sequence into equal slices.",
        )


OtherProcesses = Literal["before", "just before", "after", "just after", "others"]
"""Other processes: all that hold earlier slices, the previous one, all that hold later slices, the next one, or all."""

_TRANSPOSED = {"before": "after", "just before": "just after", "others": "others"}
_TRANSPOSED |= {after: before for before, after in _TRANSPOSED.items()}
"""The processes whose gradients a process sums in the backward pass: those that read its x."""


def sum_elsewhere(x: Tensor, group: ContextGroup, reach: OtherProcesses) -> Tensor:
    """Sum x over other processes; zeros if there are none. Every process must call it. Gradients flow back across processes.

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
    # PyTorch's own compilable collectives find their groups in this way; not every build of PyTorch has the module.
    from torch.distributed import distributed_c10d

    resolve: Callable[[str], dist.ProcessGroup] = distributed_c10d._resolve_process_group  # type: ignore[assignment]  # PyTorch does not type it
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


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.group, ctx.reach = inputs


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return _sum_elsewhere_operator(gradient, ctx.group, _TRANSPOSED[ctx.reach]), None, None


_sum_elsewhere_operator = register_operator(
    _sum_elsewhere,
    lambda x, _group, _reach: x.new_empty(x.shape),
    keep_for_backward=_keep_for_backward,
    differentiate=_differentiate,
)
