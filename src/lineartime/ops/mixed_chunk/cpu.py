"""Mixed chunk attention of a FLASH layer on CPUs, a few chunks at a time: everything between its two projections.

Shapes: B batch, D documents of a row, G chunks of a row, C chunk size, d model width, e value width, s query/key width; in a
tile: N chunks.

    U, V, Z = split(silu(projected))                                                       [e] [e] [s]
    q_quad, k_quad, q_lin, k_lin = rope(Z * gamma_i + beta_i)                               i = 1 ... 4
    weights = weight_scale * relu(score_scale * q_quad.k_quad + bias)^2
    gated = U * (weights V  +  state_scale * q_lin (sum of k_lin^T V))

Steps on whole sequences would go through main memory, which takes as long as the matrix products; a tile stays in the cache.
Only `projected`, the attention's output and the sums that the chunks use are kept for the backward pass, which recomputes the
rest. The output projection of a layer can be applied too. Its gradient needs `gated`, which is recomputed in the memory of its
own gradient.
"""

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.native import native_functions
from lineartime.ops.backends import Backend, why_not
from lineartime.ops.batch import Batch
from lineartime.ops.mixed_chunk.inputs import MixedChunkOptions, Projected, chunk_scales
from lineartime.ops.modes import acc_dtype, is_plain, is_traced, matmul_dtype, output_dtype, without_autocast
from lineartime.ops.operator import Fused
from lineartime.ops.positions import no_rotation_table

SOURCE = Path(__file__).with_name("cpu.cpp")
"""What lies between the matrix products, for an even s."""
TILE_TOKENS = 1024
"""The number of tokens in a tile: small enough for the cache, and large enough that call overhead is negligible."""


class Inputs(NamedTuple):
    """The inputs of a call.

    Attributes:
        projected: [B, G, C, 2 e + s], zero in slots without a token. Its dtype is that of matrix products.
        projection_bias: [2 e + s], to be added to `projected`, or None.
        gamma, beta, bias: [4, s], [4, s] and [C, C] or None.
        rotations: [2, B or 1, G, C, s / 2], or None.
        weight_scale: [B or 1, G or 1, C or 1, C or 1], the factor of the squared scores; zero where a key is not visible.
        state_scale: [B or 1, G], the factor of the queries q_lin.
        document: int64 [G], the document of each chunk, or None for a single one.
        output: [d, e], the weight of the output projection, or None.
        linear: [2, B, G, C, s], queries and keys of the linear part in place of those of Z, or None.
        n_documents: D.
        score_scale: the factor of the products q_quad.k_quad.
        causal: whether chunks use the sums of the chunks before, and not of their whole document.
    """

    projected: Tensor
    projection_bias: Tensor | None
    gamma: Tensor
    beta: Tensor
    bias: Tensor | None
    rotations: Tensor | None
    weight_scale: Tensor
    state_scale: Tensor
    document: Tensor | None
    output: Tensor | None
    linear: Tensor | None
    n_documents: int
    score_scale: float
    causal: bool


def attend(
    projected: Projected, bias: Tensor | None, batch: Batch, options: MixedChunkOptions, output: Tensor | None = None
) -> Tensor:
    """Gated attention of the projected tokens of a layer, with activation "relu2": [B, T, e], or [B, T, d] with `output`."""
    # Slots without a token must stay zero.
    inputs = _inputs(projected if batch.real is None else projected.with_bias(), bias, batch, options, output)
    return batch.join(_fused(inputs).to(output_dtype(projected.tokens, inputs.projected.dtype)))


def can_extend(
    projected: Projected, bias: Tensor | None, options: MixedChunkOptions, summary: Tensor, backend: Backend
) -> bool:
    """Whether `extend_gated` takes streams: the backend chooses tiles, which can run here, and nothing needs a gradient."""
    tokens, gamma, beta = projected[:3]
    if is_traced() or backend not in ("auto", "tiled") or projected.d_qk % 2:
        return False
    with without_autocast(tokens):
        plain = is_plain(tokens, gamma, beta, bias, summary)
    return plain and why_not("tiled", tokens.device, tokens.dtype, options.activation, SOURCE) is None


