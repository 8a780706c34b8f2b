"""The arithmetic of tiled.py: how a batch is cut into tiles, and the forward and backward pass over them.

Shapes: B batch, D documents, G chunks of all documents, C chunk size, e value width, s query/key width; in a tile: b rows of
the batch, n chunks, N = b n.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lineartime.ops.precision import acc_dtype

TILE_TOKENS = 1024
"""Tokens of a tile: few enough for the cache, and enough that the calls cost little beside the work."""


# 1. Tiles -------------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """Some chunks of one row, or the only chunk of several rows."""

    rows: slice
    chunks: slice
    first: bool
    last: bool

    @property
    def places(self) -> range:
        """The chunks of a row in this tile."""
        return range(self.chunks.start, self.chunks.stop)

    def readers(self, causal: bool) -> slice:
        """Which of the N chunks read sums: causal, the first of a row has nothing to read."""
        return slice(self.rows.stop - self.rows.start if causal and self.first else 0, None)

    def sources(self, causal: bool) -> slice:
        """Which of the N chunks are in sums that are read: causal, the last of a row is in none."""
        return slice(0, self.rows.start - self.rows.stop if causal and self.last else None)

    def of(self, x: Tensor) -> Tensor:
        """[B, G, ...] -> [N, ...]."""
        return x[self.rows, self.chunks].flatten(0, 1)

    def of_shared(self, x: Tensor) -> Tensor:
        """[B or 1, G or 1, ...] -> [N or 1, ...]: for what may be the same for all rows, or for everything."""
        if x.shape[:2] == (1, 1):
            return x[0]
        x = x if x.shape[0] == 1 else x[self.rows]
        x = x if x.shape[1] == 1 else x[:, self.chunks]
        return x.expand(self.rows.stop - self.rows.start, len(self.places), *x.shape[2:]).flatten(0, 1)


def tiles_of_rows(batch: int, n_chunks: int, chunk_size: int) -> Iterator[list[Tile]]:
    """The tiles of a row, first to last, one row after the other, or of some rows at once if each is but one chunk."""
    at_once = max(1, TILE_TOKENS // chunk_size)
    n_rows = at_once if n_chunks == 1 else 1
    parts = [slice(g, min(g + at_once, n_chunks)) for g in range(0, n_chunks, at_once)]
    for row in range(0, batch if parts else 0, n_rows):
        rows = slice(row, min(row + n_rows, batch))
        yield [Tile(rows, part, part.start == 0, part.stop == n_chunks) for part in parts]


class Documents:
    """Which chunks are of one document: sums reach no further. `of_chunk` is int64 [G], or None for a single document."""

    def __init__(self, of_chunk: Tensor | None, count: int) -> None:
        self.of_chunk, self.count = of_chunk, count
        self._begins = None if of_chunk is None else of_chunk.diff(prepend=of_chunk[:1]) != 0  # bool [G]

    def begin(self, total: Tensor, chunk: int) -> None:
        """Forget a running sum where `chunk` begins another document than the one before."""
        if self._begins is not None and chunk < len(self._begins):
            total.masked_fill_(self._begins[chunk], 0.0)

    def add(self, totals: Tensor, sums: Tensor, tile: Tile) -> None:
        """Add sums of chunks, [N, s, e], to the totals of their documents, [b, D, s, e]."""
        by_row = sums.unflatten(0, (len(totals), -1))
        if self.of_chunk is None:
            totals += by_row.sum(1, keepdim=True)
        else:
            totals.index_add_(1, self.of_chunk[tile.chunks], by_row)

    def spread(self, totals: Tensor, tile: Tile) -> Tensor:
        """The totals [b, D, s, e] of the documents that the chunks are of: [N, s, e]."""
        if self.of_chunk is None:
            return totals[:, 0].repeat_interleave(len(tile.places), 0)
        return totals[:, self.of_chunk[tile.chunks]].flatten(0, 1)


# 2. What both passes compute of a tile --------------------------------------------------------------------------------


def _pairs(x: Tensor) -> Tensor:
    """[..., s] -> [..., s], with the two halves of a rotated pair side by side.

    Products of queries and keys do not depend on the order of features, and neighbours are complex numbers.
    """
    pairs: Tensor = x.unflatten(-1, (2, -1)).mT.flatten(-2)
    return pairs


def _halves(x: Tensor) -> Tensor:
    """The inverse of `_pairs`."""
    halves: Tensor = x.unflatten(-1, (-1, 2)).mT.flatten(-2)
    return halves


def _rotate(maps: Tensor, rotations: Tensor | None) -> Tensor:
    """Rotate maps [4, N, C, s], in pairs, in place, by complex numbers [N or 1, C, s / 2]."""
    if rotations is not None:
        torch.view_as_complex(maps.unflatten(-1, (-1, 2))).mul_(rotations)
    return maps


class Core:
    """The constants of a call, and what they make of a tile. `acc_dtype` is the dtype of scores and sums."""

    def __init__(
        self, projected: Tensor, gamma: Tensor, beta: Tensor, bias: Tensor | None, rotations: Tensor | None,
        weight_scale: Tensor, state_scale: Tensor, score_scale: float,
    ) -> None:  # fmt: skip
        self.projected, self.score_scale = projected, score_scale
        self.compute = projected.dtype
        self.acc_dtype = acc_dtype(projected)
        self.d_qk = gamma.shape[1]
        self.d_value = (projected.shape[-1] - self.d_qk) // 2
        self.bias = None if bias is None else bias.to(self.acc_dtype)
        self.weight_scale = weight_scale.to(self.acc_dtype)
        self.state_scale = state_scale.to(self.acc_dtype)[..., None, None]
        at_once = max(1, TILE_TOKENS // projected.shape[2])
        self._activated = projected.new_empty(at_once, *projected.shape[2:])
        self.rotations = None if rotations is None else torch.complex(*rotations.to(self.acc_dtype).unbind(0))
        self.gamma, self.beta = (self.in_pairs(x.to(self.acc_dtype))[:, None, None] for x in (gamma, beta))

    def in_pairs(self, x: Tensor) -> Tensor:
        """`_pairs`, where anything is to be rotated."""
        return x if self.rotations is None else _pairs(x)

    def in_halves(self, x: Tensor) -> Tensor:
        """The inverse of `in_pairs`."""
        return x if self.rotations is None else _halves(x)

    def activated(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        """U and V, [N, C, e], and Z in pairs, [N, C, s]; the next call overwrites U and V."""
        before = tile.of(self.projected)
        # The same memory for every tile: the system would have to clear fresh memory each time.
        activated = self._activated.narrow(0, 0, len(before))
        torch.ops.aten.silu.out(before, out=activated)
        gate, v, z = activated.split([self.d_value, self.d_value, self.d_qk], -1)
        return gate, v, self.in_pairs(z).to(self.acc_dtype)

    def maps(self, z: Tensor, tile: Tile) -> Tensor:
        """The queries and keys [4, N, C, s]; q_lin is scaled."""
        maps = _rotate(torch.addcmul(self.beta, z, self.gamma), self.rotations_of(tile))
        maps[2].mul_(tile.of_shared(self.state_scale))
        return maps.to(self.compute)

    def rotations_of(self, tile: Tile) -> Tensor | None:
        """The rotations of a tile's tokens."""
        return None if self.rotations is None else tile.of_shared(self.rotations)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """relu(score_scale * q.k + bias), [N, C, C]."""
        if self.compute == self.acc_dtype and self.bias is not None:
            return torch.baddbmm(self.bias, q, k.mT, alpha=self.score_scale).relu_()
        scores = torch.bmm(q, k.mT).to(self.acc_dtype).mul_(self.score_scale)
        return (scores if self.bias is None else scores.add_(self.bias)).relu_()

    def sums(self, k: Tensor, v: Tensor) -> Tensor:
        """k^T v for every chunk, [N, C, s] and [N, C, e] -> [N, s, e]."""
        return torch.bmm(k.mT, v).to(self.acc_dtype)

    def silu_backward(self, gradients: tuple[Tensor, ...], tile: Tile, out: Tensor) -> None:
        """From the gradients of U, V and Z to that of `projected`, written where it belongs."""
        widths = [part.shape[-1] for part in gradients]
        parts = zip(gradients, tile.of(self.projected).split(widths, -1), tile.of(out).split(widths, -1), strict=True)
        for gradient, before, into in parts:
            torch.ops.aten.silu_backward.grad_input(gradient, before, grad_input=into)


