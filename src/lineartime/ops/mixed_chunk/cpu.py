"""Mixed chunk attention of a FLASH layer on CPUs, a few chunks at a time: everything between its two projections.

Shapes: B batch, D documents, G chunks of all documents, C chunk size, d model width, e value width, s query/key width; in a
tile: b rows of the batch, n chunks, N = b n.

    U, V, Z = split(silu(projected))                                                       [e] [e] [s]
    q_quad, k_quad, q_lin, k_lin = rope(Z * gamma_i + beta_i)                               i = 1 ... 4
    gated = U * (weight_scale * relu(score_scale * q_quad.k_quad + bias)^2 V  +  state_scale * q_lin (sum of k_lin^T V))

If each step covered whole sequences, the steps between two matrix products would go through main memory, which takes as long as
the products. A tile stays in the cache. Only `projected`, the attention's output and the sums that the chunks use are kept for
the backward pass, which recomputes queries, keys and scores. The output projection of a layer can be applied too. Its gradient
needs `gated`, which is recomputed in the memory of its own gradient.

This file has the matrix products; cpu_tiles.py has the tiles and the work between the products, in PyTorch or by cpu.cpp.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.backends import Backend, why_not_tiled
from lineartime.ops.batch import Batch
from lineartime.ops.flops import chunk_products
from lineartime.ops.mixed_chunk.chunked import chunk_scales
from lineartime.ops.mixed_chunk.cpu_tiles import Inputs, Tile, TileWork, functions_for, part, tile_work, tiles_of_rows
from lineartime.ops.mixed_chunk.inputs import MixedChunkOptions, Projected
from lineartime.ops.operator import Fused
from lineartime.ops.precision import acc_dtype, matmul_dtype, output_dtype, without_autocast
from lineartime.ops.tracing import is_plain, is_traced


def attend(
    projected: Projected, bias: Tensor | None, batch: Batch, options: MixedChunkOptions, output: Tensor | None = None
) -> Tensor:
    """Gated attention of the projected tokens of a layer, with activation "relu2": [B, T, e], or [B, T, d] with `output`."""
    if batch.real is not None:
        projected = projected.with_bias()  # slots without a token must stay zero
    return _join(_fused(_inputs(projected, bias, batch, options, output)), projected, batch)


def can_extend(
    projected: Projected, bias: Tensor | None, options: MixedChunkOptions, summary: Tensor, backend: Backend
) -> bool:
    """Whether `extend_gated` takes streams: the backend chooses tiles, they run in C++ here, and nothing needs a gradient.

    In plain PyTorch, tiles gain nothing.
    """
    tokens, gamma, beta, _ = projected
    compute = matmul_dtype(tokens, gamma)
    if is_traced():  # the compiler cannot trace the search for a C++ compiler
        return False
    if backend not in ("auto", "tiled") or why_not_tiled(tokens.device, compute, options.activation) is not None:
        return False
    if functions_for(projected.d_qk, compute) is None:
        return False
    with without_autocast(tokens):
        return is_plain(tokens, gamma, beta, bias, summary)


def extend_gated(
    projected: Projected, bias: Tensor | None, batch: Batch, options: MixedChunkOptions, summary: Tensor, position: int
) -> tuple[Tensor, Tensor]:
    """`triton.extend_gated` by tiles: whole chunks of new tokens of causal streams, [B, N, e], and the new summary."""
    total, inputs = (
        summary.to(acc_dtype(projected.tokens), copy=True),
        _inputs(projected, bias, batch, options, before=position),
    )
    with without_autocast(projected.tokens):
        gated = _forward_pass(tile_work(inputs), keep=False, summary=total)[0]
    return _join(gated, projected, batch), total.to(summary.dtype)


def _inputs(
    projected: Projected,
    bias: Tensor | None,
    batch: Batch,
    options: MixedChunkOptions,
    output: Tensor | None = None,
    before: int = 0,
) -> Inputs:
    """The inputs in the dtype to compute in, which depends on the autocast of the caller."""
    tokens, gamma, beta, projection_bias = projected
    scales = chunk_scales(batch, options, projected.d_qk, tokens, before)
    weight_scale = scales.row_scale[..., None]
    if options.causal:  # zero for keys that come later
        weight_scale = weight_scale * weight_scale.new_ones(batch.chunk_size, batch.chunk_size).tril()
    return Inputs(
        batch.cut(tokens.to(matmul_dtype(tokens, gamma))), projection_bias, gamma, beta, bias, batch.chunk_rotations,
        weight_scale, scales.state_scale, batch.chunk_document, output, len(batch.chunk_starts) - 1, scales.score_scale,
        options.causal,
    )  # fmt: skip


def _join(out: Tensor, projected: Projected, batch: Batch) -> Tensor:
    compute = matmul_dtype(projected.tokens, projected.gamma)
    return batch.join(out.to(output_dtype(projected.tokens, compute)))


# As an operator of PyTorch --------------------------------------------------------------------------------------------


def _forward(inputs: Inputs, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The result [B, G, C, e or d] and, for the backward pass, the attention's output and the sums that chunks use."""
    gated, attended, read = _forward_pass(tile_work(inputs), keep)
    return gated if inputs.output is None else F.linear(gated, inputs.output.to(gated.dtype)), attended, read


