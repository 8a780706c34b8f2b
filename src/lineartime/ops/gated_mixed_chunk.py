"""All of FLASH between its two dense maps as one op: SiLU, queries and keys, mixed chunk attention, gate.

Shapes: B batch, T tokens, C chunk size, e value width, s query/key width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), sections 2.2 and 3.

    U, V, Z = split(silu(projected))                                 [B,T,e] [B,T,e] [B,T,s]
    q_quad, k_quad, q_lin, k_lin = rope(Z * gamma_i + beta_i)        i = 1 ... 4
    gated = U * mixed_chunk_attention(q_quad, k_quad, q_lin, k_lin, V)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.activations import NORMALIZATIONS, Activation, Normalization, check_choice
from lineartime.ops.backends import Backend, choose_backend
from lineartime.ops.chunks import Chunks, cut_chunks
from lineartime.ops.layout import check_tokens
from lineartime.ops.mixed_chunk import check_chunk_size, chunk_scales, mixed_chunk_attention
from lineartime.ops.positions import rope
from lineartime.ops.precision import matmul_dtype, output_dtype, without_autocast
from lineartime.ops.quadratic import check_bias
from lineartime.ops.tiled_flash import tiled_flash


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
    activation: Activation = "relu2",
    normalization: Normalization = "count",
    elsewhere: int = 0,
    backend: Backend = "auto",
) -> Tensor:
    """Turn the projected tokens of a FLASH layer into what its output map reads.

    Args:
        projected: [B, T, 2 e + s], the gate, the values and what queries and keys are made of, all before SiLU.
        gamma, beta: [4, s], scale and offset of q_quad, k_quad, q_lin and k_lin.
        positions: int [T] or [B, T], by which queries and keys are rotated; None for no rotation.
        chunk_size, causal, bias, mask, cu_seqlens, activation, normalization, elsewhere: as for `mixed_chunk_attention`.
        backend: "tiled" (for processors), those of `mixed_chunk_attention`, or "auto", the fastest that can run.

    Returns:
        [B, T, e].

    Raises:
        ValueError: for shapes that do not fit together, an unknown activation or normalization, or a backend that is unknown
            or cannot run here.
    """
    check_choice("normalization", normalization, NORMALIZATIONS)
    d_qk = _check(projected, gamma, beta)
    check_chunk_size(chunk_size)
    check_tokens(projected.shape, mask, cu_seqlens)
    check_bias(bias, chunk_size, "C")
    compute = matmul_dtype(projected, gamma)
    backend = choose_backend(backend, ("torch", "tiled", "triton", "oracle"), projected, compute, activation)
    if backend != "tiled":
        d_value = (projected.shape[-1] - d_qk) // 2
        gate, v, z = F.silu(projected).split([d_value, d_value, d_qk], -1)
        q_quad, k_quad, q_lin, k_lin = queries_and_keys(z, gamma, beta, positions).unbind(1)
        attended = mixed_chunk_attention(
            q_quad,
            k_quad,
            q_lin,
            k_lin,
            v,
            chunk_size=chunk_size,
            causal=causal,
            bias=bias,
            mask=mask,
            cu_seqlens=cu_seqlens,
            activation=activation,
            normalization=normalization,
            elsewhere=elsewhere,
            backend=backend,
        )
        gated: Tensor = gate * attended
        return gated

    with without_autocast(projected):
        chunks = cut_chunks(projected, chunk_size, mask, cu_seqlens)
        scales = chunk_scales(chunks, d_qk, causal, normalization, elsewhere, projected)
        weight_scale = scales.row[..., None]
        if causal:
            weight_scale = weight_scale * weight_scale.new_ones(chunk_size, chunk_size).tril()
        gated = tiled_flash(
            chunks.cut(projected.to(compute)),
            gamma,
            beta,
            bias,
            None if positions is None else _cut_positions(positions, chunks),
            weight_scale,
            scales.state,
            scales.score,
            chunks.document_starts,
            causal,
        )
        return chunks.join(gated.to(output_dtype(projected, compute)))


def queries_and_keys(z: Tensor, gamma: Tensor, beta: Tensor, positions: Tensor | None) -> Tensor:
    """rope(Z * gamma_i + beta_i) for every i: [B, T, s], [maps, s], [maps, s] -> [B, maps, T, s]; positions [T] or [B, T]."""
    maps = z[..., None, :, :] * gamma[:, None] + beta[:, None]
    if positions is None:
        return maps
    return rope(maps, positions if positions.dim() == 1 else positions[:, None])


def _cut_positions(positions: Tensor, chunks: Chunks) -> Tensor:
    """[T] or [B, T] -> [B or 1, G, C]: one row is enough where all rows are cut alike."""
    positions = torch.atleast_2d(positions)
    if chunks.layout is not None:
        positions = positions.expand(len(chunks.layout.slots), -1)
    return chunks.cut(positions[..., None]).squeeze(-1)


def _check(projected: Tensor, gamma: Tensor, beta: Tensor) -> int:
    """Raise ValueError unless the shapes fit; s, if they do."""
    for name, tensor in (("gamma", gamma), ("beta", beta)):
        if tensor.dim() != 2 or tensor.shape[0] != 4:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, but must be [4, s].")
    d_qk = gamma.shape[1]
    if beta.shape[1] != d_qk:
        raise ValueError(f"beta has shape {list(beta.shape)}, but must be that of gamma, {list(gamma.shape)}.")
    if projected.dim() != 3 or (projected.shape[-1] - d_qk) % 2 or projected.shape[-1] <= d_qk:
        raise ValueError(f"projected has shape {list(projected.shape)}, but must be [B, T, 2 e + s] with s = {d_qk}.")
    return d_qk
