"""Mixed chunk attention over a sequence that several processes hold together, a slice each: context parallelism.

Shapes: B batch, N processes, T tokens of the slice of each, C chunk size, e value width, s query/key width.

The definition is `gated_mixed_chunk_attention` of all N T tokens. Slices begin where chunks do, so that the quadratic part
never leaves its process. The linear part is a sum over chunks: of another process it needs a single s x e matrix:

    own[r]       = sum over the tokens j of slice r of k_lin[j] v[j]^T                                  [B, s, e]
    elsewhere[r] = causal: own[0] + ... + own[r - 1]; otherwise the sum of own over all other processes
    gated[t]     = U[t] * (what t reads in its own slice  +  q_lin[t] . elsewhere[r] / |R(t)|)

R(t), as in reference.py, are the tokens of the whole sequence that the linear part of t reads, in this slice and elsewhere.
Matrices of s x e numbers cross processes once in each pass: forward `own`, backward the gradient of `elsewhere`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lineartime.ops.layout import ContextGroup, Layout
from lineartime.ops.mixed_chunk.inputs import MixedChunkOptions, Projected, queries_and_keys
from lineartime.ops.operator import register_operator, under_transform
from lineartime.ops.precision import acc_dtype, matmul_dtype, without_autocast

# 1. Across processes --------------------------------------------------------------------------------------------------

_TRANSPOSED = {"before": "after", "after": "before", "others": "others"}
"""Whose gradients a process collects if it was read by those behind it, before it, or by all others."""


def _process_group(name: str) -> "dist.ProcessGroup":
    # PyTorch's own compilable collectives find their groups in this way; not every build of it has the module.
    from torch.distributed import distributed_c10d

    resolve: Callable[[str], dist.ProcessGroup] = distributed_c10d._resolve_process_group  # type: ignore[assignment]
    return resolve(name)


def _sum_elsewhere(x: Tensor, group: str, reach: str) -> Tensor:
    """The sum of x over other processes: those "before" this one, "after" it, or all "others"; zeros if there are none."""
    processes = _process_group(group)
    if reach == "others":
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=processes)
        return total - x
    rank = dist.get_rank(processes)
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(processes))]
    dist.all_gather(parts, x.contiguous(), group=processes)
    total = torch.zeros_like(parts[rank])
    for part in parts[:rank] if reach == "before" else parts[rank + 1 :]:
        total += part
    return total


def _fake(x: Tensor, group: str, reach: str) -> Tensor:
    return x.new_empty(x.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.group, ctx.reach = inputs


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return sum_elsewhere(gradient, ctx.group, _TRANSPOSED[ctx.reach]), None, None


sum_elsewhere = register_operator(_sum_elsewhere, _fake, keep_for_backward=_keep_for_backward, differentiate=_differentiate)


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


# 2. Attention ---------------------------------------------------------------------------------------------------------


def attend(
    here: Callable[[Projected, Tensor | None, Layout, MixedChunkOptions], Tensor],
    group: ContextGroup,
    projected: Projected,
    bias: Tensor | None,
    layout: Layout,
    options: MixedChunkOptions,
) -> Tensor:
    """Attend to the tokens of this process by the form `here`, and to those of the other processes of the group.

    Every process of the group calls this with its slice. Gradients flow across processes: each process gets the gradient of its
    own tokens and its share of the parameters' gradient, which is the sum of the shares.

    Returns:
        [B, T, e].

    Raises:
        ValueError: for a slice that is not whole chunks.
    """
    _check_slice(projected.tokens.shape[1], options.chunk_size)
    if under_transform():
        raise RuntimeError(
            "Sequences that several processes hold together have no forward-mode derivatives and no rules for torch.func: give "
            "every process whole sequences."
        )
    gated = here(projected, bias, layout, options)
    compute, causal = matmul_dtype(projected.tokens, projected.gamma), options.causal
    with without_autocast(projected.tokens):
        gate, v, z = projected.activate()
        q_lin, k_lin = queries_and_keys(z, projected.gamma[2:], projected.beta[2:], layout.rotations).unbind(1)
        k_chunks, v_chunks = (x.to(compute).unflatten(1, (-1, options.chunk_size)) for x in (k_lin, v))
        own = (k_chunks.mT @ v_chunks).to(acc_dtype(v_chunks)).sum(1)
        read = sum_elsewhere(own, group.name, "before" if causal else "others")
        # All chunks are full, so that all normalisations count their tokens.
        length = projected.tokens.shape[1]
        place = torch.arange(length, device=v.device)
        in_slice = place - place % options.chunk_size if causal else torch.full_like(place, length)
        scale = 1 / options.linear_divisor(layout.elsewhere(causal) + in_slice).to(own.dtype)
        attended = (q_lin * scale[:, None]).to(compute) @ read.to(compute)
        out: Tensor = gated + (gate * attended).to(gated.dtype)
        return out


def _check_slice(length: int, chunk_size: int) -> None:
    """Raise ValueError unless it is whole chunks."""
    if length == 0 or length % chunk_size:
        raise ValueError(
            f"This process holds {length} tokens of a sequence, but slices must be made of whole chunks, chunk_size = "
            f"{chunk_size}: split N times a multiple of {chunk_size} tokens over N processes."
        )
