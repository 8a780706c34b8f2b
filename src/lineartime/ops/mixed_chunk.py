"""Mixed chunk attention, the attention of FLASH: quadratic inside a chunk, linear across chunks.

Shapes: B batch, T tokens, N new tokens of a stream, C chunk size, G chunks, s query/key width, e value width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 3, with divisors that count visible keys.

    quad:  o_quad[t] = sum over j in L(t) of relu(q_quad[t].k_quad[j] / sqrt(s) + bias[t - j])^2 v[j]  /  max(1, |L(t)|)
    lin:   o_lin[t]  = q_lin[t] . (sum over j in R(t) of k_lin[j] v[j]^T)                              /  max(1, |R(t)|)

    L(t) = tokens of t's own chunk; causal: those with j <= t
    R(t) = every token of the document; causal: every token of the chunks before t's
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
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
from lineartime.ops.layout import check_tokens, document_chunks, document_lengths
from lineartime.ops.precision import matmul_dtype, output_dtype, without_autocast
from lineartime.ops.quadratic import check_bias, check_queries_keys_values

Backend = Literal["auto", "torch", "oracle"]
BACKENDS: tuple[str, ...] = ("auto", "torch", "oracle")

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
) -> Tensor:
    """The definition of `mixed_chunk_attention`, one query at a time: slow, and only there to be believed."""
    out = []
    for b in range(v.shape[0]):
        rows = [v.new_zeros(v.shape[-1]) for _ in range(v.shape[1])]
        start = 0
        for length in document_lengths(v.shape[1], cu_seqlens):
            # The real tokens of one document; a token's rank among them is its position.
            document = [t for t in range(start, start + length) if mask is None or mask[b, t]]
            start += length
            for rank, t in enumerate(document):
                chunk = rank // chunk_size
                local = [i for i in range(len(document)) if i // chunk_size == chunk and (i <= rank or not causal)]
                reach = [i for i in range(len(document)) if i // chunk_size < chunk or not causal]
                near, far = [document[i] for i in local], [document[i] for i in reach]

                weights = attention_weights_oracle(
                    k_quad[b, near] @ q_quad[b, t],
                    None if bias is None else bias[rank % chunk_size, [i % chunk_size for i in local]],
                    d_qk=q_quad.shape[-1],
                    activation=activation,
                    published_length=None if normalization == "count" else float(chunk_size),
                )
                o_quad = weights @ v[b, near]

                summary = k_lin[b, far].mT @ v[b, far]
                chunks = -(-len(reach) // chunk_size)
                o_lin = q_lin[b, t] @ summary / max(1, len(reach) if normalization == "count" else chunks * chunk_size)
                rows[t] = o_quad + o_lin
        out.append(torch.stack(rows) if rows else v[b])
    return torch.stack(out) if out else v


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
        backend: "torch", "oracle" (the definition, slow), or "auto", the fastest for the device.

    Returns:
        [B, T, e], zeros for rows with nothing to read. float16 is computed in float32; the sums over chunks always are
        (float64 for float64 inputs).

    Raises:
        ValueError: for shapes that do not fit together, or an unknown activation, normalization or backend.
    """
    check_choice("activation", activation, ACTIVATIONS)
    check_choice("normalization", normalization, NORMALIZATIONS)
    check_choice("backend", backend, BACKENDS)
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}, but must be at least 1.")
    check_queries_keys_values({"q_quad": q_quad, "k_quad": k_quad, "q_lin": q_lin, "k_lin": k_lin}, v)
    check_tokens(v.shape, mask, cu_seqlens)
    check_bias(bias, chunk_size, "C")
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
        )

    batch, length = v.shape[:2]
    inputs = (q_quad, k_quad, q_lin, k_lin, v)
    compute = matmul_dtype(*inputs)
    result_dtype = output_dtype(v, compute)
    with without_autocast(v):
        # Cut every document into chunks: five [B, G, C, f], and real, bool [B, G, C], where some slots hold no token.
        real: Tensor | None = None
        if mask is None and cu_seqlens is None:
            chunks_per_document = [max(1, -(-length // chunk_size))]
            spare = chunks_per_document[0] * chunk_size - length
            chunked = [F.pad(x.to(compute), (0, 0, 0, spare)).unflatten(1, (-1, chunk_size)) for x in inputs]
            if spare:
                slots = torch.arange(length + spare, device=v.device)
                real = (slots < length).expand(batch, -1).unflatten(1, (-1, chunk_size))
        else:
            layout, chunks_per_document = document_chunks(batch, length, chunk_size, mask, cu_seqlens, v.device)
            chunked = [layout.arrange(x.to(compute)) for x in inputs]
            real = layout.real
        q_quad, k_quad, q_lin, k_lin, v_chunks = chunked

        out = _quadratic_part(q_quad, k_quad, v_chunks, real, causal, bias, activation, normalization)
        out = out + _linear_part(q_lin, k_lin, v_chunks, real, causal, chunks_per_document, normalization)

        out = out.to(result_dtype)
        return out.flatten(1, 2)[:, :length] if mask is None and cu_seqlens is None else layout.restore(out)


def _quadratic_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    real: Tensor | None,
    causal: bool,
    bias: Tensor | None,
    activation: Activation,
    normalization: Normalization,
) -> Tensor:
    chunk_size, d_qk = q.shape[-2:]
    visible = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).tril() if causal else None
    if real is not None and visible is None:
        visible = real[..., None, :]  # causal needs no more than the triangle: empty slots stand behind real ones
    weights = attention_weights(
        q @ k.mT,
        d_qk=d_qk,
        visible=visible,
        bias=bias,
        activation=activation,
        published_length=None if normalization == "count" else float(chunk_size),
    )
    return weights.to(v.dtype) @ v


def _linear_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    real: Tensor | None,
    causal: bool,
    chunks_per_document: list[int],
    normalization: Normalization,
) -> Tensor:
    accumulate = torch.promote_types(v.dtype, torch.float32)
    summaries = (k.mT @ v).to(accumulate)  # [B, G, s, e]
    if real is None:
        size = summaries.new_full((1, summaries.shape[1], 1, 1), float(q.shape[-2]))
    else:
        size = real.sum(-1).to(accumulate)[..., None, None]
    if normalization == "paper":
        size = (size > 0) * float(q.shape[-2])  # a chunk counts in full, a chunk without a token not at all
    total = _sum_visible_chunks(summaries, chunks_per_document, causal)
    count = _sum_visible_chunks(size, chunks_per_document, causal)
    return q @ (total / count.clamp(min=1)).to(q.dtype)


