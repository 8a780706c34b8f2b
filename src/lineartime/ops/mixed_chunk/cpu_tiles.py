"""Tiles of a batch, and what is computed in one between matrix products: in plain PyTorch or by cpu.cpp, in one memory pass.

Shapes: B batch, D documents, G chunks of all documents, C chunk size, e value width, s query/key width; in a tile: b rows of
the batch, n chunks, N = b n.

    U, V, Z = split(silu(projected))                      q_quad, k_quad, q_lin, k_lin = rope(Z * gamma_i + beta_i)
    weights = weight_scale * relu(score_scale * q_quad.k_quad + bias)^2
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lineartime.native import NATIVE_DTYPES, NativeFunctions, native_functions
from lineartime.ops.positions import no_rotation_table, rotate
from lineartime.ops.precision import acc_dtype

SOURCE = Path(__file__).with_name("cpu.cpp")
TILE_TOKENS = 1024
"""The number of tokens in a tile: small enough for the cache, and large enough that call overhead is negligible."""


class Inputs(NamedTuple):
    """The inputs of all tiles of a call.

    Attributes:
        projected: [B, G, C, 2 e + s], zero in slots without a token. Its dtype is that of matrix products.
        projection_bias: [2 e + s], to be added to `projected`, or None.
        gamma, beta: [4, s].
        bias: [C, C], or None.
        rotations: [2, B or 1, G, C, s / 2], or None.
        weight_scale: [B or 1, G or 1, C or 1, C or 1], the factor of the squared scores; zero where a key is not visible.
        state_scale: [B or 1, G], the factor of the queries q_lin.
        document: int64 [G], the document of each chunk, or None for a single one.
        output: [d, e], the weight of the output projection, or None.
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
    n_documents: int
    score_scale: float
    causal: bool

    @property
    def d_value(self) -> int:
        """The value width e."""
        return (self.projected.shape[-1] - self.gamma.shape[1]) // 2


# 1. Tiles -------------------------------------------------------------------------------------------------------------


class Tile:
    """Some chunks of one row, or the only chunks of several rows: `chunks` of each of `rows`, contiguous in the batch.

    `n_rows` is b and `n` is N. In a stream, no chunk is the first of its row, nor the last.
    """

    def __init__(self, rows: slice, chunks: slice, n_chunks: int, in_stream: bool = False) -> None:
        self.rows, self.chunks = rows, chunks
        self.n_rows = rows.stop - rows.start
        self.n = self.n_rows * (chunks.stop - chunks.start)
        self._first, self._last = chunks.start == 0 and not in_stream, chunks.stop == n_chunks and not in_stream
        start = rows.start * n_chunks + chunks.start
        self._in_batch = slice(start, start + self.n)

    def readers(self, causal: bool) -> slice:
        """Which of the N chunks use sums. If causal, the first chunk of a row does not."""
        return slice(self.n_rows if causal and self._first else 0, self.n)

    def sources(self, causal: bool) -> slice:
        """Which of the N chunks are in sums that are used. If causal, the last chunk of a row is not."""
        return slice(0, self.n - self.n_rows if causal and self._last else self.n)

    def of(self, x: Tensor) -> Tensor:
        """[B G, ...] -> [N, ...]."""
        return x[self._in_batch]


def part(x: Tensor, chunks: slice) -> Tensor:
    """Some chunks of a tile's [N, ...], without indexing if they are all of them."""
    return x if chunks.stop - chunks.start == len(x) else x[chunks]


def tiles_of_rows(batch: int, n_chunks: int, chunk_size: int, in_stream: bool = False) -> Iterator[list[Tile]]:
    """Yield the tiles of each row in order, or of several rows at once if each row is a single chunk; see `Tile`."""
    at_once = _chunks_at_once(chunk_size)
    n_rows = at_once if n_chunks == 1 else 1
    parts = [slice(g, min(g + at_once, n_chunks)) for g in range(0, n_chunks, at_once)]
    for row in range(0, batch if parts else 0, n_rows):
        rows = slice(row, min(row + n_rows, batch))
        yield [Tile(rows, chunks, n_chunks, in_stream) for chunks in parts]


