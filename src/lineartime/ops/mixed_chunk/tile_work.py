"""What the tiled form computes for a tile between matrix products: here in plain PyTorch, in tile_native.py by tiles.cpp.

Shapes: N chunks of a tile, C chunk size, e value width, s query/key width.

    U, V, Z = split(silu(projected))                      q_quad, k_quad, q_lin, k_lin = rope(Z * gamma_i + beta_i)
    weights = weight_scale * relu(score_scale * q_quad.k_quad + bias)^2
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lineartime.ops.mixed_chunk.tiles import Shared, Tile, chunks_at_once
from lineartime.ops.precision import acc_dtype


class TileInputs(NamedTuple):
    """The inputs of all tiles of a call.

    Attributes:
        projected: [B, G, C, 2 e + s], contiguous. Its dtype is that of matrix products.
        projection_bias: [2 e + s], a bias to add to `projected` first, or None.
        gamma, beta: [4, s].
        bias: [C, C], or None.
        rotations: [2, B or 1, G, C, s / 2], or None.
        weight_scale: [B or 1, G or 1, C or 1, C or 1], the factor of the squared scores.
        state_scale: [B or 1, G], the factor of the queries q_lin.
        score_scale: the factor of the products q_quad.k_quad.
    """

    projected: Tensor
    projection_bias: Tensor | None
    gamma: Tensor
    beta: Tensor
    bias: Tensor | None
    rotations: Tensor | None
    weight_scale: Tensor
    state_scale: Tensor
    score_scale: float


class TileWork(ABC):
    """The work for each tile of a call. `acc_dtype` is the dtype of scores and sums."""

    def __init__(self, inputs: TileInputs) -> None:
        projected, projection_bias, gamma, beta, bias, rotations, weight_scale, state_scale, self.score_scale = inputs
        self.projected = projected
        self._chunks = projected.flatten(0, 1)
        self.compute = projected.dtype
        self.acc_dtype = acc_dtype(projected)
        self.d_qk = gamma.shape[1]
        self.d_value = (projected.shape[-1] - self.d_qk) // 2
        if projection_bias is None:
            projection_bias = projected.new_zeros(projected.shape[-1])
        self.projection_bias = projection_bias.to(self.acc_dtype).contiguous()
        self.gamma, self.beta = (x.to(self.acc_dtype).contiguous() for x in (gamma, beta))
        self.bias = None if bias is None else bias.to(self.acc_dtype).contiguous()
        self.rotations = None if rotations is None else rotations.to(self.acc_dtype)
        self.weight_scale = weight_scale.to(self.acc_dtype)
        self.state_scale = Shared(state_scale.to(self.acc_dtype)[..., None, None].expand(*projected.shape[:2], 1, 1))

    def start_backward(self) -> None:
        """Set the sums that `gradients` returns to zero."""
        chunk_size = self.projected.shape[2]
        self._d_projected = torch.empty_like(self.projected)
        self._d_chunks = self._d_projected.flatten(0, 1)
        self._d_projection_bias = torch.zeros_like(self.projection_bias)
        self._d_gamma, self._d_beta = torch.zeros_like(self.gamma), torch.zeros_like(self.beta)
        rows = 0 if self.bias is None else chunk_size
        self._d_bias = self.projected.new_zeros(rows, chunk_size, dtype=self.acc_dtype)

    @abstractmethod
    def activate(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        """U and V, [N, C, e], and the queries and keys [4, N, C, s], with q_lin scaled. The next call overwrites them."""

    @abstractmethod
    def run_sums(self, total: Tensor, sums: Tensor, out: Tensor, tile: Tile, begins: Tensor | None, backwards: bool) -> None:
        """Compute the running sum over the chunks before each chunk of a tile or, if `backwards`, after it.

        Args:
            total: [b, s, e], the sum over the previous tiles of the b rows; updated in place to include this tile.
            sums: [n, s, e], the sums of the chunks; that of the last chunk, or the first if `backwards`, may be missing.
            out: [n, s, e], the results for the chunks of the tile; that of the last chunk may be missing.
            tile: the chunks.
            begins: bool [n], whether the sum restarts at a chunk, or None.
            backwards: whether to sum from the last chunk to the first.
        """

    @abstractmethod
    def weights(self, q: Tensor, k: Tensor, tile: Tile) -> Tensor:
        """The weights of values inside chunks, [N, C, C]."""

    @abstractmethod
    def weights_backward(self, q: Tensor, k: Tensor, d_weights: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """The weights again, and the gradient of the scores, not yet scaled: [N, C, C] each."""

    @abstractmethod
    def finish(self, d_gated: Tensor, attended: Tensor, d_v: Tensor, d_maps: Tensor, tile: Tile, gates_again: bool) -> None:
        """Compute the gradients of a call from those of the gated output, of V and of the queries and keys, not yet scaled.

        With `gates_again`, d_gated is overwritten with the gated output, which was not kept.
        """

    def gradients(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The gradients of `projected`, `projection_bias`, gamma, beta and `bias`, which is empty without a bias."""
        return self._d_projected, self._d_projection_bias, self._d_gamma, self._d_beta, self._d_bias


