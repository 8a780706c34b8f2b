"""The functions of cpu.cpp in plain PyTorch, with the same arguments: where they cannot be built, or the width s is odd.

Shapes: N chunks of a tile, C slots of a chunk, e value width, s query/key width, f = s / 2, W = 2 e + s. Strides and sizes are
those of the tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.positions import rotate


def call(name: str, dtype: torch.dtype, *arguments: Any) -> None:
    """Call a function by its name, like `NativeFunctions.call`."""
    _FUNCTIONS[name](*arguments)


def _activate(
    before: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, cosines: Tensor, sines: Tensor, by_chunk: int, by_slot: int,
    scale: Tensor, active: Tensor, maps: Tensor, n: int, c: int, e: int, s: int,
) -> None:  # fmt: skip
    """U and V [2, N, C, e], and the four maps of Z [4, N, C, s], of `before` [N, C, W]; cosines and sines are [N, C, f]."""
    gate, v, z = (before + bias.to(before.dtype)).split([e, e, s], -1)
    torch.ops.aten.silu.out(gate, out=active[0])
    torch.ops.aten.silu.out(v, out=active[1])
    rotated = _rotated(F.silu(z) * gamma[:, None, None] + beta[:, None, None], cosines, sines)
    rotated[2].mul_(scale[:, None, None])
    maps.copy_(rotated)


def _run_sums(
    total: Tensor, sums: Tensor, out: Tensor, begins: Tensor | None, n: int, n_sums: int, n_out: int, backwards: int, m: int
) -> None:
    """The sums [m] over the chunks before each of n or, if backwards, after it, into `out`; `total` goes from tile to tile."""
    total, sums, out, missing = total.view(-1), sums.view(-1, m), out.view(-1, m), n - n_sums if backwards else 0
    for i in reversed(range(n)) if backwards else range(n):
        if begins is not None:
            total.masked_fill_(begins[i], 0.0)
        if i < n_out:
            out[i] = total
        if 0 <= i - missing < n_sums:
            total += sums[i - missing]


def _weigh(products: Tensor, bias: Tensor | None, scale: Tensor, by_chunk: int, by_slot: int, by: float, *sizes: int) -> None:
    """Replace products by weights = scale relu(by products + bias)^2, [N, C, C]."""
    scores = _scores(products, bias, by, scale.dtype)
    torch.mul(scores * scale, scores, out=products)


def _weigh_backward(
    products: Tensor, gradients: Tensor, bias: Tensor | None, scale: Tensor, by_chunk: int, by_slot: int, by: float,
    d_bias: Tensor | None, *sizes: int,
) -> None:  # fmt: skip
    """`_weigh`, and replace gradients of weights by those of scores; add their sum over chunks to `d_bias` [C, C]."""
    scores = _scores(products, bias, by, scale.dtype)
    scaled = scores * scale
    torch.mul(scores, scaled, out=products)
    d_scores = scaled.mul_(2).mul_(gradients)
    gradients.copy_(d_scores)
    if d_bias is not None:
        d_bias += d_scores.sum(0)


def _finish(
    before: Tensor, bias: Tensor, d_gated: Tensor, gates_again: int, attended: Tensor, d_v: Tensor, d_maps: Tensor,
    gamma: Tensor, cosines: Tensor, sines: Tensor, by_chunk: int, by_slot: int, scale: Tensor, by: float,
    d_before: Tensor, d_bias: Tensor, d_gamma: Tensor, d_beta: Tensor, n: int, c: int, e: int, s: int,
) -> None:  # fmt: skip
    """The gradient of `before` [N, C, W]; adds those of bias, gamma and beta. With `gates_again`, d_gated becomes gated."""
    before = before + bias.to(before.dtype)
    d_maps = d_maps.to(scale.dtype)
    d_maps[:2].mul_(by)
    d_maps[2].mul_(scale[:, None, None])
    d_maps = _rotated(d_maps, cosines, -sines)
    d_beta += d_maps.sum((1, 2))
    d_gamma += (d_maps * F.silu(before[..., 2 * e :])).sum((1, 2))
    d_z = (d_maps * gamma[:, None, None]).sum(0).to(before.dtype)
    d_active = torch.cat([d_gated * attended, d_v, d_z], -1)
    torch.ops.aten.silu_backward.grad_input(d_active, before, grad_input=d_before)
    d_bias += d_before.sum((0, 1), dtype=d_bias.dtype)
    if gates_again:
        torch.mul(attended, F.silu(before[..., :e]), out=d_gated)


def _scores(products: Tensor, bias: Tensor | None, by: float, dtype: torch.dtype) -> Tensor:
    """relu(by products + bias), [N, C, C]."""
    products = products.to(dtype)
    return (products * by if bias is None else torch.add(bias, products, alpha=by)).relu_()


def _rotated(maps: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Maps [4, N, C, s], rotated; an odd s has no rotations."""
    return maps if maps.shape[-1] % 2 else rotate(maps, torch.stack([cosines, sines]))


_FUNCTIONS: dict[str, Callable[..., None]] = {
    "activate": _activate, "run_sums": _run_sums, "weigh": _weigh, "weigh_backward": _weigh_backward, "finish": _finish,
}  # fmt: skip
