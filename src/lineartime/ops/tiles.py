"""Mixed chunk attention of a FLASH layer on CPUs, a few chunks at a time: everything between its two projections.

Shapes: G chunks, C chunk size, d model width, e value width, s query/key width, R rows of rotations; in a tile: N chunks.

    U, V, Z = split(silu(projected))                                                       [e] [e] [s]
    q_quad, k_quad, q_lin, k_lin = rope(Z * gamma_i + beta_i)                               i = 1 ... 4
    weights = row_scale * relu(score_scale * q_quad.k_quad + bias)^2
    gated = U * (weights V  +  state_scale * q_lin (sum of k_lin^T V))

Steps on whole sequences would go through main memory, which takes as long as the matrix products; a tile stays in the cache.
Only `projected`, the attention's output and the sums that the chunks use are kept for the backward pass, which recomputes the
rest. The output projection of a layer can be applied too. Its gradient needs `gated`, which is recomputed in the memory of its
own gradient.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.native import native_functions
from lineartime.ops.mixed_chunk import MixedChunkOptions
from lineartime.ops.modes import acc_dtype, matmul_dtype, output_dtype, without_autocast
from lineartime.ops.operator import Fused
from lineartime.ops.packing import Grid, Packing
from lineartime.ops.positions import by_distance, in_part
from lineartime.ops.quadratic import SOURCE as SOURCE

TILE_TOKENS = 1024
"""The number of tokens in a tile: small enough for the cache, and large enough that call overhead is negligible."""


class Projected(NamedTuple):
    """The projected tokens of a layer, and the parameters that it maps them by.

    Attributes:
        tokens: [N, 2 e + s], the gate, the values and the base of queries and keys, all before SiLU.
        projection_bias: [2 e + s], to be added to the tokens, or None.
        gamma, beta: [4, s], the scale and offset of q_quad, k_quad, q_lin and k_lin.
        output: [d, e], the weight of the output projection, or None.
        linear: [N, s] each, queries and keys of the linear part in place of those of Z, or None.
    """

    tokens: Tensor
    projection_bias: Tensor | None
    gamma: Tensor
    beta: Tensor
    output: Tensor | None = None
    linear: tuple[Tensor, Tensor] | None = None


class Inputs(NamedTuple):
    """The inputs of a call.

    Attributes:
        projected: [G, C, 2 e + s], zero in slots without a token. Its dtype is that of matrix products.
        projection_bias: [2 e + s], to be added to `projected`, or None.
        gamma, beta, bias: [4, s], [4, s] and [C, C] or None.
        rotations: [2, R, C, s / 2]; chunk g has those of row `turns[g]`, int64 [G].
        row_scale: [G or 1, C or 1], the factor of the squared scores of a query.
        state_scale: [G], the factor of the queries q_lin.
        document: int64 [G], the document of each chunk.
        output: [d, e], the weight of the output projection, or None.
        linear: [2, G, C, s], queries and keys of the linear part in place of those of Z, or None.
        summary: [D, s, e], the sum of k_lin^T v over what streams have read before, or None.
        has_open: whether the last chunk of each document is not full, so that it is not in the sums of streams.
        n_documents: D.
        score_scale: the factor of the products q_quad.k_quad.
        causal: whether a token sees earlier tokens and the sums of the chunks before alone, and not its whole document.
    """

    projected: Tensor
    projection_bias: Tensor | None
    gamma: Tensor
    beta: Tensor
    bias: Tensor | None
    rotations: Tensor
    turns: Tensor
    row_scale: Tensor
    state_scale: Tensor
    document: Tensor
    output: Tensor | None
    linear: Tensor | None
    summary: Tensor | None
    has_open: bool
    n_documents: int
    score_scale: float
    causal: bool


def attend_projected(
    projected: Projected, packing: Packing, options: MixedChunkOptions, rotated: int, summary: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Gated attention of the projected tokens of a layer, with activation "relu2": [N, e], or [N, d] with `output`.

    Positions rotate the first features of each half of queries and keys, `rotated` in all. Streams stand at whole chunks, after
    the `summary` [D, s, e] of those before; it is returned with all full chunks.
    """
    tokens, bias, gamma, _, _, linear = projected
    compute, outputs = matmul_dtype(tokens, gamma), []
    after = summary
    maps: list[Any] = list(linear or (None, None))
    for grid, own, *maps_here in packing.by_grid(options.chunk_size, options.causal, tokens.to(compute), *maps):
        added = bias
        if bias is not None and not grid.is_full:
            own, added = own + bias.to(own.dtype), None  # slots without a token must stay zero
        inputs = _inputs(own, added, projected, maps_here, grid, packing, options, rotated, summary)
        if summary is None:
            outputs.append(grid.tokens(_fused(inputs)))
        else:
            with without_autocast(tokens):
                out, _, _, after = _run(inputs, keep=False)
            outputs.append(grid.tokens(out))
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out.to(output_dtype(tokens, compute)), after