def _fake(inputs: Inputs, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    projected, output = inputs.projected, inputs.output
    batch, n_chunks, chunk_size, _ = projected.shape
    d_qk, d_value = inputs.gamma.shape[1], inputs.d_value
    out = projected.new_empty(batch, n_chunks, chunk_size, d_value if output is None else output.shape[0])
    attended = projected.new_empty(batch, n_chunks, chunk_size, d_value)
    return out, attended, projected.new_empty(batch, n_chunks if inputs.causal else inputs.n_documents, d_qk, d_value)


def _backward(inputs: Inputs, kept: tuple[Tensor, ...], d_out: Tensor, wanted: list[bool]) -> list[Tensor | None]:
    output, d_out, d_output = inputs.output, d_out.contiguous(), None
    d_gated = d_out if output is None else d_out @ output.to(d_out.dtype)
    work = tile_work(inputs)
    attended, read = kept
    _backward_pass(work, d_gated, attended.contiguous(), read.contiguous(), output is not None)
    if output is not None:
        d_output = d_out.flatten(0, -2).mT @ d_gated.flatten(0, -2)  # `d_gated` now holds the gated output
    return [work.d_projected, work.d_projection_bias, work.d_gamma, work.d_beta, work.d_bias, d_output]


def _flops(inputs: Inputs, times: int = 1) -> int:
    (batch, n_chunks, chunk_size, _), (_, d_qk), d_value = inputs.projected.shape, inputs.gamma.shape, inputs.d_value
    n_summed = max(0, n_chunks - 1) if inputs.causal else n_chunks  # the first chunk reads nothing, the last is not read
    of_pairs = d_qk + d_value if times == 1 else 3 * d_qk + 2 * d_value
    of_output = 0 if inputs.output is None else 2 * times * batch * n_chunks * chunk_size * math.prod(inputs.output.shape)
    return of_output + chunk_products(batch, n_chunks, chunk_size, of_pairs, 2 * times * n_summed, d_qk * d_value)


_fused = Fused(
    "tiled_mixed_chunk", Inputs, _forward, _fake, _backward, n_kept=2,
    wrt=("projected", "projection_bias", "gamma", "beta", "bias", "output"), what="backend 'tiled'",
    flops=_flops, backward_flops=lambda inputs, wanted: _flops(inputs, times=2),
)  # fmt: skip


# The two passes -------------------------------------------------------------------------------------------------------


def _forward_pass(work: TileWork, keep: bool, summary: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The gated result [B, G, C, e] and, for the backward pass, the attention's output and the sums that chunks use.

    For causal streams, `summary` is the sum of k_lin^T v over what came before, [B, s, e]; it is updated in place.
    """
    projected, documents, causal = work.projected, work.documents, work.causal
    batch, n_chunks, chunk_size, _ = projected.shape
    gated = projected.new_empty(batch, n_chunks, chunk_size, work.d_value)
    attended = torch.empty_like(gated) if keep else projected.new_empty(0)
    read = projected.new_empty(batch, n_chunks if causal else documents.count, work.d_qk, work.d_value)
    all_gated, all_out = gated.flatten(0, 1), (attended if keep else gated).flatten(0, 1)
    for tiles in tiles_of_rows(batch, n_chunks, chunk_size, in_stream=summary is not None):
        rows = tiles[0].rows
        total = work.zero_sums(tiles[0]) if summary is None else summary[rows]
        if not causal:
            read[rows] = _totals(work, tiles)
        for tile in tiles:
            gate, v, (q_quad, k_quad, q_lin, k_lin) = work.activate(tile)
            readers, sources = tile.readers(causal), tile.sources(causal)
            if causal:
                sums = torch.bmm(part(k_lin, sources).mT, part(v, sources))
                work.run_sums(total, sums, tile.of(read.flatten(0, 1)), tile, backwards=False)
            weights = work.weights(q_quad, k_quad, tile)
            out = tile.of(all_out)
            if readers.start > 0:
                out[: readers.start].zero_()
            torch.bmm(part(q_lin, readers), _read_by(work, tile, read), out=part(out, readers))
            out.baddbmm_(weights, v)
            torch.mul(out, gate, out=tile.of(all_gated))
    return gated, attended, read


def _totals(work: TileWork, tiles: list[Tile], d_gated: Tensor | None = None) -> Tensor:
    """The sums over whole documents, [b, D, s, e]: of k_lin^T v or, for the backward pass, of q_lin^T d_out."""
    totals = work.zero_sums(tiles[0])[:, None].repeat(1, work.documents.count, 1, 1)
    for tile in tiles:
        gate, v, (_, _, q_lin, k_lin) = work.activate(tile)
        x, values = (k_lin, v) if d_gated is None else (q_lin, tile.of(d_gated.flatten(0, 1)) * gate)
        work.documents.add(totals, torch.bmm(x.mT, values).to(work.acc_dtype), tile)
    return totals


def _read_by(work: TileWork, tile: Tile, read: Tensor) -> Tensor:
    """The sums that the chunks of a tile use, [readers, s, e]."""
    if work.causal:
        return part(tile.of(read.flatten(0, 1)), tile.readers(True))
    return work.documents.spread(read[tile.rows], tile)


def _backward_pass(work: TileWork, d_gated: Tensor, attended: Tensor, read: Tensor, gates_again: bool) -> None:
    """Compute the gradients that `work` holds. With `gates_again`, d_gated is overwritten with the gated output."""
    projected, documents, causal = work.projected, work.documents, work.causal
    work.start_backward()
    all_d_gated, all_attended = d_gated.flatten(0, 1), attended.flatten(0, 1)
    for tiles in tiles_of_rows(*projected.shape[:3]):
        total = work.zero_sums(tiles[0])  # the gradient of the sums k_lin^T v, from the chunks that use them
        totals = total if causal else _totals(work, tiles, d_gated)
        for tile in reversed(tiles):
            gate, v, (q_quad, k_quad, q_lin, k_lin) = work.activate(tile)
            d_gated_here = tile.of(all_d_gated)
            d_out = d_gated_here * gate

            # Quadratic part: out = w v.
            weights, d_scores = work.weights_backward(q_quad, k_quad, torch.bmm(d_out, v.mT), tile)
            d_v = torch.bmm(weights.mT, d_out)
            d_q_quad, d_k_quad, d_q_lin, d_k_lin = d_maps = projected.new_empty(4, *q_quad.shape)
            torch.bmm(d_scores, k_quad, out=d_q_quad)
            torch.bmm(d_scores.mT, q_quad, out=d_k_quad)

            # Linear part: out = q (sum of k^T v), where q is scaled.
            readers, sources = tile.readers(causal), tile.sources(causal)
            d_out_here = part(d_out, readers)
            torch.bmm(d_out_here, _read_by(work, tile, read).mT, out=part(d_q_lin, readers))
            if causal:
                d_sums = projected.new_empty(sources.stop, work.d_qk, work.d_value)
                work.run_sums(total, torch.bmm(part(q_lin, readers).mT, d_out_here), d_sums, tile, backwards=True)
            else:
                d_sums = documents.spread(totals, tile).to(work.compute)
            torch.bmm(part(v, sources), d_sums.mT, out=part(d_k_lin, sources))
            part(d_v, sources).baddbmm_(part(k_lin, sources), d_sums)
            if readers.start > 0:
                d_q_lin[: readers.start].zero_()
            if sources.stop < tile.n:
                d_k_lin[sources.stop :].zero_()

            work.finish(d_gated_here, tile.of(all_attended), d_v, d_maps, tile, gates_again)
