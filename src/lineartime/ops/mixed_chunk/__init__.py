"""Mixed chunk attention, the attention of FLASH: quadratic inside a chunk, linear across chunks.

    reference.py         the definition, one query at a time
    chunked.py           plain PyTorch, on any device
    cpu.py               a few chunks at a time, for CPUs, with cpu.cpp; takes the projected tokens of a layer
    stream.py            more tokens of streams, at any positions, with a state of constant size

All of them compute the same function of (heads, bias, batch, options) or, with the gate of a FLASH layer around it, of
(projected, bias, batch, options). This file checks the arguments and chooses the form.

Shapes: B batch, T tokens, C chunk size, s query/key width, e value width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 3.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.ops.activations import Activation, Normalization
from lineartime.ops.backends import Backend, choose_backend
from lineartime.ops.batch import Batch, Needs
from lineartime.ops.checks import check_bias
from lineartime.ops.context import ContextGroup, sum_elsewhere
from lineartime.ops.make_batch import check_prefix, make_batch, rotated_by
from lineartime.ops.mixed_chunk import chunked, cpu, memories, reference
from lineartime.ops.mixed_chunk.inputs import (
    Heads,
    MixedChunkOptions,
    Projected,
    check_heads,
    check_positions,
    check_projected,
    queries_and_keys,
)
from lineartime.ops.modes import acc_dtype, matmul_dtype, without_autocast
from lineartime.ops.positions import rotary_table


def mixed_chunk_attention(
    q_quad: Tensor,
    k_quad: Tensor,
    q_lin: Tensor,
    k_lin: Tensor,
    v: Tensor,
    *,
    chunk_size: int,
    causal: bool = False,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    activation: Activation = "relu2",
    normalization: Normalization = "count",
    backend: Backend = "auto",
) -> Tensor:
    """Attend quadratically inside chunks of C tokens and linearly across them, in time linear in T.

    Args:
        q_quad, k_quad, q_lin, k_lin: [B, T, s] queries and keys of the quadratic and of the linear part.
        v: [B, T, e] values, shared by both parts.
        chunk_size: C; T need not be a multiple of it.
        causal: whether a token attends only to itself and earlier tokens.
        bias: [C, C], added to the quadratic scores by position inside the chunk.
        mask: [B, T], bool or integers 0 and 1, True for real tokens. Chunks count only real tokens. No token attends to
            padding, and its outputs are zero.
        cu_seqlens: int [D + 1], the boundaries of D documents packed into a single row. Each is cut into chunks from
            its own start and does not attend to the others.
        prefix_lengths: int [B], or [D] with `cu_seqlens`, for causal attention: the number of real tokens at the start of each
            row, or document, that attend as in a bidirectional attention over these tokens alone. Later tokens attend causally.
        activation: the activation of the quadratic part: "relu2" or "softmax".
        normalization: "count", "paper" or "paper_sum": see `MixedChunkOptions`.
        backend: "torch", "oracle" (the definition, slow), or "auto", which is "torch".

    Returns:
        [B, T, e], with zeros where no key is visible. float16 is computed in float32. The sums over chunks are always in
        float32 (float64 for float64 inputs).

    Raises:
        ArgumentError: if shapes do not match, the activation or normalization is unknown, or the backend is unknown or cannot
            run here.
    """
    options = MixedChunkOptions(chunk_size, causal, activation, normalization)
    heads = Heads(q_quad, k_quad, q_lin, k_lin, v)
    check_heads(heads)
    check_bias(bias, chunk_size, "C")
    check_prefix(prefix_lengths, causal)
    batch = make_batch(v.shape, mask, cu_seqlens, prefix_lengths, device=v.device, needs=Needs(chunk_size))

    def attend(*parts: Any) -> Tensor:
        *tensors, batch = parts
        return attend_heads(Heads(*tensors), _of_chunks(bias, batch), batch, options, backend)

    return batch.unpack(batch.by_part(attend, *map(batch.pack, heads)))


def gated_mixed_chunk_attention(
    projected: Tensor,
    gamma: Tensor,
    beta: Tensor,
    *,
    chunk_size: int,
    positions: Tensor | None,
    causal: bool = False,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    activation: Activation = "relu2",
    normalization: Normalization = "count",
    backend: Backend = "auto",
) -> Tensor:
    """Map the projected tokens of a FLASH layer to the input of its output projection: all of FLASH in between.

        U, V, Z = split(silu(projected))                                 [B,T,e] [B,T,e] [B,T,s]
        q_quad, k_quad, q_lin, k_lin = rope(Z * gamma_i + beta_i)        i = 1 ... 4
        gated = U * mixed_chunk_attention(q_quad, k_quad, q_lin, k_lin, V)

    Args:
        projected: [B, T, 2 e + s], the gate, the values and the base of queries and keys, all before SiLU.
        gamma, beta: [4, s], the scale and offset of q_quad, k_quad, q_lin and k_lin.
        positions: int [T] or [B, T], the positions by which queries and keys are rotated; None for no rotation.
        chunk_size, causal, bias, mask, cu_seqlens, prefix_lengths, activation, normalization: as for `mixed_chunk_attention`.
        backend: "tiled" (for CPUs, with functions in C++, and an even s), a backend of `mixed_chunk_attention`, or "auto", the
            fastest that can run.

    Returns:
        [B, T, e].

    Raises:
        ArgumentError: if shapes do not match, the activation or normalization is unknown, or the backend is unknown or cannot
            run here.
    """
    options, tokens = MixedChunkOptions(chunk_size, causal, activation, normalization), Projected(projected, gamma, beta)
    check_projected(tokens)
    check_bias(bias, chunk_size, "C")
    check_prefix(prefix_lengths, causal)
    check_positions(positions, projected.shape[0], projected.shape[1], tokens.d_qk)
    batch = make_batch(projected.shape, mask, cu_seqlens, prefix_lengths, device=projected.device, needs=Needs(chunk_size))
    if positions is not None:
        table = rotary_table(positions, tokens.d_qk // 2, acc_dtype(gamma))
        if batch.order is not None:
            of_rows = table.view(2, -1, *table.shape[-2:]).expand(-1, projected.shape[0], -1, -1)
            table = batch.pack(of_rows.movedim(0, -2)).movedim(-2, 0)
        batch = rotated_by(batch, table)

    def attend(projected: Tensor, batch: Batch) -> Tensor:
        return attend_projected(Projected(projected, gamma, beta), _of_chunks(bias, batch), batch, options, backend)

    return batch.unpack(batch.by_part(attend, batch.pack(projected)))


def _of_chunks(bias: Tensor | None, batch: Batch) -> Tensor | None:
    """The part of a bias [C, C] for the chunks of a batch, which may have fewer slots."""
    return None if bias is None else bias[: batch.chunk_size, : batch.chunk_size]


def attend_heads(
    heads: Heads, bias: Tensor | None, batch: Batch, options: MixedChunkOptions, backend: Backend = "auto"
) -> Tensor:
    """`mixed_chunk_attention` inside a model; ArgumentError for a backend that is unknown or cannot run here."""
    form = choose_backend(backend, ("torch", "oracle"), heads.v, matmul_dtype(*heads), options.activation)
    if form == "oracle":
        return reference.attend(heads, bias, batch, options)
    return _with_prefix(chunked.attend, heads, bias, batch, options)


def _with_prefix(
    attend: Callable[[Heads, Tensor | None, Batch, MixedChunkOptions], Tensor],
    heads: Heads,
    bias: Tensor | None,
    batch: Batch,
    options: MixedChunkOptions,
) -> Tensor:
    """Apply a form without prefixes to everything and, bidirectionally, to the prefixes of the batch."""

    def solved(heads: Heads, bias: Tensor | None, batch: Batch, options: MixedChunkOptions) -> Tensor:
        if options.memory == "mesa":
            heads = heads._replace(q_lin=memories.solved_queries(heads.q_lin, heads.k_lin, batch, causal=options.causal))
        return attend(heads, bias, batch, options)

    def within(*parts: Any) -> Tensor:
        *tensors, inner = parts
        return solved(Heads(*tensors), _of_chunks(bias, inner), inner, replace(options, causal=False))

    return batch.with_prefix(solved(heads, bias, batch, options), within, *heads)


def attend_projected(
    projected: Projected,
    bias: Tensor | None,
    batch: Batch,
    options: MixedChunkOptions,
    backend: Backend = "auto",
    output: Tensor | None = None,
) -> Tensor:
    """`gated_mixed_chunk_attention` inside a model, where the arguments are already checked and the batch is described.

    Args:
        projected, bias, batch, options: the inputs of every form; `projected` may still lack its bias.
        backend: see `gated_mixed_chunk_attention`.
        output: [d, e], the weight of the output projection, or None. With it, the result is [B, T, d], and the tiled form keeps
            less for the backward pass.

    Raises:
        ArgumentError: if the backend is unknown or cannot run here, or the processes of the context cannot split the
            batch.
    """
    tokens, dtype = projected.tokens, torch.promote_types(projected.tokens.dtype, projected.gamma.dtype)
    available: tuple[Backend, ...] = ("torch", "oracle") if projected.d_qk % 2 else ("torch", "tiled", "oracle")
    form = choose_backend(backend, available, tokens, dtype, options.activation, cpu.SOURCE)
    if form == "tiled" and options.memory == "mesa" and batch.prefix is not None:
        form = "torch"
    if form == "tiled" and batch.context is None and batch.prefix is None:
        if projected.linear is not None:
            q, k = projected.linear
            projected = projected._replace(linear=(memories.solved_queries(q, k, batch, causal=options.causal), k))
        return cpu.attend(projected, bias, batch, options, output)
    projected = projected.with_bias()
    gated = _gated(form, projected, bias, batch, options)
    if batch.context is not None:
        gated = gated + attend_elsewhere(batch.context, projected, batch, options).to(gated.dtype)
    return gated if output is None else F.linear(gated, output)


def _gated(form: Backend, projected: Projected, bias: Tensor | None, batch: Batch, options: MixedChunkOptions) -> Tensor:
    """Gated attention by one form to the tokens of this process, bidirectionally in the prefixes of the batch."""
    if form in ("torch", "oracle") or projected.linear is not None:
        gate, heads = projected.heads(batch.rotations)
        return gate * attend_heads(heads, bias, batch, options, form)

    def within(tokens: Tensor, inner: Batch) -> Tensor:
        return _gated(form, projected._replace(tokens=tokens), _of_chunks(bias, inner), inner, replace(options, causal=False))

    return batch.with_prefix(cpu.attend(projected, bias, batch, options), within, projected.tokens)


def attend_elsewhere(group: ContextGroup, projected: Projected, batch: Batch, options: MixedChunkOptions) -> Tensor:
    """What the tokens of this process read in the other processes of the group, [B, T, e], where a sequence is split over them.

    Slices begin at chunk boundaries, so the quadratic part needs no communication. The linear part is a sum over chunks, so it
    needs a single s x e matrix from each other process:

        own[r]       = sum over the tokens j of slice r of k_lin[j] v[j]^T                                  [B, s, e]
        elsewhere[r] = causal: own[0] + ... + own[r - 1]; otherwise the sum of own over all other processes
        the result   = U[t] * q_lin[t] . elsewhere[r] / |R(t)|

    R(t), as in reference.py, are the tokens of the whole sequence that the linear part of t reads, here and elsewhere.
    Each pass exchanges matrices of s x e numbers once: `own` forward, and the gradient of `elsewhere` backward.

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


mixed_chunk_attention_oracle = partial(mixed_chunk_attention, backend="oracle")
"""The definition of `mixed_chunk_attention`, with the same arguments: slow, a reference for tests."""
