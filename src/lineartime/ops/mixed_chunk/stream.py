"""Mixed chunk attention of streams at one position, many tokens at once, in constant memory.

Shapes: B streams, N new tokens of each, C chunk size, s query/key width, e value width.
The definition is the causal one of reference.py.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lineartime.ops.activations import Activation, Normalization, attention_weights
from lineartime.ops.backends import Backend
from lineartime.ops.checks import check_bias, check_continues
from lineartime.ops.chunks import exclusive_cumsum, fill
from lineartime.ops.layout import Layout, LayoutPlan
from lineartime.ops.make_layout import make_layout
from lineartime.ops.mixed_chunk import tiled, triton
from lineartime.ops.mixed_chunk.inputs import Heads, MixedChunkOptions, Projected, check_heads
from lineartime.ops.precision import acc_dtype, matmul_dtype, output_dtype, without_autocast


class MixedChunkState(NamedTuple):
    """What a causal stream remembers; its size does not depend on the number of tokens read.

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
    """The state before the first token, on the device of `like` and in its dtype (at least float32)."""
    dtype = acc_dtype(like)

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
        activation, normalization: as for `mixed_chunk_attention`.

    Returns:
        The new tokens' outputs [B, N, e] and the new state.

    Raises:
        ArgumentError: if shapes do not match, or the activation or normalization is unknown.
    """
    heads = Heads(q_quad, k_quad, q_lin, k_lin, v)
    options = MixedChunkOptions(state.v.shape[1], causal=True, activation=activation, normalization=normalization)
    check_heads(heads)
    check_continues(k_quad=(k_quad, state.k_quad), k_lin=(k_lin, state.k_lin), v=(v, state.v))
    check_bias(bias, options.chunk_size, "C")
    return extend(heads, bias, options, state)


def extend(
    heads: Heads, bias: Tensor | None, options: MixedChunkOptions, state: MixedChunkState
) -> tuple[Tensor, MixedChunkState]:
    """`mixed_chunk_attention_extend` inside a model: [B, N, e] and the new state; `state` is not modified."""
    compute = matmul_dtype(*heads)
    result_dtype = output_dtype(heads.v, compute)
    outputs = [heads.v[:, :0].to(result_dtype)]
    with without_autocast(heads.v):
        for piece, is_whole in _pieces(state.position, heads.v.shape[1], options.chunk_size):
            new = Heads(*(x[:, piece].to(compute) for x in heads))
            out, state = (_read_whole_chunks if is_whole else _read_open_chunk)(new, bias, options, state)
            outputs.append(out.to(result_dtype))
    return torch.cat(outputs, 1), state


def extend_projected(
    projected: Projected,
    bias: Tensor | None,
    rotations: Tensor | None,
    options: MixedChunkOptions,
    state: MixedChunkState,
    backend: Backend = "auto",
) -> tuple[Tensor, MixedChunkState]:
    """Gated attention for N more tokens of streams: all of FLASH between its two projections.

    Args:
        projected: the new tokens, [B, N, 2 e + s], with gamma and beta.
        bias, options, state: as for `extend`.
        rotations: [2, N, s / 2], or None.
        backend: the form that reads whole chunks, if it can run and no gradient is needed: "triton", "tiled", or "auto", which
            takes the one for the device. Plain PyTorch reads everything else.

    Returns:
        The new tokens' outputs [B, N, e] and the new state; `state` is not modified.
    """

    def cut(piece: slice) -> tuple[Projected, Tensor | None]:
        return projected._replace(tokens=projected.tokens[:, piece]), None if rotations is None else rotations[..., piece, :]

    def plainly(piece: slice, state: MixedChunkState) -> tuple[Tensor, MixedChunkState]:
        new, own = cut(piece)
        gate, heads = new.heads(own)
        attended, state = extend(heads, bias, options, state)
        return gate * attended, state

    def fused(piece: slice, state: MixedChunkState) -> tuple[Tensor, MixedChunkState]:
        new, own = cut(piece)
        layout = _layout_of_chunks(new.tokens, own, options.chunk_size)
        gated, summary = form.extend_gated(new, bias, layout, options, state.summary, state.position)
        return gated, state._replace(summary=summary, position=state.position + new.tokens.shape[1])

    length = projected.tokens.shape[1]
    has_whole = projected.tokens.numel() > 0 and length >= options.chunk_size
    forms = [x for x in (triton, tiled) if has_whole and x.can_extend(projected, bias, options, state.summary, backend)]
    if not forms:
        return plainly(slice(0, length), state)
    form = forms[0]
    outputs = []
    for piece, is_whole in _pieces(state.position, length, options.chunk_size):
        out, state = (fused if is_whole else plainly)(piece, state)
        outputs.append(out)
    return torch.cat(outputs, 1), state


def _layout_of_chunks(tokens: Tensor, rotations: Tensor | None, chunk_size: int) -> Layout:
    """The layout of whole chunks of new tokens [B, N, ...], with their rotations [2, N, s / 2]."""
    layout = make_layout(tokens.shape[:2], device=tokens.device, plan=LayoutPlan(chunk_size=chunk_size))
    cut = None if rotations is None else rotations[:, None].unflatten(2, (-1, chunk_size))
    return layout._replace(chunk_rotations=cut)


def _pieces(position: int, length: int, chunk_size: int) -> Iterator[tuple[slice, bool]]:
    """Cut new tokens after `position` others into at most three pieces, and tell which one consists of whole chunks."""
    start = 0
    while start < length:
        room = -(position + start) % chunk_size
        whole = 0 if room else (length - start) // chunk_size * chunk_size
        stop = min(start + (whole or room or chunk_size), length)
        yield slice(start, stop), whole > 0
        start = stop


def _read_whole_chunks(
    heads: Heads, bias: Tensor | None, options: MixedChunkOptions, state: MixedChunkState
) -> tuple[Tensor, MixedChunkState]:
    """Compute whole chunks of new tokens at once; no chunk is open."""
    chunk_size, length = options.chunk_size, heads.v.shape[1]
    q_quad, k_quad, q_lin, k_lin, v = (x.unflatten(1, (-1, chunk_size)) for x in heads)
    weights = _weights(q_quad, k_quad, bias, options, first=0)
    sums = (k_lin.mT @ v).to(state.summary.dtype)
    before = state.summary[:, None] + exclusive_cumsum(sums)
    read = state.position + chunk_size * torch.arange(sums.shape[1], device=v.device)
    out = weights.to(v.dtype) @ v + q_lin @ (before / options.linear_divisor(read)[:, None, None]).to(v.dtype)
    after = state._replace(summary=before[:, -1] + sums[:, -1], position=state.position + length)
    return out.flatten(1, 2), after


def _read_open_chunk(
    heads: Heads, bias: Tensor | None, options: MixedChunkOptions, state: MixedChunkState
) -> tuple[Tensor, MixedChunkState]:
    """Compute new tokens for which the open chunk has room."""
    q_quad, k_quad, q_lin, k_lin, v = heads
    first = state.position % options.chunk_size
    last = first + v.shape[1]
    state = MixedChunkState(
        state.summary,
        fill(state.k_quad, first, k_quad),
        fill(state.k_lin, first, k_lin),
        fill(state.v, first, v),
        state.position + v.shape[1],
    )
    weights = _weights(q_quad, state.k_quad[:, :last].to(v.dtype), bias, options, first)
    context = (state.summary / options.linear_divisor(state.position - last)).to(v.dtype)
    out = weights.to(v.dtype) @ state.v[:, :last].to(v.dtype) + q_lin @ context
    return out, _fold(state) if last == options.chunk_size else state


def _weights(q: Tensor, k: Tensor, bias: Tensor | None, options: MixedChunkOptions, first: int) -> Tensor:
    """The weights of queries [..., N, s], the first of which is at slot `first`, for the keys [..., K, s] of a chunk."""
    new, keys = q.shape[-2], k.shape[-2]
    return attention_weights(
        q @ k.mT,
        d_qk=q.shape[-1],
        visible=torch.ones(new, keys, dtype=torch.bool, device=q.device).tril(first),
        bias=None if bias is None else bias[first : first + new, :keys],
        activation=options.activation,
        published_length=options.published_length,
    )


def _fold(state: MixedChunkState) -> MixedChunkState:
    """Add the open chunk, which is full, to the summary, and open an empty one."""
    summary = state.summary + state.k_lin.mT @ state.v
    return MixedChunkState(
        summary, torch.zeros_like(state.k_quad), torch.zeros_like(state.k_lin), torch.zeros_like(state.v), state.position
    )
