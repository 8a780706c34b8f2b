"""The forward and backward pass of tiled.py over the tiles of a batch.

Shapes: B batch, D documents, G chunks of all documents, C chunk size, e value width, s query/key width; in a tile: b rows of
the batch, n chunks, N = b n.
"""

import torch
from torch import Tensor

from lineartime.ops.mixed_chunk.tile_work import TileWork
from lineartime.ops.mixed_chunk.tiles import Documents, Tile, part, tiles_of_rows


def forward(
    work: TileWork, documents: Documents, causal: bool, keep: bool, summary: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gated result [B, G, C, e] and, for the backward pass, the attention's output and the sums that chunks use.

    For causal streams, `summary` is the sum of k_lin^T v over what came before, [B, s, e]; it is updated in place.
    """
    projected = work.projected
    batch, n_chunks, chunk_size, _ = projected.shape
    gated = projected.new_empty(batch, n_chunks, chunk_size, work.d_value)
    attended = torch.empty_like(gated) if keep else projected.new_empty(0)
    read = projected.new_empty(batch, n_chunks if causal else documents.count, work.d_qk, work.d_value)
    all_gated, all_out = gated.flatten(0, 1), (attended if keep else gated).flatten(0, 1)
    for tiles in tiles_of_rows(batch, n_chunks, chunk_size, in_stream=summary is not None):
        rows = tiles[0].rows
        if summary is not None:
            total = summary[rows]
        else:
            total = projected.new_zeros(tiles[0].n_rows, work.d_qk, work.d_value, dtype=work.acc_dtype)
        if not causal:
            read[rows] = _totals(work, documents, tiles)
        for tile in tiles:
            gate, v, (q_quad, k_quad, q_lin, k_lin) = work.activate(tile)
            readers, sources = tile.readers(causal), tile.sources(causal)
            if causal:
                sums = _sums(part(k_lin, sources), part(v, sources))
                work.run_sums(
                    total, sums, tile.of(read.flatten(0, 1)), tile, documents.begins(tile, backwards=False), backwards=False
                )
            weights = work.weights(q_quad, k_quad, tile)
            out = tile.of(all_out)
            if readers.start > 0:
                out[: readers.start].zero_()
            torch.bmm(part(q_lin, readers), _read_by(tile, read, documents, causal), out=part(out, readers))
            out.baddbmm_(weights, v)
            torch.mul(out, gate, out=tile.of(all_gated))
    return gated, attended, read if keep else projected.new_empty(0)


def _totals(work: TileWork, documents: Documents, tiles: list[Tile], d_gated: Tensor | None = None) -> Tensor:
    """The sums over whole documents, [b, D, s, e]: of k_lin^T v or, for the backward pass, of q_lin^T d_out."""
    shape = (tiles[0].n_rows, documents.count, work.d_qk, work.d_value)
    totals = work.projected.new_zeros(shape, dtype=work.acc_dtype)
    for tile in tiles:
        gate, v, (_, _, q_lin, k_lin) = work.activate(tile)
        pair = (k_lin, v) if d_gated is None else (q_lin, tile.of(d_gated.flatten(0, 1)) * gate)
        documents.add(totals, _sums(*pair).to(work.acc_dtype), tile)
    return totals


def _sums(k: Tensor, v: Tensor) -> Tensor:
    """k^T v for every chunk, [N, C, s] and [N, C, e] -> [N, s, e]."""
    return torch.bmm(k.mT, v)


def _read_by(tile: Tile, read: Tensor, documents: Documents, causal: bool) -> Tensor:
    """The sums that the chunks of a tile use, [readers, s, e]."""
    if causal:
        return part(tile.of(read.flatten(0, 1)), tile.readers(causal))
    return documents.spread(read[tile.rows], tile)


def backward(
    work: TileWork, d_gated: Tensor, attended: Tensor, read: Tensor, documents: Documents, causal: bool, gates_again: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `projected`, its bias, gamma, beta and the bias of the scores.

    With `gates_again`, d_gated is overwritten with the gated output.
    """
    projected = work.projected
    batch, n_chunks, chunk_size, _ = projected.shape
    work.start_backward()
    all_d_gated, all_attended = d_gated.flatten(0, 1), attended.flatten(0, 1)
    for tiles in tiles_of_rows(batch, n_chunks, chunk_size):
        # The gradient of the sums k_lin^T v, from the chunks that use them.
        total = projected.new_zeros(tiles[0].n_rows, work.d_qk, work.d_value, dtype=work.acc_dtype)
        if not causal:
            totals = _totals(work, documents, tiles, d_gated)
        for tile in reversed(tiles):
            gate, v, maps = work.activate(tile)
            q_quad, k_quad, q_lin, k_lin = maps
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
            read_here, d_out_here = _read_by(tile, read, documents, causal), part(d_out, readers)
            torch.bmm(d_out_here, read_here.mT, out=part(d_q_lin, readers))
            if causal:
                sums = _sums(part(q_lin, readers), d_out_here)
                d_sums = projected.new_empty(sources.stop, work.d_qk, work.d_value)
                work.run_sums(total, sums, d_sums, tile, documents.begins(tile, backwards=True), backwards=True)
            else:
                d_sums = documents.spread(totals, tile).to(work.compute)
            torch.bmm(part(v, sources), d_sums.mT, out=part(d_k_lin, sources))
            part(d_v, sources).baddbmm_(part(k_lin, sources), d_sums)
            if readers.start > 0:
                d_q_lin[: readers.start].zero_()
            if sources.stop < tile.n:
                d_k_lin[sources.stop :].zero_()

            work.finish(d_gated_here, tile.of(all_attended), d_v, d_maps, tile, gates_again)
    return work.gradients()
