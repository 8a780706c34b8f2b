"""How the tiled form cuts a batch into tiles, and which sums go from one to another.

Shapes: B batch, D documents, G chunks of all documents, C chunk size, e value width, s query/key width; in a tile: b rows of
the batch, n chunks, N = b n.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

TILE_TOKENS = 1024
"""Tokens of a tile: few enough for the cache, and enough that the calls cost little beside the work."""


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


def chunks_at_once(chunk_size: int) -> int:
    """The most chunks of a tile."""
    return max(1, TILE_TOKENS // chunk_size)


def tiles_of_rows(batch: int, n_chunks: int, chunk_size: int) -> Iterator[list[Tile]]:
    """The tiles of a row, first to last, one row after the other, or of some rows at once if each is but one chunk."""
    at_once = chunks_at_once(chunk_size)
    n_rows = at_once if n_chunks == 1 else 1
    parts = [slice(g, min(g + at_once, n_chunks)) for g in range(0, n_chunks, at_once)]
    for row in range(0, batch if parts else 0, n_rows):
        rows = slice(row, min(row + n_rows, batch))
        yield [Tile(rows, part, part.start == 0, part.stop == n_chunks) for part in parts]


class Documents:
    """Which chunks are of one document: sums reach no further. `of_chunk` is int64 [G], or None for a single document."""

    def __init__(self, of_chunk: Tensor | None, count: int) -> None:
        self.of_chunk, self.count = of_chunk, count
        self._begins = None if of_chunk is None else F.pad(of_chunk.diff(prepend=of_chunk[:1]) != 0, (0, 1))  # bool [G + 1]

    def begins(self, tile: Tile, backwards: bool) -> Tensor | None:
        """Which chunks of a tile are the first of another document than the one before, or backwards the last: bool [n].

        None for a single document.
        """
        if self._begins is None:
            return None
        return self._begins[tile.chunks.start + backwards : tile.chunks.stop + backwards]

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
