"""What the tiled form computes of a tile between matrix products, by the functions of tiles.cpp: each in one pass over memory.

Shapes: B batch, N chunks of a tile, C chunk size, e value width, s query/key width.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lineartime.native import NATIVE_DTYPES, NativeFunctions, native_functions
from lineartime.ops.mixed_chunk.tile_work import PlainWork, TileWork
from lineartime.ops.mixed_chunk.tiles import Tile, chunks_at_once
from lineartime.ops.positions import no_rotation_table

SOURCE = Path(__file__).with_name("tiles.cpp")


def tile_work(projected: Tensor, projection_bias: Tensor | None, gamma: Tensor, *constants: Any) -> TileWork:
    """What to compute tiles with, of the arguments of `TileWork`: the functions in C++ where they can be built.

    They take pairs of features, so an odd width of queries and keys, which is never rotated, is left to plain PyTorch.
    """
    fits = gamma.shape[1] % 2 == 0 and projected.dtype in NATIVE_DTYPES
    functions = native_functions(SOURCE) if fits else None
    if functions is None:
        return PlainWork(projected, projection_bias, gamma, *constants)
    return NativeWork(functions, projected, projection_bias, gamma, *constants)


class NativeWork(TileWork):
    """By functions in C++, in as many threads as PyTorch uses."""

    def __init__(self, functions: NativeFunctions, projected: Tensor, *constants: Any) -> None:
        super().__init__(projected, *constants)
        self._functions = functions
        chunk_size = projected.shape[2]
        most = chunks_at_once(chunk_size)
        # The same memory for every tile: the system would have to clear fresh memory each time.
        self._active = projected.new_empty(most * chunk_size * 2 * self.d_value)
        self._maps = projected.new_empty(4 * most * chunk_size * self.d_qk)
        self._weight_scale = self.weight_scale.expand(*self.weight_scale.shape[:3], chunk_size)
        self._turns = self.rotations
        if self._turns is None:
            self._turns = no_rotation_table(self.d_qk, self.acc_dtype)[:, None, None]

    @override
    def activate(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        before = tile.of(self.projected)
        n, c = before.shape[:2]
        e, s = self.d_value, self.d_qk
        active = self._active[: 2 * n * c * e].view(2, n, c, e)
        maps = self._maps[: 4 * n * c * s].view(4, n, c, s)
        turns, scale = self._turns_and_scale(tile, n)
        self._functions.call(
            "activate", self.compute,
            before, self.projection_bias, self.gamma, self.beta, *turns, scale, active, maps, n, c, e, s,
        )  # fmt: skip
        return active[0], active[1], maps

    @override
    def run_sums(self, total: Tensor, sums: Tensor, out: Tensor, tile: Tile, begins: Tensor | None, backwards: bool) -> None:
        width = total.numel()
        self._functions.call(
            "run_sums", self.compute,
            total, sums, out, begins, len(tile.places), sums.numel() // width, out.numel() // width, int(backwards), width,
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
        turns, scale = self._turns_and_scale(tile, n)
        self._functions.call(
            "finish", self.compute,
            tile.of(self.projected), self.projection_bias, d_gated, int(gates_again), attended, d_v, d_maps, self.gamma, *turns,
            scale, self.score_scale, tile.of(self._d_projected), self._d_projection_bias, self._d_gamma, self._d_beta,
            n, c, self.d_value, self.d_qk,
        )  # fmt: skip

    def _bias_and_scales(self, tile: Tile) -> tuple[Tensor | int | float | None, ...]:
        """The bias, the scale of weights with how far it is from one chunk and slot to the next, and that of products."""
        return self.bias, *_by_chunk_and_slot(tile.of_shared(self._weight_scale)), self.score_scale

    def _turns_and_scale(self, tile: Tile, n: int) -> tuple[tuple[Tensor | int, ...], Tensor]:
        """Cosines, sines, and how far they are from one chunk and slot to the next; then the scale of q_lin, [N]."""
        assert self._turns is not None
        cosines, *strides = _by_chunk_and_slot(tile.of_shared(self._turns[0]))
        sines, *_ = _by_chunk_and_slot(tile.of_shared(self._turns[1]))
        return (cosines, sines, *strides), tile.of_shared(self.state_scale).expand(n, 1, 1).contiguous()


def _by_chunk_and_slot(x: Tensor) -> tuple[Tensor, int, int]:
    """[N or 1, C or 1, width], contiguous, and how far it is from one chunk and slot to the next: zero where they share."""
    x = x.contiguous()
    return x, x.stride(0) if x.shape[0] > 1 else 0, x.stride(1) if x.shape[1] > 1 else 0