class PlainWork(TileWork):
    """The work for tiles in plain PyTorch, for any machine.

    The two features of a rotated pair are adjacent in queries and keys. Their products do not depend on the order of features,
    and adjacent features can be viewed as complex numbers.
    """

    def __init__(self, inputs: TileInputs) -> None:
        super().__init__(inputs)
        projected = inputs.projected
        self._lacks_bias = inputs.projection_bias is not None
        self._activated = projected.new_empty(chunks_at_once(projected.shape[2]), *projected.shape[2:])
        self._turns = None if self.rotations is None else Shared(torch.complex(*self.rotations.unbind(0)))
        self._weight_scale = Shared(self.weight_scale)
        self._gamma, self._beta = (self._in_pairs(x)[:, None, None] for x in (self.gamma, self.beta))

    @override
    def activate(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        before = self._before(tile)
        # The same memory for every tile, because the system would have to clear new memory each time.
        activated = self._activated.narrow(0, 0, len(before))
        torch.ops.aten.silu.out(before, out=activated)
        gate, v, z = activated.split([self.d_value, self.d_value, self.d_qk], -1)
        self._z = self._in_pairs(z).to(self.acc_dtype)
        maps = self._rotate(torch.addcmul(self._beta, self._z, self._gamma), self._turns_of(tile))
        maps[2].mul_(self.state_scale.of(tile))
        return gate, v, maps.to(self.compute)

    @override
    def run_sums(self, total: Tensor, sums: Tensor, out: Tensor, tile: Tile, begins: Tensor | None, backwards: bool) -> None:
        n = tile.n // tile.n_rows
        sums, out = (x.view(-1, *total.shape) for x in (sums, out))
        missing = n - len(sums) if backwards else 0
        for i in reversed(range(n)) if backwards else range(n):
            if begins is not None:
                total.masked_fill_(begins[i], 0.0)
            if i < len(out):
                out[i] = total
            if 0 <= i - missing < len(sums):
                total += sums[i - missing]

    @override
    def weights(self, q: Tensor, k: Tensor, tile: Tile) -> Tensor:
        scores = self._scores(q, k)
        return (scores * scores).mul_(self._weight_scale.of(tile)).to(self.compute)

    @override
    def weights_backward(self, q: Tensor, k: Tensor, d_weights: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k)
        scaled = scores * self._weight_scale.of(tile)
        weights = scores.mul_(scaled).to(self.compute)
        d_scores = d_weights.to(self.acc_dtype).mul_(scaled).mul_(2)
        if self.bias is not None:
            self._d_bias += d_scores.sum(0)
        return weights, d_scores.to(self.compute)

    @override
    def finish(self, d_gated: Tensor, attended: Tensor, d_v: Tensor, d_maps: Tensor, tile: Tile, gates_again: bool) -> None:
        d_maps = d_maps.to(self.acc_dtype)
        d_maps[:2].mul_(self.score_scale)
        d_maps[2].mul_(self.state_scale.of(tile))
        turns = self._turns_of(tile)
        # Not conj(), which is lazy: inside an operator, compiled code loses a lazy conjugation.
        self._rotate(d_maps, None if turns is None else turns.conj_physical())
        self._d_beta += d_maps.sum((1, 2))
        self._d_gamma += (d_maps * self._z).sum((1, 2))
        d_z = self._in_halves(d_maps.mul_(self._gamma).sum(0)).to(self.compute)
        gradients = (d_gated * attended, d_v, d_z)
        widths = [part.shape[-1] for part in gradients]
        d_projected = tile.of(self._d_chunks)
        parts = (x.split(widths, -1) for x in (self._before(tile), d_projected))
        for gradient, before, into in zip(gradients, *parts, strict=True):
            torch.ops.aten.silu_backward.grad_input(gradient, before, grad_input=into)
        if self._lacks_bias:
            self._d_projection_bias += d_projected.sum((0, 1), dtype=self.acc_dtype)
        if gates_again:
            gate = self._activated[: len(attended), :, : self.d_value]
            torch.mul(attended, gate, out=d_gated)

    @override
    def gradients(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return (
            self._d_projected,
            self._d_projection_bias,
            self._in_halves(self._d_gamma),
            self._in_halves(self._d_beta),
            self._d_bias,
        )

    def _before(self, tile: Tile) -> Tensor:
        """The projected tokens of a tile, before SiLU."""
        before = tile.of(self._chunks)
        return before + self.projection_bias.to(self.compute) if self._lacks_bias else before

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """relu(score_scale * q.k + bias), [N, C, C]."""
        if self.compute == self.acc_dtype and self.bias is not None:
            return torch.baddbmm(self.bias, q, k.mT, alpha=self.score_scale).relu_()
        scores = torch.bmm(q, k.mT).to(self.acc_dtype).mul_(self.score_scale)
        return (scores if self.bias is None else scores.add_(self.bias)).relu_()

    def _turns_of(self, tile: Tile) -> Tensor | None:
        """The complex numbers [N or 1, C, s / 2] by which a tile's tokens are rotated."""
        return None if self._turns is None else self._turns.of(tile)

    @staticmethod
    def _rotate(maps: Tensor, turns: Tensor | None) -> Tensor:
        """Rotate queries and keys [4, N, C, s] in place; the features of a pair are adjacent."""
        if turns is not None:
            torch.view_as_complex(maps.unflatten(-1, (-1, 2))).mul_(turns)
        return maps

    def _in_pairs(self, x: Tensor) -> Tensor:
        """[..., s] -> [..., s], with the two features of each rotated pair adjacent; unchanged without rotations."""
        return x if self.rotations is None else x.unflatten(-1, (2, -1)).mT.flatten(-2)

    def _in_halves(self, x: Tensor) -> Tensor:
        """The inverse of `_in_pairs`."""
        return x if self.rotations is None else x.unflatten(-1, (-1, 2)).mT.flatten(-2)
