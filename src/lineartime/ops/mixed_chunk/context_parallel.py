"""Context parallelism: mixed chunk attention over a sequence that is split over several processes, a slice for each.

Shapes: B batch, N processes, T tokens of the slice of each, C chunk size, e value width, s query/key width.

The result is that of `gated_mixed_chunk_attention` for all N T tokens. Slices begin at chunk boundaries, so the quadratic part
needs no communication. The linear part is a sum over chunks, so it needs a single s x e matrix from each other process:

    own[r]       = sum over the tokens j of slice r of k_lin[j] v[j]^T                                  [B, s, e]
    elsewhere[r] = causal: own[0] + ... + own[r - 1]; otherwise the sum of own over all other processes
    gated[t]     = U[t] * (the output of t in its own slice  +  q_lin[t] . elsewhere[r] / |R(t)|)

R(t), as in reference.py, are the tokens of the whole sequence that the linear part of t covers, in this slice and elsewhere.
Each pass exchanges matrices of s x e numbers once: `own` in the forward pass, the gradient of `elsewhere` in the backward pass.
"""

import torch
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.ops.batch import Batch
from lineartime.ops.context import ContextGroup, sum_elsewhere
from lineartime.ops.mixed_chunk.inputs import MixedChunkOptions, Projected, queries_and_keys
from lineartime.ops.precision import acc_dtype, matmul_dtype, without_autocast


def attend_elsewhere(group: ContextGroup, projected: Projected, batch: Batch, options: MixedChunkOptions) -> Tensor:
    """What the tokens of this process read in the other processes of the group, U * q_lin . elsewhere / |R|: [B, T, e].

    Every process of the group must call this with its slice. Gradients flow across processes. Each process gets the gradient of
    its own tokens and a share of the parameters' gradient, which is the sum of the shares of all processes.

    Raises:
        ArgumentError: if a slice does not consist of whole chunks.
    """
    length, size = projected.tokens.shape[1], options.chunk_size
    if length == 0 or length % size:
        raise ArgumentError(
            "x",
            f"has {length} tokens of a sequence in this process, but must have whole chunks, chunk_size = {size}: split "
            f"N times a multiple of {size} tokens over N processes.",
        )
    compute, causal = matmul_dtype(projected.tokens, projected.gamma), options.causal
    with without_autocast(projected.tokens):
        gate, v, z = projected.activate()
        q_lin, k_lin = queries_and_keys(z, projected.gamma[2:], projected.beta[2:], batch.rotations).unbind(1)
        k_chunks, v_chunks = (x.to(compute).unflatten(1, (-1, size)) for x in (k_lin, v))
        own = (k_chunks.mT @ v_chunks).to(acc_dtype(v_chunks)).sum(1)
        read = sum_elsewhere(own, group, "before" if causal else "others")
        # All chunks are full, so every normalisation counts their tokens.
        place = torch.arange(length, device=v.device)
        in_slice = place - place % size if causal else torch.full_like(place, length)
        scale = 1 / options.linear_divisor(batch.elsewhere(causal) + in_slice).to(own.dtype)
        return gate * ((q_lin * scale[:, None]).to(compute) @ read.to(compute))