def _chunks_at_once(chunk_size: int) -> int:
    return max(1, TILE_TOKENS // chunk_size)


class _Shared:
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


class Documents:
    """The document of each chunk; sums do not extend beyond it. `of_chunk` is int64 [G], or None for a single document."""

    def __init__(self, of_chunk: Tensor | None, count: int) -> None:
        self.of_chunk, self.count = of_chunk, count
        self._begins = None if of_chunk is None else F.pad(of_chunk.diff(prepend=of_chunk[:1]) != 0, (0, 1))  # bool [G + 1]

    def begins(self, tile: Tile, backwards: bool) -> Tensor | None:
        """Which chunks are the first of a new document or, if `backwards`, the last of one: bool [n]; None for a single one."""
        return None if self._begins is None else self._begins[tile.chunks.start + backwards : tile.chunks.stop + backwards]

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


# 2. Between the matrix products ---------------------------------------------------------------------------------------


class TileWork:
    """The work for each tile of a call, in plain PyTorch. `acc_dtype` is the dtype of scores and sums."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.projected = inputs, inputs.projected.contiguous()
        self.causal, self.score_scale, self.compute = inputs.causal, inputs.score_scale, self.projected.dtype
        self.documents = Documents(inputs.document, inputs.n_documents)
        self.acc_dtype, self.d_qk, self.d_value = acc_dtype(self.projected), inputs.gamma.shape[1], inputs.d_value
        self._chunks, chunk_size = self.projected.flatten(0, 1), self.projected.shape[2]
        bias = self.projected.new_zeros(self.projected.shape[-1]) if inputs.projection_bias is None else inputs.projection_bias
        wide = (bias, inputs.gamma, inputs.beta)
        self.projection_bias, self.gamma, self.beta = [x.to(self.acc_dtype).contiguous() for x in wide]
        self.bias = None if inputs.bias is None else inputs.bias.to(self.acc_dtype).contiguous()
        self._state_scale = self._shared(inputs.state_scale[..., None, None].expand(*self.projected.shape[:2], 1, 1))
        self._weight_scale = self._shared(inputs.weight_scale.expand(*inputs.weight_scale.shape[:3], chunk_size))
        rotations = inputs.rotations
        if rotations is None:
            rotations = no_rotation_table(self.d_qk, self.acc_dtype, self.projected.device)[:, None, None]
        self._cosines, self._sines = map(self._shared, rotations)

    def _shared(self, x: Tensor) -> _Shared:
        return _Shared(x.to(self.acc_dtype))

    def zero_sums(self, tile: Tile) -> Tensor:
        """Zero sums for the rows of a tile, [b, s, e]."""
        return self.projected.new_zeros(tile.n_rows, self.d_qk, self.d_value, dtype=self.acc_dtype)

    def start_backward(self) -> None:
        """Set the gradients to zero."""
        self.d_projected = torch.empty_like(self.projected)
        self._d_chunks = self.d_projected.flatten(0, 1)
        self.d_projection_bias, self.d_gamma, self.d_beta = map(torch.zeros_like, (self.projection_bias, self.gamma, self.beta))
        self.d_bias = None if self.bias is None else torch.zeros_like(self.bias)

    def activate(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        """U and V, [N, C, e], and the queries and keys [4, N, C, s], with q_lin scaled. The next call may overwrite them."""
        gate, v, z = F.silu(self._before(tile)).split([self.d_value, self.d_value, self.d_qk], -1)
        self._gate, self._z = gate, z.to(self.acc_dtype)
        maps = self._rotated(self._z * self.gamma[:, None, None] + self.beta[:, None, None], tile)
        maps[2].mul_(self._state_scale.of(tile))
        return gate, v, maps.to(self.compute)

    def run_sums(self, total: Tensor, sums: Tensor, out: Tensor, tile: Tile, backwards: bool) -> None:
        """Write the sum over the chunks before each chunk of a tile or, if `backwards`, after it, into `out` [n, s, e].

        `total` [b, s, e] has that over the tiles before, and is updated to include this one. Of `sums` [n, s, e], that of the
        last chunk, or the first if `backwards`, may be missing; of `out`, that of the last chunk.
        """
        n, begins = tile.n // tile.n_rows, self.documents.begins(tile, backwards)
        sums, out = (x.view(-1, *total.shape) for x in (sums, out))
        missing = n - len(sums) if backwards else 0
        for i in reversed(range(n)) if backwards else range(n):
            if begins is not None:
                total.masked_fill_(begins[i], 0.0)
            if i < len(out):
                out[i] = total
            if 0 <= i - missing < len(sums):
                total += sums[i - missing]

    def weights(self, q: Tensor, k: Tensor, tile: Tile) -> Tensor:
        """The weights of values inside chunks, [N, C, C]."""
        scores = self._scores(q, k)
        return (scores * scores).mul_(self._weight_scale.of(tile)).to(self.compute)

    def weights_backward(self, q: Tensor, k: Tensor, d_weights: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """The weights again, and the gradient of the scores, not yet scaled: [N, C, C] each."""
        scores = self._scores(q, k)
        scaled = scores * self._weight_scale.of(tile)
        d_scores = d_weights.to(self.acc_dtype).mul_(scaled).mul_(2)
        if self.d_bias is not None:
            self.d_bias += d_scores.sum(0)
        return scores.mul_(scaled).to(self.compute), d_scores.to(self.compute)

    def finish(self, d_gated: Tensor, attended: Tensor, d_v: Tensor, d_maps: Tensor, tile: Tile, gates_again: bool) -> None:
        """Compute the gradients of a call from those of the gated output, of V and of the queries and keys, not yet scaled."""
        d_maps = d_maps.to(self.acc_dtype)
        d_maps[:2].mul_(self.score_scale)
        d_maps[2].mul_(self._state_scale.of(tile))
        d_maps = self._rotated(d_maps, tile, back=True)
        self.d_beta += d_maps.sum((1, 2))
        self.d_gamma += (d_maps * self._z).sum((1, 2))
        d_z = (d_maps * self.gamma[:, None, None]).sum(0).to(self.compute)
        d_active = torch.cat([d_gated * attended, d_v, d_z], -1)
        d_projected = tile.of(self._d_chunks)
        torch.ops.aten.silu_backward.grad_input(d_active, self._before(tile), grad_input=d_projected)
        self.d_projection_bias += d_projected.sum((0, 1), dtype=self.acc_dtype)
        if gates_again:
            torch.mul(attended, self._gate, out=d_gated)

    def _before(self, tile: Tile) -> Tensor:
        """The projected tokens of a tile, before SiLU."""
        before = tile.of(self._chunks)
        return before if self.inputs.projection_bias is None else before + self.projection_bias.to(self.compute)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """relu(score_scale * q.k + bias), [N, C, C]."""
        if self.compute == self.acc_dtype and self.bias is not None:
            return torch.baddbmm(self.bias, q, k.mT, alpha=self.score_scale).relu_()
        scores = torch.bmm(q, k.mT).to(self.acc_dtype).mul_(self.score_scale)
        return (scores if self.bias is None else scores.add_(self.bias)).relu_()

    def _rotated(self, maps: Tensor, tile: Tile, back: bool = False) -> Tensor:
        """Queries and keys [4, N, C, s], rotated, or rotated back."""
        if self.inputs.rotations is None:
            return maps
        sines = self._sines.of(tile)
        return rotate(maps, torch.stack([self._cosines.of(tile), -sines if back else sines]))


class NativeWork(TileWork):
    """The work for each tile by the functions of cpu.cpp, with as many threads as PyTorch uses."""

    def __init__(self, functions: NativeFunctions, inputs: Inputs) -> None:
        super().__init__(inputs)
        self._functions, chunk_size = functions, self.projected.shape[2]
        most = _chunks_at_once(chunk_size)
        # The same memory for every tile, because the system would have to clear new memory each time.
        self._active = self.projected.new_empty(most * chunk_size * 2 * self.d_value)
        self._maps = self.projected.new_empty(4 * most * chunk_size * self.d_qk)
        self._activated: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    @override
    def activate(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        c, e, s, n = self._chunks.shape[1], self.d_value, self.d_qk, tile.n
        if n not in self._activated:
            active = self._active[: 2 * n * c * e].view(2, n, c, e)
            self._activated[n] = active, *active, self._maps[: 4 * n * c * s].view(4, n, c, s)
        active, gate, v, maps = self._activated[n]
        self._functions.call(
            "activate", self.compute,
            tile.of(self._chunks), self.projection_bias, self.gamma, self.beta, *self._turns_and_scale(tile),
            active, maps, n, c, e, s,
        )  # fmt: skip
        return gate, v, maps

    @override
    def run_sums(self, total: Tensor, sums: Tensor, out: Tensor, tile: Tile, backwards: bool) -> None:
        width, begins = total.numel(), self.documents.begins(tile, backwards)
        self._functions.call(
            "run_sums", self.compute,
            total, sums, out, begins, tile.n // tile.n_rows, sums.numel() // width, out.numel() // width, int(backwards), width,
        )  # fmt: skip

    @override
    def weights(self, q: Tensor, k: Tensor, tile: Tile) -> Tensor:
        weights = torch.bmm(q, k.mT)
        self._functions.call("weigh", self.compute, weights, *self._bias_and_scales(tile), *weights.shape[:2])
        return weights

    @override
    def weights_backward(self, q: Tensor, k: Tensor, d_weights: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        weights = torch.bmm(q, k.mT)
        scales = self._bias_and_scales(tile)
        self._functions.call("weigh_backward", self.compute, weights, d_weights, *scales, self.d_bias, *weights.shape[:2])
        return weights, d_weights

    @override
    def finish(self, d_gated: Tensor, attended: Tensor, d_v: Tensor, d_maps: Tensor, tile: Tile, gates_again: bool) -> None:
        n, c = d_v.shape[:2]
        self._functions.call(
            "finish", self.compute,
            tile.of(self._chunks), self.projection_bias, d_gated, int(gates_again), attended, d_v, d_maps, self.gamma,
            *self._turns_and_scale(tile), self.score_scale, tile.of(self._d_chunks), self.d_projection_bias, self.d_gamma,
            self.d_beta, n, c, self.d_value, self.d_qk,
        )  # fmt: skip

    def _bias_and_scales(self, tile: Tile) -> tuple[Tensor | int | float | None, ...]:
        """The bias, the factor of weights with its strides by chunk and by slot, and the factor of products."""
        scale = self._weight_scale.of(tile)
        return self.bias, scale, *_by_chunk_and_slot(scale), self.score_scale

    def _turns_and_scale(self, tile: Tile) -> tuple[Tensor | int, ...]:
        """Cosines, sines and their strides; then the factor of q_lin, [N]."""
        cosines = self._cosines.of(tile)
        return cosines, self._sines.of(tile), *_by_chunk_and_slot(cosines), self._state_scale.of(tile)


def _by_chunk_and_slot(x: Tensor) -> tuple[int, int]:
    """The strides of [N or 1, C or 1, width] by chunk and by slot, zero where they share the values."""
    return x.stride(0) if len(x) > 1 else 0, x.stride(1) if x.shape[1] > 1 else 0


def tile_work(inputs: Inputs) -> TileWork:
    """The work for tiles: by C++ functions if possible, else in plain PyTorch."""
    functions = functions_for(inputs.gamma.shape[1], inputs.projected.dtype)
    return TileWork(inputs) if functions is None else NativeWork(functions, inputs)


def functions_for(d_qk: int, compute: torch.dtype) -> NativeFunctions | None:
    """The C++ functions for an even query/key width and a dtype of matrix products; None if they cannot be built or used."""
    return native_functions(SOURCE) if d_qk % 2 == 0 and compute in NATIVE_DTYPES else None
