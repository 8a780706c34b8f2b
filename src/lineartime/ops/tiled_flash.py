"""All of FLASH between its two dense maps, a few chunks at a time: how `gated_mixed_chunk_attention` runs on processors.

Shapes: B batch, D documents, G chunks of all documents, C chunk size, e value width, s query/key width; in a tile: b rows of
the batch, n chunks, N = b n.

    U, V, Z = split(silu(projected))                                                       [e] [e] [s]
    q_quad, k_quad, q_lin, k_lin = rope(Z * gamma_i + beta_i)                               i = 1 ... 4
    gated = U * (weight_scale * relu(score_scale * q_quad.k_quad + bias)^2 V  +  state_scale * q_lin (sum of k_lin^T V))

Written over whole sequences, each step between two matrix products goes through main memory, which takes as long as the
products do. A tile stays in the cache. For the backward pass only `projected`, the attention's output and the sums that the
chunks read are kept; the maps and the scores are computed once more.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lineartime.ops.operator import refuse_second_derivative, register_operator
from lineartime.ops.positions import rotary_table
from lineartime.ops.precision import without_autocast

TILE_TOKENS = 1024
"""Tokens of a tile: few enough for the cache, and enough that the calls cost little beside the work."""


# 1. How a batch is cut ------------------------------------------------------------------------------------------------


class _Tile(NamedTuple):
    """Some chunks of one row, or the only chunks of several rows: of one document each."""

    rows: slice
    chunks: slice
    first: bool
    last: bool

    def readers(self, causal: bool) -> slice:
        """Which of the N chunks read sums: causal, the first of a document has nothing to read."""
        return slice(self.rows.stop - self.rows.start if causal and self.first else 0, None)

    def sources(self, causal: bool) -> slice:
        """Which of the N chunks are in sums that are read: causal, the last of a document is in none."""
        return slice(0, self.rows.start - self.rows.stop if causal and self.last else None)

    def of(self, x: Tensor) -> Tensor:
        """[B, G, ...] -> [N, ...]."""
        return x[self.rows, self.chunks].flatten(0, 1)

    def of_shared(self, x: Tensor) -> Tensor:
        """[B or 1, G or 1, ...] -> [N or 1, ...]: for what may be the same for all rows, or for everything."""
        if x.shape[:2] == (1, 1):
            return x[0]
        b, n = self.rows.stop - self.rows.start, self.chunks.stop - self.chunks.start
        x = x if x.shape[0] == 1 else x[self.rows]
        x = x if x.shape[1] == 1 else x[:, self.chunks]
        return x.expand(b, n, *x.shape[2:]).flatten(0, 1)


def _stretches(batch: int, chunk_size: int, document_starts: Sequence[int]) -> Iterator[tuple[int, list[_Tile]]]:
    """A document and its tiles, first to last, for one row after the other, or for some if each is but one chunk."""
    at_once = max(1, TILE_TOKENS // chunk_size)
    for document, (first, last) in enumerate(pairwise(document_starts)):
        if first < last:
            n_rows = at_once if document_starts[-1] == 1 else 1
            for row in range(0, batch, n_rows):
                rows = slice(row, min(row + n_rows, batch))
                parts = [slice(g, min(g + at_once, last)) for g in range(first, last, at_once)]
                yield document, [_Tile(rows, part, part.start == first, part.stop == last) for part in parts]


# 2. What is computed for a tile, in both passes -----------------------------------------------------------------------


def _pairs(x: Tensor) -> Tensor:
    """[..., s] -> [..., s], with the two halves of a rotated pair side by side.

    Products of queries and keys do not depend on the order of features, and neighbours are complex numbers.
    """
    pairs: Tensor = x.unflatten(-1, (2, -1)).mT.flatten(-2)
    return pairs


def _halves(x: Tensor) -> Tensor:
    """The way back from `_pairs`."""
    halves: Tensor = x.unflatten(-1, (-1, 2)).mT.flatten(-2)
    return halves


def _turn(maps: Tensor, turns: Tensor | None) -> Tensor:
    """Rotate maps [4, N, C, s], in pairs, in place, by complex numbers [N or 1, C, s / 2]."""
    if turns is not None:
        torch.view_as_complex(maps.unflatten(-1, (-1, 2))).mul_(turns)
    return maps


class _Core:
    """The constants of a call, and what they make of a tile. `wide` is the dtype of scores and sums."""

    def __init__(
        self,
        projected: Tensor,
        gamma: Tensor,
        beta: Tensor,
        bias: Tensor | None,
        positions: Tensor | None,
        weight_scale: Tensor,
        state_scale: Tensor,
        score_scale: float,
    ) -> None:
        self.projected, self.score_scale = projected, score_scale
        self.compute = projected.dtype
        self.wide = torch.promote_types(self.compute, torch.float32)
        self.d_qk = gamma.shape[1]
        self.d_value = (projected.shape[-1] - self.d_qk) // 2
        self.bias = None if bias is None else bias.to(self.wide)
        self.weight_scale = weight_scale.to(self.wide)
        self.state_scale = state_scale.to(self.wide)[..., None, None]
        at_once = max(1, TILE_TOKENS // projected.shape[2])
        self._activated = projected.new_empty(at_once, *projected.shape[2:])
        self.turns: Tensor | None = None
        if positions is not None:
            self.turns = torch.complex(*rotary_table(positions, self.d_qk // 2, self.wide).unbind(0))
        self.gamma, self.beta = (self.in_pairs(x.to(self.wide))[:, None, None] for x in (gamma, beta))

    def in_pairs(self, x: Tensor) -> Tensor:
        """`_pairs`, where anything is to be rotated."""
        return x if self.turns is None else _pairs(x)

    def in_halves(self, x: Tensor) -> Tensor:
        """The way back."""
        return x if self.turns is None else _halves(x)

    def activated(self, tile: _Tile) -> tuple[Tensor, Tensor, Tensor]:
        """U and V, [N, C, e], and Z in pairs, [N, C, s]; the next call overwrites U and V."""
        before = tile.of(self.projected)
        # Into the same memory for every tile: fresh memory would have to be given by the system each time.
        activated = self._activated.narrow(0, 0, len(before))
        torch.ops.aten.silu.out(before, out=activated)
        gate, v, z = activated.split([self.d_value, self.d_value, self.d_qk], -1)
        return gate, v, self.in_pairs(z).to(self.wide)

    def maps(self, z: Tensor, tile: _Tile) -> Tensor:
        """The queries and keys [4, N, C, s], those of the linear part already scaled."""
        maps = _turn(torch.addcmul(self.beta, z, self.gamma), self.turns_of(tile))
        maps[2].mul_(tile.of_shared(self.state_scale))
        return maps.to(self.compute)

    def turns_of(self, tile: _Tile) -> Tensor | None:
        """The rotations of a tile's tokens."""
        return None if self.turns is None else tile.of_shared(self.turns)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """relu(score_scale * q.k + bias), [N, C, C]."""
        if self.compute == self.wide and self.bias is not None:
            return torch.baddbmm(self.bias, q, k.mT, alpha=self.score_scale).relu_()
        scores = torch.bmm(q, k.mT).to(self.wide).mul_(self.score_scale)
        return (scores if self.bias is None else scores.add_(self.bias)).relu_()

    def sums(self, k: Tensor, v: Tensor) -> Tensor:
        """k^T v for every chunk, [N, C, s] and [N, C, e] -> [N, s, e]."""
        return torch.bmm(k.mT, v).to(self.wide)

    def silu_backward(self, gradients: tuple[Tensor, ...], tile: _Tile, out: Tensor) -> None:
        """From the gradients of U, V and Z to that of `projected`, written where it belongs."""
        widths = [part.shape[-1] for part in gradients]
        parts = zip(gradients, tile.of(self.projected).split(widths, -1), tile.of(out).split(widths, -1), strict=True)
        for gradient, before, into in parts:
            torch.ops.aten.silu_backward.grad_input(gradient, before, grad_input=into)


