"""How the tiled form cuts a batch into tiles, and which sums pass from one tile to another.

Shapes: B batch, D documents, G chunks of all documents, C chunk size, e value width, s query/key width; in a tile: b rows of
the batch, n chunks, N = b n.
"""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

TILE_TOKENS = 1024
"""The number of tokens in a tile: small enough for the cache, and large enough that call overhead is negligible."""


class Tile:
    """Some chunks of one row, or the only chunks of several rows. In both cases, they are contiguous in the batch.

    Attributes:
        rows, chunks: the rows of the batch, and the chunks of each row.
        n_rows, n: the number of rows, b, and of chunks in all rows, N.
        first, last: whether the chunks include the first, and the last, of their row; never in a stream.
    """

    def __init__(self, rows: slice, chunks: slice, n_chunks: int, in_stream: bool = False) -> None:
        self.rows, self.chunks = rows, chunks
        self.n_rows = rows.stop - rows.start
        self.n = self.n_rows * (chunks.stop - chunks.start)
        self.first, self.last = chunks.start == 0 and not in_stream, chunks.stop == n_chunks and not in_stream
        start = rows.start * n_chunks + chunks.start
        self._in_batch = slice(start, start + self.n)

    def readers(self, causal: bool) -> slice:
        """Which of the N chunks use sums. If causal, the first chunk of a row does not."""
        return slice(self.n_rows if causal and self.first else 0, self.n)

    def sources(self, causal: bool) -> slice:
        """Which of the N chunks are in sums that are used. If causal, the last chunk of a row is not."""
        return slice(0, self.n - self.n_rows if causal and self.last else self.n)

    def of(self, x: Tensor) -> Tensor:
        """[B G, ...] -> [N, ...]."""
        return x[self._in_batch]


def part(x: Tensor, chunks: slice) -> Tensor:
    """Some chunks of a tile's [N, ...], without indexing if they are all of them."""
    return x if chunks.stop - chunks.start == len(x) else x[chunks]


class Shared:
    """Values [B or 1, G or 1, ...] that all rows share, all chunks of a row, or both."""

    def __init__(self, x: Tensor) -> None:
        rows, chunks = x.shape[:2]
        self._values = x.flatten(0, 1).contiguous()
        self._by_row, self._by_chunk = chunks if rows > 1 else 0, int(chunks > 1)

    def of(self, tile: Tile) -> Tensor:
        """[N or 1, ...]."""
        first = tile.rows.start * self._by_row + tile.chunks.start * self._by_chunk
        differ = self._by_chunk if tile.n_rows == 1 else self._by_row
        return self._values[first : first + (tile.n if differ else 1)]


def chunks_at_once(chunk_size: int) -> int:
    """The maximum number of chunks in a tile."""
    return max(1, TILE_TOKENS // chunk_size)


def tiles_of_rows(batch: int, n_chunks: int, chunk_size: int, in_stream: bool = False) -> Iterator[list[Tile]]:
    """Yield the tiles of each row in order, or of several rows at once if each row is a single chunk; see `Tile`."""
    at_once = chunks_at_once(chunk_size)
    n_rows = at_once if n_chunks == 1 else 1
    parts = [slice(g, min(g + at_once, n_chunks)) for g in range(0, n_chunks, at_once)]
    for row in range(0, batch if parts else 0, n_rows):
        rows = slice(row, min(row + n_rows, batch))
        yield [Tile(rows, chunks, n_chunks, in_stream) for chunks in parts]


class Documents:
    """The document of each chunk; sums do not extend beyond it. `of_chunk` is int64 [G], or None for a single document."""

    def __init__(self, of_chunk: Tensor | None, count: int) -> None:
        self.of_chunk, self.count = of_chunk, count
        self._begins = None if of_chunk is None else F.pad(of_chunk.diff(prepend=of_chunk[:1]) != 0, (0, 1))  # bool [G + 1]

    def begins(self, tile: Tile, backwards: bool) -> Tensor | None:
        """Which chunks of a tile are the first of a new document or, if `backwards`, the last of one: bool [n].

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
        """The total of the document of each chunk: [b, D, s, e] -> [N, s, e]."""
        if self.of_chunk is None:
            return totals[:, 0].repeat_interleave(tile.n // tile.n_rows, 0)
        return totals[:, self.of_chunk[tile.chunks]].flatten(0, 1)
