"""What the tiled form computes for a tile between matrix products, by the functions of tiles.cpp, each in one memory pass.

Shapes: B batch, N chunks of a tile, C chunk size, e value width, s query/key width.
"""

from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from lineartime.native import NATIVE_DTYPES, NativeFunctions, native_functions
from lineartime.ops.mixed_chunk.tile_work import PlainWork, TileInputs, TileWork
from lineartime.ops.mixed_chunk.tiles import Shared, Tile, chunks_at_once
from lineartime.ops.positions import no_rotation_table

SOURCE = Path(__file__).with_name("tiles.cpp")


def tile_work(inputs: TileInputs) -> TileWork:
    """The work for tiles: by C++ functions if possible, else in plain PyTorch."""
    functions = functions_for(inputs.gamma.shape[1], inputs.projected.dtype)
    return PlainWork(inputs) if functions is None else NativeWork(functions, inputs)


def functions_for(d_qk: int, compute: torch.dtype) -> NativeFunctions | None:
    """The C++ functions for a query/key width and the dtype of matrix products; None if they cannot be built or used.

    They take pairs of features. An odd width, which is never rotated, needs plain PyTorch.
    """
    return native_functions(SOURCE) if d_qk % 2 == 0 and compute in NATIVE_DTYPES else None


class NativeWork(TileWork):
    """The work for tiles by C++ functions, with as many threads as PyTorch uses."""

    def __init__(self, functions: NativeFunctions, inputs: TileInputs) -> None:
        super().__init__(inputs)
        self._functions, projected = functions, inputs.projected
        chunk_size = projected.shape[2]
        most = chunks_at_once(chunk_size)
        # The same memory for every tile, because the system would have to clear new memory each time.
        self._active = projected.new_empty(most * chunk_size * 2 * self.d_value)
        self._maps = projected.new_empty(4 * most * chunk_size * self.d_qk)
        self._activated: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self._weight_scale = Shared(self.weight_scale.expand(*self.weight_scale.shape[:3], chunk_size))
        rotations = self.rotations
        if rotations is None:
            rotations = no_rotation_table(self.d_qk, self.acc_dtype, projected.device)[:, None, None]
        self._cosines, self._sines = map(Shared, rotations)

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
    def run_sums(self, total: Tensor, sums: Tensor, out: Tensor, tile: Tile, begins: Tensor | None, backwards: bool) -> None:
        width = total.numel()
        self._functions.call(
            "run_sums", self.compute,
            total, sums, out, begins, tile.n // tile.n_rows, sums.numel() // width, out.numel() // width, int(backwards), width,
        )  # fmt: skip

    @override
    def weights(self, q: Tensor, k: Tensor, tile: Tile) -> Tensor:
        weights = torch.bmm(q, k.mT)
        n, c = weights.shape[:2]
        self._functions.call("weigh", self.compute, weights, *self._bias_and_scales(tile), n, c)
        return weights

    @override
    def weights_backward(self, q: Tensor, k: Tensor, d_weights: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        weights = torch.bmm(q, k.mT)
        n, c = weights.shape[:2]
        d_bias = None if self.bias is None else self._d_bias
        self._functions.call("weigh_backward", self.compute, weights, d_weights, *self._bias_and_scales(tile), d_bias, n, c)
        return weights, d_weights

    @override
    def finish(self, d_gated: Tensor, attended: Tensor, d_v: Tensor, d_maps: Tensor, tile: Tile, gates_again: bool) -> None:
        n, c = d_v.shape[:2]
        self._functions.call(
            "finish", self.compute,
            tile.of(self._chunks), self.projection_bias, d_gated, int(gates_again), attended, d_v, d_maps, self.gamma,
            *self._turns_and_scale(tile), self.score_scale, tile.of(self._d_chunks), self._d_projection_bias, self._d_gamma,
            self._d_beta, n, c, self.d_value, self.d_qk,
        )  # fmt: skip

    def _bias_and_scales(self, tile: Tile) -> tuple[Tensor | int | float | None, ...]:
        """The bias, the factor of weights with its strides by chunk and by slot, and the factor of products."""
        scale = self._weight_scale.of(tile)
        return self.bias, scale, *_by_chunk_and_slot(scale), self.score_scale

    def _turns_and_scale(self, tile: Tile) -> tuple[Tensor | int, ...]:
        """Cosines, sines and their strides by chunk and by slot; then the factor of q_lin, [N]."""
        cosines = self._cosines.of(tile)
        return cosines, self._sines.of(tile), *_by_chunk_and_slot(cosines), self.state_scale.of(tile)


def _by_chunk_and_slot(x: Tensor) -> tuple[int, int]:
    """The strides of [N or 1, C or 1, width] by chunk and by slot, zero where they share the values."""
    chunks, slots, width = x.shape
    return slots * width if chunks > 1 else 0, width if slots > 1 else 0