# 3. Forward -----------------------------------------------------------------------------------------------------------


def forward(core: Core, documents: Documents, causal: bool, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The gated result [B, G, C, e] and, to be kept, attention's output and the sums that chunks read."""
    projected = core.projected
    batch, n_chunks, chunk_size, _ = projected.shape
    gated = projected.new_empty(batch, n_chunks, chunk_size, core.d_value)
    attended = torch.empty_like(gated) if keep else projected.new_empty(0)
    read = projected.new_empty(batch, n_chunks if causal else documents.count, core.d_qk, core.d_value)
    for tiles in tiles_of_rows(batch, n_chunks, chunk_size):
        rows = tiles[0].rows
        total = projected.new_zeros(rows.stop - rows.start, core.d_qk, core.d_value, dtype=core.acc_dtype)
        if not causal:
            totals = _totals(core, documents, tiles)
            read[rows] = totals
        for tile in tiles:
            gate, v, z = core.activated(tile)
            q_quad, k_quad, q_lin, k_lin = core.maps(z, tile)
            readers, sources = tile.readers(causal), tile.sources(causal)
            if causal:
                sums = core.sums(k_lin[sources], v[sources])
                for i, chunk in enumerate(tile.places):
                    documents.begin(total, chunk)
                    read[rows, chunk] = total
                    if i < len(sums):
                        total += sums[i]
            scores = core.scores(q_quad, k_quad)
            weights = (scores * scores).mul_(tile.of_shared(core.weight_scale)).to(core.compute)
            out = tile.of(attended if keep else gated)
            out[: readers.start].zero_()
            torch.bmm(q_lin[readers], _read_by(tile, read, documents, causal), out=out[readers])
            out.baddbmm_(weights, v)
            torch.mul(out, gate, out=tile.of(gated))
    return gated, attended, read if keep else projected.new_empty(0)


def _totals(core: Core, documents: Documents, tiles: list[Tile], d_gated: Tensor | None = None) -> Tensor:
    """The sums over whole documents, [b, D, s, e]: of k_lin^T v or, for the backward pass, of q_lin^T d_out."""
    rows = tiles[0].rows
    shape = (rows.stop - rows.start, documents.count, core.d_qk, core.d_value)
    totals = core.projected.new_zeros(shape, dtype=core.acc_dtype)
    for tile in tiles:
        gate, v, z = core.activated(tile)
        _, _, q_lin, k_lin = core.maps(z, tile)
        sums = core.sums(k_lin, v) if d_gated is None else core.sums(q_lin, tile.of(d_gated) * gate)
        documents.add(totals, sums, tile)
    return totals


def _read_by(tile: Tile, read: Tensor, documents: Documents, causal: bool) -> Tensor:
    """The sums that the chunks of a tile read, [readers, s, e]."""
    return tile.of(read)[tile.readers(causal)] if causal else documents.spread(read[tile.rows], tile)


# 4. Backward ----------------------------------------------------------------------------------------------------------


def backward(
    core: Core, d_gated: Tensor, attended: Tensor, read: Tensor, documents: Documents, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `projected`, gamma, beta and, if there is one, bias."""
    projected = core.projected
    batch, n_chunks, chunk_size, _ = projected.shape
    d_projected = torch.empty_like(projected)
    d_gamma, d_beta = projected.new_zeros(2, 4, core.d_qk, dtype=core.acc_dtype)
    d_bias = projected.new_zeros(0 if core.bias is None else chunk_size, chunk_size, dtype=core.acc_dtype)
    for tiles in tiles_of_rows(batch, n_chunks, chunk_size):
        rows = tiles[0].rows
        # The gradient of the sums k_lin^T v, from the chunks that read them.
        total = projected.new_zeros(rows.stop - rows.start, core.d_qk, core.d_value, dtype=core.acc_dtype)
        if not causal:
            totals = _totals(core, documents, tiles, d_gated)
        for tile in reversed(tiles):
            gate, v, z = core.activated(tile)
            maps = core.maps(z, tile)
            q_quad, k_quad, q_lin, k_lin = maps
            d_out = tile.of(d_gated) * gate
            d_gate = tile.of(d_gated) * tile.of(attended)

            # Quadratic part: out = w v with w = scale * r^2 and r = relu(score).
            scores = core.scores(q_quad, k_quad)
            scaled = scores * tile.of_shared(core.weight_scale)
            d_v = torch.bmm(scores.mul_(scaled).to(core.compute).mT, d_out)
            d_scores = torch.bmm(d_out, v.mT).to(core.acc_dtype).mul_(scaled).mul_(2)
            if core.bias is not None:
                d_bias += d_scores.sum(0)
            d_scores = d_scores.to(core.compute)
            products = torch.empty_like(maps)
            torch.bmm(d_scores, k_quad, out=products[0])
            torch.bmm(d_scores.mT, q_quad, out=products[1])

            # Linear part: out = q (sum of k^T v), q being scaled.
            readers, sources = tile.readers(causal), tile.sources(causal)
            products[2, : readers.start].zero_()
            torch.bmm(d_out[readers], _read_by(tile, read, documents, causal).mT, out=products[2, readers])
            if causal:
                sums = core.sums(q_lin[readers], d_out[readers])
                d_sums = projected.new_empty(len(v[sources]), core.d_qk, core.d_value)
                for i, chunk in reversed(list(enumerate(tile.places))):
                    documents.begin(total, chunk + 1)
                    if i < len(d_sums):
                        d_sums[i] = total[0]
                    if i >= readers.start:
                        total += sums[i - readers.start]
            else:
                d_sums = documents.spread(totals, tile).to(core.compute)
            products[3, len(d_sums) :].zero_()
            torch.bmm(v[sources], d_sums.mT, out=products[3, sources])
            d_v[sources].baddbmm_(k_lin[sources], d_sums)

            d_maps = products.to(core.acc_dtype)
            d_maps[:2].mul_(core.score_scale)
            d_maps[2].mul_(tile.of_shared(core.state_scale))
            rotations = core.rotations_of(tile)
            # Not conj(): inside an operator, compiled code loses a conjugation that is not carried out.
            _rotate(d_maps, None if rotations is None else rotations.conj_physical())
            d_beta += d_maps.sum((1, 2))
            d_gamma += (d_maps * z).sum((1, 2))
            d_z = core.in_halves(d_maps.mul_(core.gamma).sum(0)).to(core.compute)
            core.silu_backward((d_gate, d_v, d_z), tile, d_projected)
    return d_projected, core.in_halves(d_gamma), core.in_halves(d_beta), d_bias