def _inputs(
    tokens: Tensor, bias: Tensor | None, projected: Projected, maps: Sequence[Tensor | None], grid: Grid, packing: Packing,
    options: MixedChunkOptions, rotated: int, summary: Tensor | None,
) -> Inputs:  # fmt: skip
    """The inputs of some tokens, in the dtype to compute in."""
    exact, size, scales = acc_dtype(tokens), grid.size, options.scales
    width = projected.gamma.shape[1]
    if options.causal:
        row_scale = scales.row(torch.arange(1, size + 1, device=tokens.device, dtype=exact))[None]
        read = grid.begin
    else:
        row_scale = scales.row(grid.sizes.clamp(min=1).to(exact))[:, None]
        read = grid.end[grid.document]
    key = ("tiles", options.chunk_size, size, rotated, width)  # the grids of a packing have chunks of other sizes
    rotations, turns = packing.shared(key, lambda: _rotations(grid, packing, rotated, width, exact))
    q, k = maps
    linear = None if q is None or k is None else torch.stack([grid.keys(x.to(tokens.dtype)) for x in (q, k)])
    near = None if options.bias is None else by_distance(options.bias(size), size)
    assert isinstance(scales.score, float)
    return Inputs(
        grid.keys(tokens), bias, projected.gamma, projected.beta, near, rotations, turns, row_scale,
        scales.sum(read.to(exact)), grid.document, projected.output, linear, summary,
        summary is not None and not grid.is_full, grid.end.shape[0], scales.score, options.causal,
    )  # fmt: skip