def _sum_visible_chunks(x: Tensor, chunks_per_document: list[int], causal: bool) -> Tensor:
    """For each chunk, the sum over the chunks it reads: [B, G, ...] -> the same, or [B, 1, ...] where all are equal."""

    def within(document: Tensor) -> Tensor:
        if causal:  # exclusive prefix sum: the chunks strictly before
            return torch.cat([torch.zeros_like(document[:, :1]), document[:, :-1].cumsum(1)], 1)
        return document.sum(1, keepdim=True)

    if len(chunks_per_document) == 1:
        return within(x)
    sums = [within(document).expand_as(document) for document in x.split(chunks_per_document, 1)]
    return torch.cat(sums, 1) if sums else x


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
    visible = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=v.device).tril()
    outputs = [v.new_zeros(v.shape[0], 0, v.shape[-1], dtype=output_dtype(v, compute))]
    with without_autocast(v):
        start = 0
        while start < v.shape[1]:  # as many tokens at a time as fit into the open chunk
            first = state.position % chunk_size
            last = min(chunk_size, first + v.shape[1] - start)
            new = slice(start, start + last - first)
            state = _append(state, k_quad[:, new], k_lin[:, new], v[:, new])
            weights = attention_weights(
                q_quad[:, new].to(compute) @ state.k_quad[:, :last].to(compute).mT,
                d_qk=q_quad.shape[-1],
                visible=visible[first:last, :last],
                bias=None if bias is None else bias[first:last, :last],
                activation=activation,
                published_length=None if normalization == "count" else float(chunk_size),
            )
            # Complete chunks are full, so both normalisations divide by the number of their tokens.
            complete = (state.position - 1) // chunk_size * chunk_size
            mean = (state.summary / max(1, complete)).to(compute)
            out = weights.to(compute) @ state.v[:, :last].to(compute) + q_lin[:, new].to(compute) @ mean
            outputs.append(out.to(outputs[0].dtype))
            if last == chunk_size:
                state = _fold(state)
            start = new.stop
    return torch.cat(outputs, 1), state


def _append(state: MixedChunkState, k_quad: Tensor, k_lin: Tensor, v: Tensor) -> MixedChunkState:
    new = v.shape[1]
    first = state.position % state.v.shape[1]

    def put(rows: Tensor, x: Tensor) -> Tensor:
        return torch.cat([rows[:, :first], x.to(rows.dtype), rows[:, first + new :]], 1)

    return MixedChunkState(
        state.summary, put(state.k_quad, k_quad), put(state.k_lin, k_lin), put(state.v, v), state.position + new
    )


def _fold(state: MixedChunkState) -> MixedChunkState:
    """Add the open chunk, now full, to the summary and open an empty one."""
    summary = state.summary + state.k_lin.mT @ state.v
    return MixedChunkState(
        summary, torch.zeros_like(state.k_quad), torch.zeros_like(state.k_lin), torch.zeros_like(state.v), state.position
    )
