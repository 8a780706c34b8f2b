"""Mixed chunk attention, the attention of FLASH: quadratic inside a chunk, linear across chunks.

Shapes: B batch, T tokens, C chunk size, G chunks, s query/key width, e value width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 3, with divisors that count visible keys.

    quad:  o_quad[t] = sum over j in L(t) of relu(q_quad[t].k_quad[j] / sqrt(s) + bias[t - j])^2 v[j]  /  max(1, |L(t)|)
    lin:   o_lin[t]  = q_lin[t] . (sum over j in R(t) of k_lin[j] v[j]^T)                              /  max(1, |R(t)|)

    L(t) = tokens of t's own chunk; causal: those with j <= t
    R(t) = every token of the document; causal: every token of the chunks before t's

Its streaming form is in mixed_chunk_stream.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lineartime.ops.activations import (
    ACTIVATIONS,
    NORMALIZATIONS,
    Activation,
    Normalization,
    attention_weights,
    attention_weights_oracle,
    check_choice,
)
from lineartime.ops.backends import Backend, choose_backend
from lineartime.ops.chunks import Chunks, Reach, cut_chunks, sum_chunks
from lineartime.ops.layout import by_document, check_tokens
from lineartime.ops.precision import common_dtype, matmul_dtype, output_dtype, without_autocast
from lineartime.ops.quadratic import check_bias, check_queries_keys_values

# 1. The definition ----------------------------------------------------------------------------------------------------


def mixed_chunk_attention_oracle(
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
    activation: Activation = "relu2",
    normalization: Normalization = "count",
    elsewhere: int = 0,
) -> Tensor:
    """The definition of `mixed_chunk_attention`, one query at a time: slow, and only there to be believed."""
    d_qk = q_quad.shape[-1]

    def document(q_quad: Tensor, k_quad: Tensor, q_lin: Tensor, k_lin: Tensor, v: Tensor) -> Tensor:
        rows = []
        for t in range(len(v)):
            chunk = t // chunk_size
            near = [j for j in range(len(v)) if j // chunk_size == chunk and (j <= t or not causal)]
            far = [j for j in range(len(v)) if j // chunk_size < chunk or not causal]

            weights = attention_weights_oracle(
                k_quad[near] @ q_quad[t],
                None if bias is None else bias[t % chunk_size, [j % chunk_size for j in near]],
                d_qk=d_qk,
                activation=activation,
                published_length=None if normalization == "count" else float(chunk_size),
            )
            o_quad = weights @ v[near]

            chunks = -(-len(far) // chunk_size)
            count = len(far) if normalization == "count" else chunks * chunk_size
            o_lin = q_lin[t] @ (k_lin[far].mT @ v[far]) / max(1, count + elsewhere)
            rows.append(o_quad + o_lin)
        return torch.stack(rows)

    return by_document(document, q_quad, k_quad, q_lin, k_lin, v, mask=mask, cu_seqlens=cu_seqlens)


# 2. The chunked form --------------------------------------------------------------------------------------------------


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
    activation: Activation = "relu2",
    normalization: Normalization = "count",
    elsewhere: int = 0,
    backend: Backend = "auto",
) -> Tensor:
    """Attend quadratically inside chunks of C tokens and linearly across them, in time linear in T.

    Args:
        q_quad, k_quad, q_lin, k_lin: [B, T, s] queries and keys of the quadratic and of the linear part.
        v: [B, T, e] values, shared by both parts.
        chunk_size: C; T need not be a multiple of it.
        causal: whether a token reads only itself and earlier tokens.
        bias: [C, C], added to the quadratic scores by position inside the chunk.
        mask: bool [B, T], True for real tokens, which alone are counted when chunks are cut; padding is read by nobody
            and its outputs are zero.
        cu_seqlens: int [D + 1], the boundaries of D documents packed into a single row: each is chunked from its own
            start and reads nothing of the others.
        activation: of the quadratic part: "relu2", "softmax", "softmax_plus" or "laplace".
        normalization: "count" divides by the number of visible keys; "paper" is the published form: scores q.k / C + bias,
            and the linear part averaged over the visible chunks of K^T V / C.
        elsewhere: how many more tokens the linear part reads, which are not here (`ops/context_parallel.py`): its divisors
            count them.
        backend: "torch", "triton" (kernels for GPUs), "oracle" (the definition, slow), or "auto", the fastest that can run.

    Returns:
        [B, T, e], zeros for rows with nothing to read. float16 is computed in float32; the sums over chunks always are
        (float64 for float64 inputs).

    Raises:
        ValueError: for shapes that do not fit together, an unknown activation or normalization, or a backend that is unknown
            or cannot run here.
    """
    check_choice("activation", activation, ACTIVATIONS)
    check_choice("normalization", normalization, NORMALIZATIONS)
    check_chunk_size(chunk_size)
    check_queries_keys_values({"q_quad": q_quad, "k_quad": k_quad, "q_lin": q_lin, "k_lin": k_lin}, v)
    check_tokens(v.shape, mask, cu_seqlens)
    check_bias(bias, chunk_size, "C")
    inputs = (q_quad, k_quad, q_lin, k_lin, v)
    compute = matmul_dtype(*inputs)
    backend = choose_backend(backend, ("torch", "triton", "oracle"), v, compute, activation)
    if backend == "oracle":
        return mixed_chunk_attention_oracle(
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
        )

    result_dtype, kernel_dtype = output_dtype(v, compute), common_dtype(*inputs)
    with without_autocast(v):
        chunks = cut_chunks(v, chunk_size, mask, cu_seqlens)
        if backend == "triton":
            from lineartime.ops.triton import mixed_chunk as kernels

            scales = chunk_scales(chunks, q_quad.shape[-1], causal, normalization, elsewhere, v)
            out = kernels.attend(
                *(chunks.cut(x.to(kernel_dtype)) for x in inputs),
                bias=bias,
                row_scale=scales.row.expand(-1, scales.state.shape[1], chunk_size).contiguous(),
                state_scale=scales.state,
                document_starts=_on_device(chunks.document_starts, v.device),
                score_scale=scales.score,
                causal=causal,
                activation="laplace" if activation == "laplace" else "relu2",
            )
            return chunks.join(out.to(result_dtype))
        q_quad, k_quad, q_lin, k_lin, v = (chunks.cut(x.to(compute)) for x in inputs)
        out = chunk_attention(
            q_quad, k_quad, v, chunks, causal=causal, bias=bias, activation=activation, normalization=normalization
        )
        reach: Reach = "before" if causal else "all"
        out = out + summary_attention(q_lin, k_lin, v, chunks, reach=reach, normalization=normalization, elsewhere=elsewhere)
        return chunks.join(out.to(result_dtype))


def check_chunk_size(chunk_size: int) -> None:
    """Raise ValueError unless it is positive."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}, but must be at least 1.")


def chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunks: Chunks,
    *,
    causal: bool,
    bias: Tensor | None,
    activation: Activation,
    normalization: Normalization,
) -> Tensor:
    """The quadratic part: every chunk for itself, [B, G, C, s], [B, G, C, s], [B, G, C, e] -> [B, G, C, e]."""
    visible = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril() if causal else None
    if chunks.real is not None and visible is None:
        visible = chunks.real[..., None, :]  # causal needs no more than the triangle: empty slots stand behind real ones
    weights = attention_weights(
        q @ k.mT,
        d_qk=q.shape[-1],
        visible=visible,
        bias=bias,
        activation=activation,
        published_length=None if normalization == "count" else float(chunks.chunk_size),
    )
    return weights.to(v.dtype) @ v


def summary_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunks: Chunks,
    *,
    reach: Reach,
    normalization: Normalization = "count",
    elsewhere: int = 0,
) -> Tensor:
    """The linear part: every chunk reads the mean of k v^T over the chunks in its reach; shapes as for `chunk_attention`."""
    summaries = (k.mT @ v).to(torch.promote_types(v.dtype, torch.float32))  # [B, G, s, e]
    size = chunks.sizes(summaries)[..., None, None]
    if normalization == "paper":
        size = (size > 0) * float(chunks.chunk_size)  # a chunk counts in full, a chunk without a token not at all
    total, count = sum_chunks(summaries, chunks, reach), sum_chunks(size, chunks, reach)
    return q @ (total / (count + elsewhere).clamp(min=1)).to(q.dtype)


def _on_device(starts: list[int], device: torch.device) -> Tensor:
    """Where documents begin and end, int32 [D + 1]."""
    if len(starts) == 2:  # nothing is copied to a GPU, which would have to wait for it
        return starts[1] * torch.arange(2, dtype=torch.int32, device=device)
    return torch.tensor(starts, dtype=torch.int32, device=device)


class ChunkScales(NamedTuple):
    """The factors that a fused form applies; what an empty slot would add is zero already, for its values are.

    Attributes:
        score: of the products of queries and keys in the quadratic part.
        row: float32 or better, [B or 1, G or 1, C or 1], of a query's weights in the quadratic part.
        state: the same dtype, [B or 1, G], of the sums of k v^T that a chunk reads.
    """

    score: float
    row: Tensor
    state: Tensor


def chunk_scales(
    chunks: Chunks, d_qk: int, causal: bool, normalization: Normalization, elsewhere: int, like: Tensor
) -> ChunkScales:
    """The divisors of both parts, as factors; `like` gives the device and, if it is float64, the dtype."""
    sizes = chunks.sizes(like.new_empty(0, dtype=torch.promote_types(like.dtype, torch.float32)))
    score, row = 1.0 / chunks.chunk_size, sizes.new_ones(1, 1, 1)
    tokens = sizes
    if normalization == "paper":
        tokens = (sizes > 0).to(sizes.dtype) * chunks.chunk_size
    else:
        score = d_qk**-0.5
        # Real tokens stand before empty slots, so that a query's place tells how many keys it sees.
        slots = torch.arange(1, chunks.chunk_size + 1, device=sizes.device)
        row = 1 / slots.to(sizes.dtype)[None, None] if causal else 1 / sizes.clamp(min=1)[..., None]
    read = sum_chunks(tokens, chunks, "before" if causal else "all").expand_as(sizes)
    return ChunkScales(score, row, 1 / (read + elsewhere).clamp(min=1))