def _rotations(grid: Grid, packing: Packing, rotated: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The cosines and sines of chunks, [2, R, C, s / 2], and the row of each chunk; equal rows share theirs."""
    own, device = grid.document.shape[0], grid.document.device
    if grid.slot is None and isinstance(grid.chunks, int) and packing.sharing > 1:
        own = grid.chunks
    position = grid.begin[:own, None] + torch.arange(grid.size, device=device)
    turns = torch.arange(grid.document.shape[0], device=device) % max(1, own)
    return in_part(packing.rotations_at(position, rotated, dtype), width), turns


class Tile(NamedTuple):
    """Some chunks, which follow each other.

    Attributes:
        at: which of the G they are, N of them; of streams, all of one document.
        readers: which of the N use sums. The first chunk of a causal document does not.
        sources: which of the N are in sums that are used. The last chunk of a causal document is not.
    """

    at: slice
    readers: slice
    sources: slice


def _tiles(inputs: Inputs, document: list[int]) -> list[Tile]:
    """The tiles of a call; those of streams do not cross documents, each of which has chunks before."""
    chunks, size, _ = inputs.projected.shape
    tiles, at_once = [], max(1, TILE_TOKENS // max(1, size))
    stops = [chunk for chunk in range(1, chunks + 1) if chunk == chunks or document[chunk] != document[chunk - 1]]
    ends, begins = set(stops), {0, *stops}
    start = 0
    while start < chunks:
        stop = min(start + at_once, chunks)
        if inputs.summary is not None:
            stop = min(stop, next(end for end in stops if end > start))
        first, last = start, stop
        if inputs.summary is not None:
            last -= int(inputs.has_open and stop in ends)
        elif inputs.causal:
            while first < stop and first in begins:
                first += 1
            while last > start and last in ends:
                last -= 1
        readers, sources = slice(first - start, stop - start), slice(0, last - start)
        tiles.append(Tile(slice(start, stop), readers, sources))
        start = stop
    return tiles


class Work:
    """The inputs of a call, and what is computed in a tile between its matrix products: by tiles.cpp.

    `gamma`, `beta` and the biases are in the dtype of scores and sums.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.projected = inputs, inputs.projected.contiguous()
        chunks, chunk_size, width = self.projected.shape
        d_qk = inputs.gamma.shape[1]
        self.sum_shape = d_qk, (width - d_qk) // 2
        self.compute, exact = self.projected.dtype, acc_dtype(self.projected)
        self.document = inputs.document.tolist()
        self.tiles = _tiles(inputs, self.document)
        functions = native_functions(SOURCE, self.compute)
        assert functions is not None, "the backend is chosen where they are built"
        self.call = functions.call
        projection_bias = self.projected.new_zeros(width) if inputs.projection_bias is None else inputs.projection_bias
        self.projection_bias = projection_bias.to(exact).contiguous()
        self.gamma, self.beta = inputs.gamma.to(exact).contiguous(), inputs.beta.to(exact).contiguous()
        self.bias = None if inputs.bias is None else inputs.bias.to(exact).contiguous()
        # What chunks or slots share is not repeated: it has strides of zero.
        self.row_scale = inputs.row_scale.to(exact).contiguous().expand(chunks, chunk_size)
        self.state_scale = inputs.state_scale.to(exact).contiguous()
        self.cosines, self.sines = inputs.rotations.to(exact).contiguous().unbind()
        self.changes = F.pad(inputs.document.diff(prepend=inputs.document[:1]) != 0, (0, 1))  # bool [G + 1]

    def activate(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        """U and V, [N, C, e], and the queries and keys [4, N, C, s], with q_lin scaled unless it is given."""
        at, (s, e) = tile.at, self.sum_shape
        before = self.projected[at]
        n, c, _ = before.shape
        active, maps = before.new_empty(2, n, c, e), before.new_empty(4, n, c, s)
        self.call(
            "activate",
            before, self.projection_bias, self.gamma, self.beta, self.cosines, self.sines, self.inputs.turns[at],
            self.state_scale[at], active, maps, n, c, e, s,
        )  # fmt: skip
        if self.inputs.linear is not None:
            maps[2:] = self.inputs.linear[:, at]
        return active[0], active[1], maps

    def run_sums(self, total: Tensor, sums: Tensor, out: Tensor, tile: Tile, backwards: bool) -> None:
        """Write the sum over the chunks before each chunk of a tile or, if `backwards`, after it, into `out` [n, s, e].

        `total` [s, e] has that over the tiles before, and is updated to include this one. Of `sums` [n, s, e], those of the
        last chunks, or the first if `backwards`, may be missing; of `out`, those of the last chunks.
        """
        start, stop, width = tile.at.start, tile.at.stop, total.numel()
        begins = None if self.inputs.summary is not None else self.changes[start + backwards : stop + backwards]
        sizes = (stop - start, len(sums), len(out))
        self.call("run_sums", total, sums, out, begins, *sizes, int(backwards), width)

    def weigh(self, q: Tensor, k: Tensor, tile: Tile, gradient: Tensor | None = None, d_bias: Tensor | None = None) -> Tensor:
        """The weights inside chunks, [N, C, C]. Their gradient becomes that of the scores, not yet scaled; `d_bias` grows."""
        weights, scale = torch.bmm(q, k.mT), self.row_scale[tile.at]
        options = (self.bias, 0, weights.shape[2], scale, *scale.stride(), self.inputs.score_scale, int(self.inputs.causal))
        if gradient is None:
            self.call("weigh", weights, *options, *weights.shape)
        else:
            self.call("weigh_backward", weights, *options, gradient, 1.0, d_bias, *weights.shape)
        return weights

    def totals(self, d_gated: Tensor | None = None) -> Tensor:
        """The sums over whole documents, [D, s, e]: of k_lin^T v or, for the backward pass, of q_lin^T d_out."""
        totals = self.gamma.new_zeros(self.inputs.n_documents, *self.sum_shape)
        for tile in self.tiles:
            gate, v, (_, _, q_lin, k_lin) = self.activate(tile)
            x, values = (k_lin, v) if d_gated is None else (q_lin, d_gated[tile.at] * gate)
            for document, own in zip(self.document[tile.at], torch.bmm(x.mT, values), strict=True):
                totals[document] += own
        return totals.to(self.compute)


def _run(inputs: Inputs, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The result [G, C, e or d] and, for the backward pass, the attention's output and the sums that chunks use, [G, s, e].

    Of streams, the last is the summary after all full chunks.
    """
    work, causal = Work(inputs), inputs.causal
    chunks, chunk_size, _ = inputs.projected.shape
    gated = inputs.projected.new_empty(chunks, chunk_size, work.sum_shape[1])
    attended = torch.empty_like(gated) if keep else gated
    total = work.gamma.new_zeros(work.sum_shape)
    summary = None if inputs.summary is None else inputs.summary.to(work.gamma.dtype, copy=True)
    read = gated.new_empty(chunks, *work.sum_shape) if causal else work.totals()
    for tile in work.tiles:
        at, readers, sources = tile
        gate, v, (q_quad, k_quad, q_lin, k_lin) = work.activate(tile)
        if causal:
            carry = total if summary is None else summary[work.document[at.start]]
            work.run_sums(carry, torch.bmm(k_lin[sources].mT, v[sources]), read[at], tile, backwards=False)
        weights = work.weigh(q_quad, k_quad, tile)
        out = attended[at]
        out[: readers.start].zero_()
        torch.bmm(q_lin[readers], read[at][readers] if causal else read[inputs.document[at]], out=out[readers])
        out.baddbmm_(weights, v)
        torch.mul(out, gate, out=gated[at])
    return gated if inputs.output is None else F.linear(gated, inputs.output.to(gated.dtype)), attended, read, summary


def _backward(inputs: Inputs, kept: tuple[Tensor, ...], d_out: Tensor, wanted: list[bool]) -> list[Tensor | None]:
    output, d_out, (attended, read) = inputs.output, d_out.contiguous(), (x.contiguous() for x in kept)
    d_gated = d_out if output is None else d_out @ output.to(d_out.dtype)
    work, causal = Work(inputs), inputs.causal
    d_projected, d_bias = torch.empty_like(work.projected), None if work.bias is None else torch.zeros_like(work.bias)
    d_linear = None if inputs.linear is None else torch.empty_like(inputs.linear)
    d_parameters = [torch.zeros_like(x) for x in (work.projection_bias, work.gamma, work.beta)]
    # The gradient of the sums k_lin^T v, from the chunks that use them.
    totals = work.gamma.new_zeros(work.sum_shape) if causal else work.totals(d_gated)
    for tile in reversed(work.tiles):
        at, readers, sources = tile
        gate, v, (q_quad, k_quad, q_lin, k_lin) = work.activate(tile)
        d_attended = d_gated[at] * gate

        # Quadratic part: attended = w v.
        d_scores = torch.bmm(d_attended, v.mT)
        weights = work.weigh(q_quad, k_quad, tile, d_scores, d_bias)
        d_v = torch.bmm(weights.mT, d_attended)
        d_q_quad, d_k_quad, d_q_lin, d_k_lin = d_maps = v.new_empty(4, *q_quad.shape)
        torch.bmm(d_scores, k_quad, out=d_q_quad)
        torch.bmm(d_scores.mT, q_quad, out=d_k_quad)

        # Linear part: attended = q (sum of k^T v), where q is scaled.
        used = read[at][readers] if causal else read[inputs.document[at]]
        torch.bmm(d_attended[readers], used.mT, out=d_q_lin[readers])
        if causal:
            d_sums = v.new_empty(sources.stop, *work.sum_shape)
            work.run_sums(totals, q_lin[readers].mT @ d_attended[readers], d_sums, tile, backwards=True)
        else:
            d_sums = totals[inputs.document[at]]
        torch.bmm(v[sources], d_sums.mT, out=d_k_lin[sources])
        d_v[sources].baddbmm_(k_lin[sources], d_sums)
        d_q_lin[: readers.start].zero_()
        d_k_lin[sources.stop :].zero_()
        if d_linear is not None:
            d_linear[:, at] = d_maps[2:]
            d_maps[2:] = 0

        # The gate, SiLU and the maps. For an output projection, d_gated is overwritten with the gated output.
        work.call(
            "finish",
            work.projected[at], work.projection_bias, d_gated[at], int(output is not None), attended[at], d_v, d_maps,
            work.gamma, work.cosines, work.sines, inputs.turns[at], work.state_scale[at], inputs.score_scale,
            d_projected[at], *d_parameters, *d_v.shape, work.sum_shape[0],
        )  # fmt: skip
    d_output = None if output is None else d_out.flatten(0, -2).mT @ d_gated.flatten(0, -2)
    return [d_projected, *d_parameters, d_bias, d_output, d_linear]


def _fake(inputs: Inputs, keep: bool) -> tuple[Tensor, ...]:
    projected, output = inputs.projected, inputs.output
    (chunks, chunk_size, width), d_qk = projected.shape, inputs.gamma.shape[1]
    d_value = (width - d_qk) // 2
    out = projected.new_empty(chunks, chunk_size, d_value if output is None else output.shape[0])
    attended = projected.new_empty(chunks, chunk_size, d_value)
    return out, attended, projected.new_empty(chunks if inputs.causal else inputs.n_documents, d_qk, d_value)


_fused = Fused(
    "tiled_mixed_chunk", Inputs, lambda inputs, keep: _run(inputs, keep)[:3], _fake, _backward, n_kept=2,
    wrt=("projected", "projection_bias", "gamma", "beta", "bias", "output", "linear"), what="backend 'tiled'",
)  # fmt: skip