def extend_gated(
    projected: Projected, bias: Tensor | None, batch: Batch, options: MixedChunkOptions, summary: Tensor, position: int
) -> tuple[Tensor, Tensor]:
    """Gated attention of whole chunks of new tokens of causal streams, after others: [B, N, e], and the new summary.

    `summary`, [B, s, e], is the sum of k_lin v^T over the `position` tokens before, which are whole chunks. It is not changed.
    """
    total = summary.to(acc_dtype(projected.tokens), copy=True)
    inputs = _inputs(projected, bias, batch, options, None, position)
    with without_autocast(projected.tokens):
        gated = _forward(inputs, keep=False, summary=total)[0].to(output_dtype(projected.tokens, inputs.projected.dtype))
    return batch.join(gated), total.to(summary.dtype)


def _inputs(
    projected: Projected, bias: Tensor | None, batch: Batch, options: MixedChunkOptions, output: Tensor | None, before: int = 0
) -> Inputs:
    """The inputs in the dtype to compute in, which depends on the autocast of the caller."""
    tokens, gamma, beta, projection_bias, maps = projected
    compute = matmul_dtype(tokens, gamma)
    linear = None if maps is None else torch.stack([batch.cut(x.to(compute)) for x in maps])
    scales = chunk_scales(batch, options, projected.d_qk, tokens, before)
    weight_scale = scales.row_scale[..., None]
    if options.causal:  # zero for keys that come later
        weight_scale = weight_scale * weight_scale.new_ones(batch.chunk_size, batch.chunk_size).tril()
    return Inputs(
        batch.cut(tokens.to(compute)), projection_bias, gamma, beta, bias, batch.chunk_rotations,
        weight_scale, scales.state_scale, batch.chunk_document, output, linear, len(batch.chunk_starts) - 1, scales.score_scale,
        options.causal,
    )  # fmt: skip


class Tile(NamedTuple):
    """Some chunks of a row or, if rows have a single chunk, those of some rows.

    Attributes:
        at: the rows and chunks as an index, [B, G, ...] -> [N, ...].
        chunks: which chunks of its rows they are.
        readers: which of the N use sums. If causal, the first chunk of a row does not.
        sources: which of the N are in sums that are used. If causal, the last chunk of a row is not.
    """

    at: tuple[int | slice, int | slice]
    chunks: slice
    readers: slice
    sources: slice