# 3. Forward -----------------------------------------------------------------------------------------------------------


def _forward(core: _Core, document_starts: Sequence[int], causal: bool, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    projected = core.projected
    batch, n_chunks, chunk_size, _ = projected.shape
    gated = projected.new_empty(batch, n_chunks, chunk_size, core.d_value)
    attended = torch.empty_like(gated) if keep else projected.new_empty(0)
    read = projected.new_empty(batch, n_chunks if causal else len(document_starts) - 1, core.d_qk, core.d_value)
    for document, tiles in _stretches(batch, chunk_size, document_starts):
        rows = tiles[0].rows
        total = projected.new_zeros(rows.stop - rows.start, core.d_qk, core.d_value, dtype=core.wide)
        if not causal:
            for tile in tiles:
                _, v, z = core.activated(tile)
                total += _over_chunks(core.sums(core.maps(z, tile)[3], v), tile)
            read[rows, document] = total
        for tile in tiles:
            gate, v, z = core.activated(tile)
            q_quad, k_quad, q_lin, k_lin = core.maps(z, tile)
            readers, sources = tile.readers(causal), tile.sources(causal)
            if causal:
                sums = core.sums(k_lin[sources], v[sources])
                for i, chunk in enumerate(range(tile.chunks.start, tile.chunks.stop)):
                    read[rows, chunk] = total
                    if i < len(sums):
                        total += sums[i]
            scores = core.scores(q_quad, k_quad)
            weights = (scores * scores).mul_(tile.of_shared(core.weight_scale)).to(core.compute)
            out = tile.of(attended if keep else gated)
            out[: readers.start].zero_()
            torch.bmm(q_lin[readers], _read_by(tile, read, document, causal), out=out[readers])
            out.baddbmm_(weights, v)
            torch.mul(out, gate, out=tile.of(gated))
    return gated, attended, read if keep else projected.new_empty(0)


def _over_chunks(sums: Tensor, tile: _Tile) -> Tensor:
    """[N, s, e] -> [b, s, e], the sum over the chunks of each row."""
    summed: Tensor = sums.unflatten(0, (tile.rows.stop - tile.rows.start, -1)).sum(1)
    return summed


def _read_by(tile: _Tile, sums: Tensor, document: int, causal: bool) -> Tensor:
    """The sums that the chunks of a tile read, [readers, s, e]."""
    if causal:
        return tile.of(sums)[tile.readers(causal)]
    return sums[tile.rows, document].repeat_interleave(tile.chunks.stop - tile.chunks.start, 0)


# 4. Backward ----------------------------------------------------------------------------------------------------------


def _backward(
    core: _Core, d_gated: Tensor, attended: Tensor, read: Tensor, document_starts: Sequence[int], causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    projected = core.projected
    batch, _, chunk_size, _ = projected.shape
    d_projected = torch.empty_like(projected)
    d_gamma, d_beta = projected.new_zeros(2, 4, core.d_qk, dtype=core.wide)
    d_bias = projected.new_zeros(0 if core.bias is None else chunk_size, chunk_size, dtype=core.wide)
    for document, tiles in _stretches(batch, chunk_size, document_starts):
        rows = tiles[0].rows
        # What the sums k_lin^T v are worth to the chunks that read them.
        total = projected.new_zeros(rows.stop - rows.start, core.d_qk, core.d_value, dtype=core.wide)
        if not causal:
            for tile in tiles:
                gate, _, z = core.activated(tile)
                total += _over_chunks(core.sums(core.maps(z, tile)[2], tile.of(d_gated) * gate), tile)
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
            d_scores = torch.bmm(d_out, v.mT).to(core.wide).mul_(scaled).mul_(2)
            if core.bias is not None:
                d_bias += d_scores.sum(0)
            d_scores = d_scores.to(core.compute)
            products = torch.empty_like(maps)
            torch.bmm(d_scores, k_quad, out=products[0])
            torch.bmm(d_scores.mT, q_quad, out=products[1])

            # Linear part: out = q (sum of k^T v), q being scaled.
            readers, sources = tile.readers(causal), tile.sources(causal)
            products[2, : readers.start].zero_()
            torch.bmm(d_out[readers], _read_by(tile, read, document, causal).mT, out=products[2, readers])
            if causal:
                sums = core.sums(q_lin[readers], d_out[readers])
                d_sums = projected.new_empty(len(v[sources]), core.d_qk, core.d_value)
                for i in reversed(range(tile.chunks.stop - tile.chunks.start)):
                    if i < len(d_sums):
                        d_sums[i] = total[0]
                    if i >= readers.start:
                        total += sums[i - readers.start]
            else:
                d_sums = total.repeat_interleave(tile.chunks.stop - tile.chunks.start, 0).to(core.compute)
            products[3, len(d_sums) :].zero_()
            torch.bmm(v[sources], d_sums.mT, out=products[3, sources])
            d_v[sources].baddbmm_(k_lin[sources], d_sums)

            d_maps = products.to(core.wide)
            d_maps[:2].mul_(core.score_scale)
            d_maps[2].mul_(tile.of_shared(core.state_scale))
            turns = core.turns_of(tile)
            _turn(d_maps, None if turns is None else turns.conj_physical())
            d_beta += d_maps.sum((1, 2))
            d_gamma += (d_maps * z).sum((1, 2))
            d_z = core.in_halves(d_maps.mul_(core.gamma).sum(0)).to(core.compute)
            core.silu_backward((d_gate, d_v, d_z), tile, d_projected)
    return d_projected, core.in_halves(d_gamma), core.in_halves(d_beta), d_bias


# 5. As an operator of PyTorch -----------------------------------------------------------------------------------------


def tiled_flash(
    projected: Tensor,
    gamma: Tensor,
    beta: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
    weight_scale: Tensor,
    state_scale: Tensor,
    score_scale: float,
    document_starts: list[int],
    causal: bool,
) -> Tensor:
    """Gated attention of chunks, differentiable in the first four arguments.

    Args:
        projected: [B, G, C, 2 e + s], zeros in slots that hold no token.
        gamma, beta: [4, s].
        bias: [C, C], or None.
        positions: int [B or 1, G, C], or None for no rotation.
        weight_scale: [B or 1, G or 1, C or 1, C or 1], of the squared scores; zero where a key is not visible.
        state_scale: [B or 1, G], of the sums that a chunk reads.
        score_scale: of the products of queries and keys.
        document_starts: where documents begin and end, counted in chunks.
        causal: whether a chunk reads the sums of the chunks before it, or of all.

    Returns:
        [B, G, C, e].
    """
    arguments = (projected, gamma, beta, bias, positions, weight_scale, state_scale, score_scale, document_starts, causal)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (projected, gamma, beta, bias))
    gated: Tensor = _forward_operator(*arguments, keep)[0]
    return gated


def _tiled_flash(
    projected: Tensor,
    gamma: Tensor,
    beta: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
    weight_scale: Tensor,
    state_scale: Tensor,
    score_scale: float,
    document_starts: list[int],
    causal: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and, if they are to be kept, attention's output and the sums that chunks read."""
    with without_autocast(projected):
        core = _Core(projected.contiguous(), gamma, beta, bias, positions, weight_scale, state_scale, score_scale)
        return _forward(core, document_starts, causal, keep)


def _tiled_flash_backward(
    d_gated: Tensor,
    attended: Tensor,
    read: Tensor,
    projected: Tensor,
    gamma: Tensor,
    beta: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
    weight_scale: Tensor,
    state_scale: Tensor,
    score_scale: float,
    document_starts: list[int],
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with without_autocast(projected):
        core = _Core(projected.contiguous(), gamma, beta, bias, positions, weight_scale, state_scale, score_scale)
        d_projected, *rest = _backward(core, d_gated.contiguous(), attended, read, document_starts, causal)
        like = (gamma, beta, gamma if bias is None else bias)
        d_gamma, d_beta, d_bias = (gradient.to(x.dtype) for gradient, x in zip(rest, like, strict=True))
        return d_projected, d_gamma, d_beta, d_bias


def _fake(
    projected: Tensor,
    gamma: Tensor,
    beta: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
    weight_scale: Tensor,
    state_scale: Tensor,
    score_scale: float,
    document_starts: list[int],
    causal: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, n_chunks, chunk_size, width = projected.shape
    d_qk = gamma.shape[1]
    d_value = (width - d_qk) // 2
    gated = projected.new_empty(batch, n_chunks, chunk_size, d_value)
    if not keep:
        return gated, projected.new_empty(0), projected.new_empty(0)
    sums = projected.new_empty(batch, n_chunks if causal else len(document_starts) - 1, d_qk, d_value)
    return gated, torch.empty_like(gated), sums


def _fake_backward(
    d_gated: Tensor,
    attended: Tensor,
    read: Tensor,
    projected: Tensor,
    gamma: Tensor,
    beta: Tensor,
    bias: Tensor | None,
    *_rest: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_bias = gamma.new_empty(0, projected.shape[2]) if bias is None else bias.new_empty(bias.shape)
    return projected.new_empty(projected.shape), gamma.new_empty(gamma.shape), beta.new_empty(beta.shape), d_bias


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, score_scale, document_starts, causal, _ = inputs
    _, attended, read = output
    ctx.save_for_backward(attended, read, *tensors)
    ctx.mark_non_differentiable(attended, read)
    ctx.rest = (score_scale, document_starts, causal)


def _differentiate(ctx: Any, d_gated: Tensor, *_not_differentiable: None) -> tuple[Tensor | None, ...]:
    refuse_second_derivative(d_gated, "backend 'tiled'", "use set_backend(model, 'torch')")
    saved = ctx.saved_tensors  # once: where blocks are recomputed, they can be had no second time
    bias = saved[5]
    *gradients, d_bias = _backward_operator(d_gated, *saved, *ctx.rest)
    return (*gradients, None if bias is None else d_bias, *(None,) * 7)


_forward_operator = register_operator(_tiled_flash, _fake, keep_for_backward=_keep_for_backward, differentiate=_differentiate)
_backward_operator = register_operator(_tiled_flash_backward, _fake_backward)
