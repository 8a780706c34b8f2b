"""Mixed chunk attention: quadratic inside chunks, linear across them. A GAU has one chunk a document, and no linear part.

    o[t] = row(n) sum over the n slots j <= last[t] of t's chunk of f(score q_quad[t].k_quad[j] + bias[j - t]) v[j]
         + sum(m) q_lin[t] . (sum of k_lin v^T over the m tokens R(t))
                         R(t): the tokens of the chunks before t's; of a token in a prefix, all of the prefix

f is relu^2, or a softmax over the slots instead. `Scales` are the divisors of a normalization, as factors. One function reads
rows, packs, prefixes and streams, whose summary and open chunk are a `MixedChunkState`; `step` reads a token of each stream in
place. Products have the dtype of the inputs, but float32 for float16, where a score of 256 overflows once squared. Scores, sums
and states are float32 or wider, also under autocast. Scores are scaled and masked before the square.

Shapes: as in packing.py; K keys, M maps of keys that a state has, s query/key width, e value width.
The definition is in oracle.py.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), sections 2.2 and 3.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lineartime.ops import oracle, quadratic
from lineartime.ops.activations import FUNCTIONS, SOFTMAXES, Activation
from lineartime.ops.backends import Backend, choose_backend
from lineartime.ops.checks import is_readable
from lineartime.ops.context import sum_elsewhere
from lineartime.ops.modes import (
    acc_dtype,
    is_exporting,
    is_traced,
    is_trained_compiled,
    matmul_dtype,
    output_dtype,
    under_transform,
    without_autocast,
)
from lineartime.ops.packing import Grid, Packing
from lineartime.ops.positions import by_distance
from lineartime.ops.state import KVCache, State, in_place, writable
from lineartime.ops.triton.quadratic import kernels

BLOCK = 256
"""How many queries of a long chunk are computed at a time; the backward pass computes their scores again."""
MOST_SUMS = 256
"""Up to so many chunks of a row, compiled training adds the sums before each by a product with ones: a scan moves more."""


class Scales(NamedTuple):
    """The divisors of a normalization, as factors: of products q.k, of a query that sees n keys, of a sum over n tokens.

    A `score` of None is 1 / n for the n tokens of a document. `prefix`, if given, is the factor of a sum over the n tokens of a
    prefix, in place of `sum`. `of_bias` says whether `score` is a factor of the bias, too.
    """

    score: float | Tensor | None
    row: Callable[[Tensor], Tensor]
    sum: Callable[[Tensor], Tensor]
    prefix: Callable[[Tensor], Tensor] | None = None
    of_bias: bool = False


def reciprocal(n: Tensor) -> Tensor:
    """1 / n, and 1 for n = 0."""
    return 1 / n.clamp(min=1)


@dataclass(frozen=True)
class MixedChunkOptions:
    """The options of mixed chunk attention.

    Attributes:
        chunk_size: C; None for one chunk a document.
        causal: whether a token sees itself and earlier tokens alone.
        scales: the divisors.
        activation: f: a name of `FUNCTIONS` or `SOFTMAXES`.
        bias: maps n to the bias of the distances 1 - n, ..., n - 1 of a key from a query, [2 n - 1]; None for no bias.
        backend: the form that reads chunks which are whole documents: see `choose_backend`; or "oracle".
    """

    chunk_size: int | None
    causal: bool
    scales: Scales
    activation: Activation = "relu2"
    bias: Callable[[int], Tensor] | None = None
    backend: Backend = "torch"


@dataclass(eq=False)
class MixedChunkState(State):
    """What causal streams remember; its size does not depend on the number of tokens read.

    Attributes:
        position: int64 [D], the number of tokens that each stream has read; position % C of them are in the open chunk.
        summary: [D, s, e], the sum of k_lin v^T over all complete chunks, in float32 or better.
        keys: [D, M, C, s], the keys of the open chunk: of the quadratic and of the linear part.
        values: [D, C, e], its values. The slots after its tokens hold any numbers.
    """

    position: Tensor
    summary: Tensor
    keys: Tensor
    values: Tensor


def mixed_chunk_state(
    streams: int, chunk_size: int, d_qk: int, d_value: int, like: Tensor, *, maps: int = 2, linear: bool = True
) -> MixedChunkState:
    """The state before the first token, with keys and values in the dtype of `like`, on its device."""
    position = torch.zeros(streams, dtype=torch.long, device=like.device)
    summary = like.new_zeros(streams, d_qk if linear else 0, d_value, dtype=acc_dtype(like))
    keys, values = like.new_zeros(streams, maps, chunk_size, d_qk), like.new_zeros(streams, chunk_size, d_value)
    return MixedChunkState(position, summary, keys, values)


def attention_weights(
    products: Tensor, hidden: Tensor | None, count: Tensor, bias: Tensor | None, activation: str, scales: Scales
) -> Tensor:
    """Products q.k [..., Q, K] -> weights of the same shape, in float32 or better.

    Args:
        products: not yet scaled.
        hidden: bool, broadcastable to [..., Q, K], which keys a query does not see; None if all see all.
        count: how many keys each query sees, at least 1, broadcastable to [..., Q].
        bias: for each distance, [Q + K - 1], or [..., Q, K]; None for none.
        activation, scales: as in `MixedChunkOptions`.
    """
    assert scales.score is not None
    scores = products.to(acc_dtype(products))
    if bias is not None:
        bias = by_distance(bias, scores.shape[-2]) if bias.dim() == 1 else bias
        scores = (scores + bias) * scales.score if scales.of_bias else scores * scales.score + bias
    else:
        scores = scores * scales.score
    count = count.to(scores.dtype)
    if activation in SOFTMAXES:
        factor = SOFTMAXES[activation]
        scores = scores if factor is None else scores * factor(count)[..., None]
        if hidden is None:
            return scores.softmax(-1)
        # The second mask is for queries that see no key: there, a softmax of equal scores is uniform, not zero.
        return scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(hidden, 0)
    if hidden is not None:  # before the square, which may overflow
        scores = scores.masked_fill(hidden, -torch.inf)
    return FUNCTIONS[activation](scores) * scales.row(count)[..., None]


def attend_visible(
    q: Tensor, k: Tensor, v: Tensor, last: Tensor, bias: Tensor | None, activation: str, scales: Scales,
    hides: bool = True, first: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """All scores at once: [..., Q, s], [..., K, s], [..., K, e] -> [..., Q, e].

    `first` and `last`, int64, broadcastable to [..., Q], are the first and the last key that each query sees; by default, the
    first is key 0. `hides=False` is for values that are zero behind the last. Other arguments: see `attention_weights`.
    """
    key = torch.arange(k.shape[-2], device=k.device)
    hidden, count = key > last[..., None] if hides else None, last + 1
    if first is not None:
        hidden, count = (key < first[..., None]) | (key > last[..., None]), count - first
    products, count = q @ k.mT, count.clamp(min=1)
    return attention_weights(products, hidden, count, bias, activation, scales).to(v.dtype) @ v


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, last: Tensor, bias: Tensor | None, options: MixedChunkOptions, *, reach: int,
    hides: bool = True,
) -> Tensor:  # fmt: skip
    """`attend_visible` for a block of queries after the other.

    The last query stands at the last key and sees it. So do the queries before it, each at its key, but for the first `reach`
    keys, which every query may see, whatever its place: 0 if causal, all keys if unknown.
    """
    width, keys, outputs = q.shape[-2], k.shape[-2], []
    more = options.activation, options.scales, hides
    if is_exporting() or (is_traced() and reach > 0) or (not is_traced() and width <= 2 * BLOCK):
        return attend_visible(q, k, v, last, bias, *more)
    recompute = torch.is_grad_enabled() and not is_traced() and not under_transform()
    size = max(BLOCK, (width + 7) // 8) if is_traced() else BLOCK
    for start in range(0, max(1, width), size):
        stop = min(start + size, width)
        seen = max(keys - width + stop, reach)
        own = last[..., start:stop] if last.shape[-1] > 1 else last
        near = bias
        if bias is not None:
            near = bias[width - stop : width - start + seen - 1] if bias.dim() == 1 else bias[..., start:stop, :seen]
        inputs = q[..., start:stop, :], k[..., :seen, :], v[..., :seen, :], own, near, *more
        outputs.append(checkpoint(attend_visible, *inputs, use_reentrant=False) if recompute else attend_visible(*inputs))
    return torch.cat(outputs, -2)


def attend(
    q_quad: Tensor | None, k_quad: Tensor | None, q_lin: Tensor | None, k_lin: Tensor | None, v: Tensor, packing: Packing,
    options: MixedChunkOptions, state: MixedChunkState | None = None,
) -> tuple[Tensor, MixedChunkState | None]:  # fmt: skip
    """Attend from [N, s] to [N, s] and [N, e]: the outputs [N, e] and, of streams, the state after them.

    A part without queries is left out. With one map of keys in the state, both parts share it.
    """
    if options.backend == "oracle" and state is None and packing.context is None:
        return oracle.attend(q_quad, k_quad, q_lin, k_lin, v, packing, options), None
    given = [x for x in (q_quad, k_quad, q_lin, k_lin, v) if x is not None]
    compute, outputs = matmul_dtype(*given), []
    dtype = output_dtype(v, compute)
    with without_autocast(v):
        if state is not None and packing.longest == 1 and packing.even and in_place(*given, *state.tensors()):
            out, state = step(q_quad, k_quad, q_lin, k_lin, v, options, state, compute)
            return out.to(dtype), state
        one_row = packing.any_division and options.chunk_size is None and options.backend in ("auto", "torch")
        if one_row and q_quad is not None and k_quad is not None:
            q, k, values = (x.to(compute) for x in (q_quad, k_quad, v))
            return attend_pack(q, k, values, packing, options).to(dtype), None
        tensors = [None if x is None else x.to(compute) for x in (q_quad, k_quad, q_lin, k_lin, v)]
        for grid, q1, k1, q2, k2, values in packing.by_grid(options.chunk_size, options.causal, *tensors):
            out, state = _attend_grid(q1, k1, q2, k2, values, grid, packing, options, state)
            outputs.append(out)
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).to(dtype), state


def _attend_grid(
    q_quad: Tensor | None, k_quad: Tensor | None, q_lin: Tensor | None, k_lin: Tensor | None, v: Tensor, grid: Grid,
    packing: Packing, options: MixedChunkOptions, state: MixedChunkState | None,
) -> tuple[Tensor, MixedChunkState | None]:  # fmt: skip
    opened = [None] * 3 if state is None else [state.keys[:, 0], state.keys[:, -1], state.values]  # k_quad, k_lin, v
    of_quad = None if k_quad is None else grid.keys(k_quad, opened[0])
    of_lin = of_quad if k_lin is None else grid.keys(k_lin, opened[1])
    values, summary, parts = grid.keys(v, opened[2]), None, []
    if q_quad is not None and of_quad is not None:
        parts.append(quadratic_part(grid.queries(q_quad), of_quad, values, grid, options))
    # A single chunk has none before it, and nothing to read by the linear part.
    alone = grid.chunks == 1 and grid.prefix is None and state is None and packing.context is None
    if q_lin is not None and of_lin is not None and (not parts or not alone):
        read, summary = linear_part(grid.queries(q_lin), of_lin, values, grid, packing, options, state)
        parts.append(read)
    out = sum(map(grid.tokens, parts[1:]), grid.tokens(parts[0]))
    if state is None:
        return out, None
    maps = [x for x in (of_quad, None if k_lin is None else of_lin) if x is not None]
    keys = torch.stack([x.index_select(0, grid.final) for x in maps], 1).to(state.keys.dtype)
    own = values.index_select(0, grid.final).to(state.values.dtype)
    summary = state.summary if summary is None else summary
    position = state.position + packing.new  # not `grid.end`, which layers share: `step` writes into it
    return out, replace(state, position=position, summary=summary, keys=keys, values=own)


def _scaled(q: Tensor, length: Tensor, options: MixedChunkOptions) -> tuple[Tensor, MixedChunkOptions]:
    """The queries of documents of a length, and options whose scale of scores is known."""
    scales = options.scales
    if scales.score is not None:
        return q, options
    by = 1 / length.clamp(min=1).to(acc_dtype(q))
    known = replace(options, scales=scales._replace(score=by if scales.of_bias else 1.0))
    return q if scales.of_bias else (q * by).to(q.dtype), known


def attend_pack(q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: MixedChunkOptions) -> Tensor:
    """Attend inside the documents of a pack as one row, [N, s], [N, s], [N, e] -> [N, e], for traced code.

    Such code does not know their lengths: if each were a row, every row would be as long as the pack.
    """
    token, document = torch.arange(q.shape[0], device=q.device), packing.document
    first = token - packing.position
    length = packing.new[document]
    last = token if options.causal else first + length - 1
    if packing.prefix is not None:
        last = torch.maximum(last, first + packing.prefix[document] - 1)
    bias = None if options.bias is None else options.bias(q.shape[0])
    q, options = _scaled(q, length[:, None], options)
    return attend_visible(q, k, v, last, bias, options.activation, options.scales, first=first)


def quadratic_part(q: Tensor, k: Tensor, v: Tensor, grid: Grid, options: MixedChunkOptions) -> Tensor:
    """Attend inside chunks: [G, Q, s], [G, C, s], [G, C, e] -> [G, Q, e]."""
    size, is_whole = grid.size, grid.width == grid.size
    bias = None if options.bias is None else options.bias(size)
    q, options = _scaled(q, grid.sizes[:, None, None], options)
    scales = options.scales
    if options.chunk_size is None and (grid.prefix is None or not grid.causal) and not scales.of_bias:
        form = choose_backend(options.backend, ("torch", "tiled", "triton"), v, q.dtype, options.activation, quadratic.SOURCE)
        if form != "torch":
            assert isinstance(scales.score, float)
            count = (grid.query_slot + 1 if grid.causal else grid.sizes[:, None]).clamp(min=1)
            row = scales.row(count.to(acc_dtype(q))).expand(q.shape[:2])
            inputs = quadratic.Inputs(q, k, v, bias, row, scales.score, grid.causal, options.activation)
            out: Tensor = quadratic.tiled(inputs) if form == "tiled" else kernels(inputs)
            return out
    if bias is not None and not is_whole:
        bias = bias[torch.arange(size - 1, 2 * size - 1, device=q.device) - grid.query_slot[..., None]]
    # An empty slot of a bidirectional chunk has values of zero: only a softmax must hide it.
    hides = grid.causal or (options.activation in SOFTMAXES and not grid.is_full)
    reach = 0 if is_whole and grid.prefix is None else size
    if is_whole and grid.prefix is not None and grid.causal and is_readable(grid.prefix):
        reach = min(size, int(grid.prefix.max()))
    return attend_blocks(q, k, v, grid.last, bias, options, reach=reach, hides=hides)


def attend_cached(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: MixedChunkOptions, state: KVCache
) -> tuple[Tensor, KVCache]:
    """Attend of streams to all that they have read: [N, s], [N, s], [N, e] -> [N, e], or the same with heads, [N, H, s].

    Raises:
        ArgumentError: if the new tokens have other heads or widths than the earlier ones.
    """
    q, k, v = (x if x.dim() == 3 else x.transpose(1, 2) for x in map(packing.to_rows, (q, k, v)))
    heads = q.dim() == 4
    state, keys, values, last = state.append(k, v, packing)
    compute, n = matmul_dtype(q, keys, values), keys.shape[-2]
    bias, scales, out = None if options.bias is None else options.bias(n), options.scales, None
    if packing.longest == 1 and options.activation == "relu2" and not scales.of_bias and isinstance(scales.score, float):
        out = quadratic.attend_token(q.to(compute).contiguous(), state.k, state.v, last, n, bias, scales.row, scales.score)
    if bias is not None and out is None:
        of_rows = torch.arange(n - 1, 2 * n - 1, device=q.device) - last[..., None]
        bias = bias[: max(1, q.shape[-2]) + n - 1] if last.dim() == 1 else bias[of_rows]
        bias = bias[:, None] if heads and bias.dim() == 3 else bias
    last = last[:, None] if heads and last.dim() == 2 else last
    if out is None:
        with without_autocast(v):
            inputs = q.to(compute), keys.to(compute), values.to(compute), last, bias, options
            out = attend_blocks(*inputs, reach=0 if packing.even and packing.common_start is not None else n)
    out = out.to(output_dtype(v, compute))
    return packing.tokens(out.transpose(1, 2) if heads else out), state


def linear_part(
    q: Tensor, k: Tensor, v: Tensor, grid: Grid, packing: Packing, options: MixedChunkOptions, state: MixedChunkState | None
) -> tuple[Tensor, Tensor | None]:
    """Attend across chunks: [G, Q, s], [G, C, s], [G, C, e] -> [G, Q, e], and the summary of streams after all full chunks."""
    scales, exact, summary, read = options.scales, acc_dtype(v), None, None
    alone = grid.slot is None and grid.prefix is None and state is None and packing.context is None
    if alone and not is_traced():
        q, k, v = (x.view(grid.end.shape[0], -1, *x.shape[1:]) for x in (q, k, v))
        total = (k[:, :-1].mT @ v[:, :-1]).to(exact).cumsum(1)  # the first chunk reads nothing, and the last is not read
        n = torch.arange(1, q.shape[1], device=q.device) * grid.size
        read = q[:, 1:] @ (total * scales.sum(n.to(exact))[:, None, None]).to(q.dtype)
        return F.pad(read, (0, 0, 0, 0, 1, 0)).flatten(0, 1), None
    if alone and is_trained_compiled() and len(k) <= MOST_SUMS * grid.end.shape[0]:
        rows = (k.mT @ v).view(grid.end.shape[0], -1, k.shape[-1] * v.shape[-1])
        before = (rows.new_ones(rows.shape[1], rows.shape[1]).tril(-1) @ rows).view(-1, k.shape[-1], v.shape[-1])
        return (q * scales.sum(grid.begin.to(exact))[:, None, None]).to(q.dtype) @ before, None
    sums = (k.mT @ v).to(exact)  # [G, s, e]
    earlier = None if state is None else state.summary
    if packing.context is not None:
        earlier = sum_elsewhere(grid.sum_of(sums), packing.context, "before" if grid.causal else "others")
    if grid.causal:
        before = grid.sum_before(sums, q.dtype if earlier is None else exact)
        before = before if earlier is None else before + grid.of_documents(earlier)
        read = (q * scales.sum(grid.begin.to(exact))[:, None, None]).to(q.dtype) @ before.to(q.dtype)
    if state is not None:
        summary = state.summary + grid.sum_of(torch.where(grid.full[:, None, None], sums, 0))
    if grid.prefix is not None:
        if grid.causal:
            sums = (torch.where(grid.slots_before(grid.prefix)[..., None], k, 0).mT @ v).to(exact)
        total = grid.sum_of(sums) if grid.causal or earlier is None else grid.sum_of(sums) + earlier
        total = (total * (scales.prefix or scales.sum)(grid.prefix.to(exact))[:, None, None]).to(q.dtype)
        whole = q @ grid.of_documents(total)
        read = whole if read is None else torch.where(grid.in_prefix[..., None], whole, read)
    assert read is not None
    return read, summary


def step(
    q_quad: Tensor | None, k_quad: Tensor | None, q_lin: Tensor | None, k_lin: Tensor | None, v: Tensor,
    options: MixedChunkOptions, state: MixedChunkState, compute: torch.dtype,
) -> tuple[Tensor, MixedChunkState]:  # fmt: skip
    """Read one token of each stream, [D, ...], in the memory of the state, whose shapes do not change.

    A step can so be recorded as a CUDA graph, or be a part of an exported program.
    """
    position, summary, keys, values = (writable(x) for x in (state.position, state.summary, state.keys, state.values))
    size, outputs = values.shape[1], []
    slot = position % size
    place = slot[:, None, None]
    new = torch.stack([x for x in (k_quad, k_lin) if x is not None], 1)[:, :, None].to(keys.dtype)
    keys.scatter_(2, place[:, None].expand_as(new), new)
    values.scatter_(1, place.expand_as(v[:, None]), v[:, None].to(values.dtype))
    if q_quad is not None:
        bias = None
        if options.bias is not None:
            bias = options.bias(size)[torch.arange(size - 1, 2 * size - 1, device=slot.device) - slot[:, None]][:, None]
        products = torch.bmm(q_quad[:, None].to(compute), keys[:, 0].to(compute).mT)
        hidden, count = torch.arange(size, device=slot.device) > place, slot[:, None] + 1
        weights = attention_weights(products, hidden, count, bias, options.activation, options.scales)
        outputs.append(torch.bmm(weights.to(compute), values.to(compute)))
    if q_lin is not None:
        by = options.scales.sum((position - slot).to(summary.dtype))[:, None, None]
        outputs.append(torch.bmm(q_lin[:, None].to(summary.dtype) * by, summary))
        fold_full_chunks(summary, keys[:, -1], values, slot == size - 1)
    position += 1
    out = sum(outputs[1:], outputs[0])[:, 0]
    return out, replace(state, position=position, summary=summary, keys=keys, values=values)


def fold_full_chunks(summary: Tensor, keys: Tensor, values: Tensor, full: Tensor) -> None:
    """Add the open chunks of streams that are full, bool [D], to their summaries, in place."""
    if full.device.type == "cpu" and not is_traced():
        for row in full.nonzero()[:, 0].tolist() if full.any() else ():
            summary[row] += keys[row].to(summary.dtype).mT @ values[row].to(summary.dtype)
    else:  # no copy to the host: the same operations at each token
        added = keys.to(summary.dtype).masked_fill(~full[:, None, None], 0)
        summary.baddbmm_(added.mT, values.to(summary.dtype))
