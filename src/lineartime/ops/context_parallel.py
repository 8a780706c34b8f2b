"""FLASH's attention over a sequence that several processes hold together, a slice each: context parallelism.

Shapes: B batch, N processes, T tokens of the slice of each, C chunk size, e value width, s query/key width.

The definition is `gated_mixed_chunk_attention` of all N T tokens. Slices begin where chunks do, so that the quadratic part
never leaves its process. The linear part is a sum over chunks, and all that it needs of another process is one s x e matrix:

    own[r]       = sum over the tokens j of slice r of k_lin[j] v[j]^T                                  [B, s, e]
    elsewhere[r] = causal: own[0] + ... + own[r - 1]; otherwise the sum of own over all other processes
    gated[t]     = U[t] * (what t reads in its own slice  +  q_lin[t] . elsewhere[r] / |R(t)|)

R(t), as in mixed_chunk.py, are the tokens of the whole sequence that the linear part of t reads, in this slice and elsewhere.
Once in each pass, matrices of s x e numbers cross processes: forward `own`, and backward the gradient of `elsewhere`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.activations import Activation, Normalization
from lineartime.ops.backends import Backend
from lineartime.ops.gated_mixed_chunk import gated_mixed_chunk_attention, queries_and_keys
from lineartime.ops.mixed_chunk import check_chunk_size
from lineartime.ops.operator import register_operator
from lineartime.ops.precision import matmul_dtype, without_autocast


class ContextGroup(NamedTuple):
    """The processes that hold every sequence together.

    Attributes:
        name: of the process group, which is all that compiled code can carry.
        rank: which slice this process holds, 0 for the first.
        size: N.
    """

    name: str
    rank: int
    size: int


# 1. Across processes --------------------------------------------------------------------------------------------------

_TRANSPOSED = {"before": "after", "after": "before", "others": "others"}
"""Whose gradients a process collects if it has been read by those behind it, before it, or by all others."""


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


def context_parallel_attention(
    projected: Tensor,
    gamma: Tensor,
    beta: Tensor,
    *,
    group: ContextGroup,
    chunk_size: int,
    positions: Tensor | None,
    causal: bool = False,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: Activation = "relu2",
    normalization: Normalization = "count",
    backend: Backend = "auto",
) -> Tensor:
    """`gated_mixed_chunk_attention` of the tokens of this process, which read those of the other processes, too.

    Every process of the group calls this with its slice, in the order of the ranks; gradients flow across processes, so that
    each gets those of its own tokens and the parameters' share in them: their sum over processes is the whole.

    Args:
        projected: [B, T, 2 e + s], the slice; T is the same everywhere, and a multiple of C.
        gamma, beta, chunk_size, causal, bias, activation, normalization, backend: as for `gated_mixed_chunk_attention`.
        group: the processes.
        positions: int [T] or [B, T], counted from the start of the whole sequence; None for no rotation.
        mask, cu_seqlens: must be None.

    Returns:
        [B, T, e].

    Raises:
        ValueError: for a slice that is not whole chunks, for a mask or document boundaries, and for what
            `gated_mixed_chunk_attention` refuses.
    """
    check_chunk_size(chunk_size)
    _check_slice(projected, chunk_size, mask, cu_seqlens)
    length, d_qk = projected.shape[1], gamma.shape[-1]
    elsewhere = length * (group.rank if causal else group.size - 1)
    gated = gated_mixed_chunk_attention(
        projected,
        gamma,
        beta,
        chunk_size=chunk_size,
        positions=positions,
        causal=causal,
        bias=bias,
        activation=activation,
        normalization=normalization,
        elsewhere=elsewhere,
        backend=backend,
    )

    compute = matmul_dtype(projected, gamma)
    wide = torch.promote_types(compute, torch.float32)
    with without_autocast(projected):
        d_value = gated.shape[-1]
        gate, v, z = F.silu(projected).split([d_value, d_value, d_qk], -1)
        q_lin, k_lin = queries_and_keys(z, gamma[2:], beta[2:], positions).unbind(1)
        k_chunks, v_chunks = (x.to(compute).unflatten(1, (-1, chunk_size)) for x in (k_lin, v))
        own = (k_chunks.mT @ v_chunks).to(wide).sum(1)
        read = sum_elsewhere(own, group.name, "before" if causal else "others")
        # All chunks being full, both normalisations divide by the number of their tokens.
        place = torch.arange(length, device=projected.device)
        here = place - place % chunk_size if causal else torch.full_like(place, length)
        scale = 1 / (elsewhere + here).clamp(min=1).to(wide)
        attended = (q_lin * scale[:, None]).to(compute) @ read.to(compute)
        out: Tensor = gated + (gate * attended).to(gated.dtype)
        return out


def _check_slice(projected: Tensor, chunk_size: int, mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Raise ValueError unless it is whole chunks of one sequence without padding."""
    for name, value in (("mask", mask), ("cu_seqlens", cu_seqlens)):
        if value is not None:
            raise ValueError(
                f"{name} is given, but sequences that are split over processes can have neither padding nor document "
                f"boundaries: give every process slices of whole sequences, without {name}."
            )
    length = projected.shape[1]
    if length == 0 or length % chunk_size:
        raise ValueError(
            f"This process holds {length} tokens of a sequence, but slices must be made of whole chunks, chunk_size = "
            f"{chunk_size}: split N times a multiple of {chunk_size} tokens over N processes."
        )