def _tiles(inputs: Inputs, in_stream: bool) -> list[Tile]:
    """The tiles of a call. In a stream, no chunk is the first of its row, nor the last."""
    batch, n_chunks, chunk_size, _ = inputs.projected.shape
    tiles, at_once, has_ends = [], max(1, TILE_TOKENS // chunk_size), inputs.causal and not in_stream
    n_rows = at_once if n_chunks == 1 else 1
    for row in range(0, batch, n_rows):
        for start in range(0, n_chunks, at_once):
            rows, chunks = slice(row, min(row + n_rows, batch)), slice(start, min(start + at_once, n_chunks))
            b = rows.stop - row
            n = b * (chunks.stop - start)
            readers = slice(b if has_ends and start == 0 else 0, n)
            sources = slice(0, n - b if has_ends and chunks.stop == n_chunks else n)
            tiles.append(Tile((rows, 0) if n_chunks == 1 else (row, chunks), chunks, readers, sources))
    return tiles


class Work:
    """The inputs of a call, and what is computed in a tile between its matrix products: by cpu.cpp.

    `gamma`, `beta` and the biases are in the dtype of scores and sums. `document` is int64 [B, G], the document of each chunk
    among those of all rows.
    """

    def __init__(self, inputs: Inputs, in_stream: bool = False) -> None:
        self.inputs, self.projected = inputs, inputs.projected.contiguous()
        batch, n_chunks, chunk_size, width = self.projected.shape
        d_qk = inputs.gamma.shape[1]
        self.sum_shape = d_qk, (width - d_qk) // 2
        self.compute, exact = self.projected.dtype, acc_dtype(self.projected)
        self.tiles = _tiles(inputs, in_stream)
        functions = native_functions(SOURCE)
        assert functions is not None, "the backend is chosen where they are built"
        self.call = functions.call
        projection_bias = self.projected.new_zeros(width) if inputs.projection_bias is None else inputs.projection_bias
        self.projection_bias = projection_bias.to(exact).contiguous()
        self.gamma, self.beta = inputs.gamma.to(exact).contiguous(), inputs.beta.to(exact).contiguous()
        self.bias = None if inputs.bias is None else inputs.bias.to(exact).contiguous()
        # What chunks or slots share is not repeated: it has strides of zero.
        scale = inputs.weight_scale.to(exact).expand(*inputs.weight_scale.shape[:3], chunk_size).contiguous()
        self.weight_scale = scale.expand(batch, n_chunks, chunk_size, chunk_size)
        self.state_scale = inputs.state_scale.to(exact).expand(batch, n_chunks).contiguous()
        rotations = inputs.rotations
        if rotations is None:
            rotations = no_rotation_table(d_qk, exact, self.projected.device)[:, None, None]
        rotations = rotations.to(exact).contiguous().expand(2, batch, n_chunks, chunk_size, d_qk // 2)
        self.cosines, self.sines = rotations.unbind()
        first = inputs.n_documents * torch.arange(batch, device=scale.device)[:, None].expand(batch, n_chunks)
        self.document = first if inputs.document is None else first + inputs.document
        changes = None if inputs.document is None else inputs.document.diff(prepend=inputs.document[:1]) != 0
        self._changes = None if changes is None else F.pad(changes, (0, 1))  # bool [G + 1]

    def activate(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        """U and V, [N, C, e], and the queries and keys [4, N, C, s], with q_lin scaled unless it is given."""
        at, (s, e) = tile.at, self.sum_shape
        before, cosines = self.projected[at], self.cosines[at]
        n, c, _ = before.shape
        active, maps = before.new_empty(2, n, c, e), before.new_empty(4, n, c, s)
        self.call(
            "activate", self.compute,
            before, self.projection_bias, self.gamma, self.beta, cosines, self.sines[at], *cosines.stride()[:2],
            self.state_scale[at], active, maps, n, c, e, s,
        )  # fmt: skip
        if self.inputs.linear is not None:
            maps[2:] = self.inputs.linear[:, at[0], at[1]]
        return active[0], active[1], maps

    def run_sums(self, total: Tensor, sums: Tensor, out: Tensor, tile: Tile, backwards: bool) -> None:
        """Write the sum over the chunks before each chunk of a tile or, if `backwards`, after it, into `out` [n, s, e].

        `total` [s, e] has that over the tiles before, and is updated to include this one. Of `sums` [n, s, e], that of the last
        chunk, or the first if `backwards`, may be missing; of `out`, that of the last chunk. All may be of several rows.
        """
        start, stop, width = tile.chunks.start, tile.chunks.stop, total.numel()
        begins = None if self._changes is None else self._changes[start + backwards : stop + backwards]
        sizes = (stop - start, sums.numel() // width, out.numel() // width)
        self.call("run_sums", self.compute, total, sums, out, begins, *sizes, int(backwards), width)

    def weigh(self, q: Tensor, k: Tensor, tile: Tile, gradient: Tensor | None = None, d_bias: Tensor | None = None) -> Tensor:
        """The weights inside chunks, [N, C, C]. Their gradient becomes that of the scores, not yet scaled; `d_bias` grows."""
        weights, scale = torch.bmm(q, k.mT), self.weight_scale[tile.at]
        options = (self.bias, scale, *scale.stride()[:2], self.inputs.score_scale)
        if gradient is None:
            self.call("weigh", self.compute, weights, *options, *weights.shape[:2])
        else:
            self.call("weigh_backward", self.compute, weights, gradient, *options, d_bias, *weights.shape[:2])
        return weights


def _forward(inputs: Inputs, keep: bool, summary: Tensor | None = None) -> tuple[Tensor, ...]:
    """The result [B, G, C, e or d] and, for the backward pass, the attention's output and the sums that chunks use.

    For causal streams, `summary` is the sum of k_lin^T v over what came before, [B, s, e]; it is updated in place.
    """
    work, causal = Work(inputs, in_stream=summary is not None), inputs.causal
    batch, n_chunks, chunk_size, _ = inputs.projected.shape
    gated = inputs.projected.new_empty(batch, n_chunks, chunk_size, work.sum_shape[1])
    attended = torch.empty_like(gated) if keep else gated
    if causal:
        totals = work.gamma.new_zeros(batch, *work.sum_shape) if summary is None else summary
        read = gated.new_empty(batch, n_chunks, *work.sum_shape)
    else:
        totals = _totals(work)
        read = totals.unflatten(0, (batch, inputs.n_documents))
    for tile in work.tiles:
        at, _, readers, sources = tile
        gate, v, (q_quad, k_quad, q_lin, k_lin) = work.activate(tile)
        if causal:
            work.run_sums(totals[at[0]], torch.bmm(k_lin[sources].mT, v[sources]), read[at], tile, backwards=False)
        weights = work.weigh(q_quad, k_quad, tile)
        out = attended[at]
        out[: readers.start].zero_()
        torch.bmm(q_lin[readers], read[at][readers] if causal else totals[work.document[at]], out=out[readers])
        out.baddbmm_(weights, v)
        torch.mul(out, gate, out=gated[at])
    return gated if inputs.output is None else F.linear(gated, inputs.output.to(gated.dtype)), attended, read


def _totals(work: Work, d_gated: Tensor | None = None) -> Tensor:
    """The sums over whole documents, [B D, s, e]: of k_lin^T v or, for the backward pass, of q_lin^T d_out."""
    totals = work.gamma.new_zeros(len(work.projected) * work.inputs.n_documents, *work.sum_shape)
    for tile in work.tiles:
        gate, v, (_, _, q_lin, k_lin) = work.activate(tile)
        x, values = (k_lin, v) if d_gated is None else (q_lin, d_gated[tile.at] * gate)
        totals.index_add_(0, work.document[tile.at], torch.bmm(x.mT, values).to(totals.dtype))
    return totals.to(work.compute)


def _backward(inputs: Inputs, kept: tuple[Tensor, ...], d_out: Tensor, wanted: list[bool]) -> list[Tensor | None]:
    output, d_out, (attended, read) = inputs.output, d_out.contiguous(), (x.contiguous() for x in kept)
    d_gated = d_out if output is None else d_out @ output.to(d_out.dtype)
    work, causal = Work(inputs), inputs.causal
    d_projected, d_bias = torch.empty_like(work.projected), None if work.bias is None else torch.zeros_like(work.bias)
    d_linear = None if inputs.linear is None else torch.empty_like(inputs.linear)
    d_parameters = [torch.zeros_like(x) for x in (work.projection_bias, work.gamma, work.beta)]
    # The gradient of the sums k_lin^T v, from the chunks that use them.
    totals = work.gamma.new_zeros(len(read), *work.sum_shape) if causal else _totals(work, d_gated)
    for tile in reversed(work.tiles):
        at, _, readers, sources = tile
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
        used = read[at][readers] if causal else read.flatten(0, 1)[work.document[at]]
        torch.bmm(d_attended[readers], used.mT, out=d_q_lin[readers])
        if causal:
            d_sums = v.new_empty(sources.stop, *work.sum_shape)
            work.run_sums(totals[at[0]], q_lin[readers].mT @ d_attended[readers], d_sums, tile, backwards=True)
        else:
            d_sums = totals[work.document[at]]
        torch.bmm(v[sources], d_sums.mT, out=d_k_lin[sources])
        d_v[sources].baddbmm_(k_lin[sources], d_sums)
        d_q_lin[: readers.start].zero_()
        d_k_lin[sources.stop :].zero_()
        if d_linear is not None:
            d_linear[:, at[0], at[1]] = d_maps[2:]
            d_maps[2:] = 0

        # The gate, SiLU and the maps. For an output projection, d_gated is overwritten with the gated output.
        cosines = work.cosines[at]
        work.call(
            "finish", work.compute,
            work.projected[at], work.projection_bias, d_gated[at], int(output is not None), attended[at], d_v, d_maps,
            work.gamma, cosines, work.sines[at], *cosines.stride()[:2], work.state_scale[at], inputs.score_scale,
            d_projected[at], *d_parameters, *d_v.shape, work.sum_shape[0],
        )  # fmt: skip
    d_output = None if output is None else d_out.flatten(0, -2).mT @ d_gated.flatten(0, -2)
    return [d_projected, *d_parameters, d_bias, d_output, d_linear]


def _fake(inputs: Inputs, keep: bool) -> tuple[Tensor, ...]:
    projected, output = inputs.projected, inputs.output
    (batch, n_chunks, chunk_size, width), d_qk = projected.shape, inputs.gamma.shape[1]
    d_value = (width - d_qk) // 2
    out = projected.new_empty(batch, n_chunks, chunk_size, d_value if output is None else output.shape[0])
    attended = projected.new_empty(batch, n_chunks, chunk_size, d_value)
    return out, attended, projected.new_empty(batch, n_chunks if inputs.causal else inputs.n_documents, d_qk, d_value)


_fused = Fused(
    "tiled_mixed_chunk", Inputs, _forward, _fake, _backward, n_kept=2,
    wrt=("projected", "projection_bias", "gamma", "beta", "bias", "output", "linear"), what="backend 'tiled'",
)  # fmt: skip
