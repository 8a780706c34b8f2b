"""Mixed chunk attention, the attention of FLASH: quadratic inside a chunk, linear across chunks.

Shapes: B batch, T tokens, N new tokens of a stream, C chunk size, G chunks, s query/key width, e value width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 3, with divisors that count visible keys.

    quad:  o_quad[t] = sum over j in L(t) of relu(q_quad[t].k_quad[j] / sqrt(s) + bias[t - j])^2 v[j]  /  max(1, |L(t)|)
    lin:   o_lin[t]  = q_lin[t] . (sum over j in R(t) of k_lin[j] v[j]^T)                              /  max(1, |R(t)|)

    L(t) = tokens of t's own chunk; causal: those with j <= t
    R(t) = every token of the document; causal: every token of the chunks before t's
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
from lineartime.ops.chunks import Chunks, Reach, cut_chunks, exclusive_cumsum, fill, sum_chunks
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


# 3. The streaming form ------------------------------------------------------------------------------------------------


class MixedChunkState(NamedTuple):
    """What a causal stream has to remember, of a size that does not depend on the number of tokens read.

    Attributes:
        summary: [B, s, e], the sum of k_lin v^T over all complete chunks, in float32 or better.
        k_quad, k_lin, v: [B, C, s], [B, C, s], [B, C, e] of the open chunk, zero beyond its tokens.
        position: the number of tokens read so far; position % C of them are in the open chunk.
    """

    summary: Tensor
    k_quad: Tensor
    k_lin: Tensor
    v: Tensor
    position: int


def mixed_chunk_state(batch_size: int, chunk_size: int, d_qk: int, d_value: int, like: Tensor) -> MixedChunkState:
    """The state before the first token, on the device of `like` and in its dtype (float32 at the least)."""
    dtype = torch.promote_types(like.dtype, torch.float32)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(batch_size, *shape, dtype=dtype, device=like.device)

    return MixedChunkState(
        zeros(d_qk, d_value), zeros(chunk_size, d_qk), zeros(chunk_size, d_qk), zeros(chunk_size, d_value), position=0
    )


def mixed_chunk_attention_extend(
    q_quad: Tensor,
    k_quad: Tensor,
    q_lin: Tensor,
    k_lin: Tensor,
    v: Tensor,
    state: MixedChunkState,
    *,
    bias: Tensor | None = None,
    activation: Activation = "relu2",
    normalization: Normalization = "count",
) -> tuple[Tensor, MixedChunkState]:
    """Continue a causal sequence by N tokens; the outputs equal those of one causal `mixed_chunk_attention` over everything.

    Args:
        q_quad, k_quad, q_lin, k_lin, v: [B, N, s] and [B, N, e] of the new tokens.
        state: what came before, with the chunk size in its shapes; it is not changed.
        bias: [C, C].

    Returns:
        The new tokens' outputs [B, N, e], and the state after them.
    """
    chunk_size = state.v.shape[1]
    compute = matmul_dtype(q_quad, k_quad, q_lin, k_lin, v)
    result_dtype = output_dtype(v, compute)
    outputs = [v.new_zeros(v.shape[0], 0, v.shape[-1], dtype=result_dtype)]
    with without_autocast(v):
        q_quad, k_quad, q_lin, k_lin, v = (x.to(compute) for x in (q_quad, k_quad, q_lin, k_lin, v))
        start = 0
        while start < v.shape[1]:
            first = state.position % chunk_size
            whole = (v.shape[1] - start) // chunk_size if first == 0 else 0
            stop = min(start + (whole * chunk_size or chunk_size - first), v.shape[1])
            read = _read_whole_chunks if whole else _read_open_chunk
            new = (slice(None), slice(start, stop))
            out, state = read(q_quad[new], k_quad[new], q_lin[new], k_lin[new], v[new], state, bias, activation, normalization)
            outputs.append(out.to(result_dtype))
            start = stop
    return torch.cat(outputs, 1), state


def _read_whole_chunks(
    q_quad: Tensor,
    k_quad: Tensor,
    q_lin: Tensor,
    k_lin: Tensor,
    v: Tensor,
    state: MixedChunkState,
    bias: Tensor | None,
    activation: Activation,
    normalization: Normalization,
) -> tuple[Tensor, MixedChunkState]:
    """Chunks that begin and end with the new tokens, all at once; no chunk is open."""
    chunks = cut_chunks(v, state.v.shape[1])
    q_quad, k_quad, q_lin, k_lin, v = (chunks.cut(x) for x in (q_quad, k_quad, q_lin, k_lin, v))
    out = chunk_attention(q_quad, k_quad, v, chunks, causal=True, bias=bias, activation=activation, normalization=normalization)
    sums = (k_lin.mT @ v).to(state.summary.dtype)
    before = state.summary[:, None] + exclusive_cumsum(sums)
    counts = state.position + chunks.chunk_size * torch.arange(sums.shape[1], device=v.device)
    out = out + q_lin @ (before / counts.clamp(min=1)[:, None, None]).to(v.dtype)
    after = state._replace(summary=before[:, -1] + sums[:, -1], position=state.position + chunks.length)
    return chunks.join(out), after


def _read_open_chunk(
    q_quad: Tensor,
    k_quad: Tensor,
    q_lin: Tensor,
    k_lin: Tensor,
    v: Tensor,
    state: MixedChunkState,
    bias: Tensor | None,
    activation: Activation,
    normalization: Normalization,
) -> tuple[Tensor, MixedChunkState]:
    """Tokens that the open chunk has room for."""
    chunk_size = state.v.shape[1]
    first = state.position % chunk_size
    last = first + v.shape[1]
    state = MixedChunkState(
        state.summary,
        fill(state.k_quad, first, k_quad),
        fill(state.k_lin, first, k_lin),
        fill(state.v, first, v),
        state.position + v.shape[1],
    )
    weights = attention_weights(
        q_quad @ state.k_quad[:, :last].to(v.dtype).mT,
        d_qk=q_quad.shape[-1],
        visible=torch.ones(v.shape[1], last, dtype=torch.bool, device=v.device).tril(first),
        bias=None if bias is None else bias[first:last, :last],
        activation=activation,
        published_length=None if normalization == "count" else float(chunk_size),
    )
    # Complete chunks are full, so both normalisations divide by the number of their tokens.
    mean = (state.summary / max(1, state.position - last)).to(v.dtype)
    out = weights.to(v.dtype) @ state.v[:, :last].to(v.dtype) + q_lin @ mean
    return out, _fold(state) if last == chunk_size else state


def _fold(state: MixedChunkState) -> MixedChunkState:
    """Add the open chunk, now full, to the summary and open an empty one."""
    summary = state.summary + state.k_lin.mT @ state.v
    return MixedChunkState(
        summary, torch.zeros_like(state.k_quad), torch.zeros_like(state.k_lin), torch.zeros_like(state.v), state.position
    )
