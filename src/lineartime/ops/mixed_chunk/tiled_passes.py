"""The forward and backward pass of tiled.py over the tiles of a batch.

Shapes: B batch, D documents, G chunks of all documents, C chunk size, e value width, s query/key width; in a tile: b rows of
the batch, n chunks, N = b n.
"""

import torch
from torch import Tensor

from lineartime.ops.mixed_chunk.tile_work import TileWork
from lineartime.ops.mixed_chunk.tiles import Documents, Tile, tiles_of_rows


def forward(work: TileWork, documents: Documents, causal: bool, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The gated result [B, G, C, e] and, to be kept, attention's output and the sums that chunks read."""
    projected = work.projected
    batch, n_chunks, chunk_size, _ = projected.shape
    gated = projected.new_empty(batch, n_chunks, chunk_size, work.d_value)
    attended = torch.empty_like(gated) if keep else projected.new_empty(0)
    read = projected.new_empty(batch, n_chunks if causal else documents.count, work.d_qk, work.d_value)
    for tiles in tiles_of_rows(batch, n_chunks, chunk_size):
        rows = tiles[0].rows
        total = projected.new_zeros(rows.stop - rows.start, work.d_qk, work.d_value, dtype=work.acc_dtype)
        if not causal:
            totals = _totals(work, documents, tiles)
            read[rows] = totals
        for tile in tiles:
            gate, v, (q_quad, k_quad, q_lin, k_lin) = work.activate(tile)
            readers, sources = tile.readers(causal), tile.sources(causal)
            if causal:
                sums = _sums(k_lin[sources], v[sources])
                work.run_sums(total, sums, tile.of(read), tile, documents.begins(tile, backwards=False), backwards=False)
            weights = work.weights(q_quad, k_quad, tile)
            out = tile.of(attended if keep else gated)
            out[: readers.start].zero_()
            torch.bmm(q_lin[readers], _read_by(tile, read, documents, causal), out=out[readers])
            out.baddbmm_(weights, v)
            torch.mul(out, gate, out=tile.of(gated))
    return gated, attended, read if keep else projected.new_empty(0)


def _totals(work: TileWork, documents: Documents, tiles: list[Tile], d_gated: Tensor | None = None) -> Tensor:
    """The sums over whole documents, [b, D, s, e]: of k_lin^T v or, for the backward pass, of q_lin^T d_out."""
    rows = tiles[0].rows
    shape = (rows.stop - rows.start, documents.count, work.d_qk, work.d_value)
    totals = work.projected.new_zeros(shape, dtype=work.acc_dtype)
    for tile in tiles:
        gate, v, (_, _, q_lin, k_lin) = work.activate(tile)
        pair = (k_lin, v) if d_gated is None else (q_lin, tile.of(d_gated) * gate)
        documents.add(totals, _sums(*pair).to(work.acc_dtype), tile)
    return totals


def _sums(k: Tensor, v: Tensor) -> Tensor:
    """k^T v for every chunk, [N, C, s] and [N, C, e] -> [N, s, e]."""
    return torch.bmm(k.mT, v)


def _read_by(tile: Tile, read: Tensor, documents: Documents, causal: bool) -> Tensor:
    """The sums that the chunks of a tile read, [readers, s, e]."""
    return tile.of(read)[tile.readers(causal)] if causal else documents.spread(read[tile.rows], tile)


def backward(
    work: TileWork, d_gated: Tensor, attended: Tensor, read: Tensor, documents: Documents, causal: bool, gates_again: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `projected`, its bias, gamma, beta and, if there is one, bias.

    With `gates_again`, d_gated becomes the gated output.
    """
    projected = work.projected
    batch, n_chunks, chunk_size, _ = projected.shape
    work.start_backward()
    for tiles in tiles_of_rows(batch, n_chunks, chunk_size):
        rows = tiles[0].rows
        # The gradient of the sums k_lin^T v, from the chunks that read them.
        total = projected.new_zeros(rows.stop - rows.start, work.d_qk, work.d_value, dtype=work.acc_dtype)
        if not causal:
            totals = _totals(work, documents, tiles, d_gated)
        for tile in reversed(tiles):
            gate, v, maps = work.activate(tile)
            q_quad, k_quad, q_lin, k_lin = maps
            d_gated_here = tile.of(d_gated)
            d_out = d_gated_here * gate

            # Quadratic part: out = w v.
            weights, d_scores = work.weights_backward(q_quad, k_quad, torch.bmm(d_out, v.mT), tile)
            d_v = torch.bmm(weights.mT, d_out)
            d_maps = torch.empty_like(maps)
            torch.bmm(d_scores, k_quad, out=d_maps[0])
            torch.bmm(d_scores.mT, q_quad, out=d_maps[1])

            # Linear part: out = q (sum of k^T v), q being scaled.
            readers, sources = tile.readers(causal), tile.sources(causal)
            d_maps[2, : readers.start].zero_()
            torch.bmm(d_out[readers], _read_by(tile, read, documents, causal).mT, out=d_maps[2, readers])
            if causal:
                sums = _sums(q_lin[readers], d_out[readers])
                d_sums = projected.new_empty(len(v[sources]), work.d_qk, work.d_value)
                work.run_sums(total, sums, d_sums, tile, documents.begins(tile, backwards=True), backwards=True)
            else:
                d_sums = documents.spread(totals, tile).to(work.compute)
            d_maps[3, len(d_sums) :].zero_()
            torch.bmm(v[sources], d_sums.mT, out=d_maps[3, sources])
            d_v[sources].baddbmm_(k_lin[sources], d_sums)

            work.finish(d_gated_here, tile.of(attended), d_v, d_maps, tile, gates_again)
    return work.gradients()
