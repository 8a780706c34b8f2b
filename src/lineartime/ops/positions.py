"""Positions as pure functions: rotary embedding and the sinusoid table.

Shapes: T tokens, s query/key width, d model width. Positions are integer tensors.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.ops.checks import check_even
from lineartime.ops.modes import acc_dtype, is_exporting, is_traced
from lineartime.ops.operator import register_operator


def _rotary_table(positions: Tensor, n_frequencies: int, dtype: torch.dtype) -> Tensor:
    # float64: at position 100,000 a float32 angle is already wrong in the third digit. Apple's GPUs do not compute in it.
    exact = positions.cpu() if positions.device.type == "mps" else positions
    exponents = torch.arange(n_frequencies, device=exact.device, dtype=torch.float64) / n_frequencies
    angles = exact[..., None].to(torch.float64) * 10000.0**-exponents
    return torch.stack([angles.cos(), angles.sin()]).to(dtype).to(positions.device)


_opaque_table = register_operator(_rotary_table, lambda at, n, dtype: at.new_empty(2, *at.shape, n, dtype=dtype))
"""The table for compiled code, where each use would otherwise recompute the cosines."""


def rotary_table(positions: Tensor, n_frequencies: int, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of all angles, [2, ..., n_frequencies] for positions [...]: what `rotate` takes."""
    # An exported program must run without this operator.
    opaque = torch.compiler.is_compiling() and not is_exporting()
    table: Tensor = (_opaque_table if opaque else _rotary_table)(positions, n_frequencies, dtype)
    return table


def in_part(rotations: Tensor, width: int) -> Tensor:
    """Rotations of the first features of each half of vectors of a width: angles of zero for the others."""
    still = width // 2 - rotations.shape[-1]
    return torch.stack([F.pad(rotations[0], (0, still), value=1.0), F.pad(rotations[1], (0, still))]) if still else rotations


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate pairs of features (RoFormer, arXiv 2104.09864; half-split form).

    Args:
        x: [..., T, s] with even s.
        rotations: [2, T, s / 2], or [2, ..., T, s / 2] that broadcasts to x, of `rotary_table`.

    Returns:
        [..., T, s] in the dtype of x; computed in float32 or better.
    """
    dtype = acc_dtype(x)
    cos, sin = rotations.to(dtype).unbind(0)
    x1, x2 = x.to(dtype).chunk(2, dim=-1)
    if is_traced() and not is_exporting():  # swap the halves by an index, which the compiler fuses; it stores what `cat` joins
        swapped = x.to(dtype).unflatten(-1, (2, -1)).flip(-2).flatten(-2)
        return torch.addcmul(x * torch.cat([cos, cos], -1), swapped, torch.cat([-sin, sin], -1)).to(x.dtype)
    turned = torch.addcmul(x1 * cos, x2, sin, value=-1), torch.addcmul(x2 * cos, x1, sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """`rotate` x [..., T, s] by positions, [T] or any shape that broadcasts to x.shape[:-1]; ArgumentError for an odd s."""
    if x.shape[-1] % 2:
        raise ArgumentError("x", f"has {x.shape[-1]} features, but must have an even number: they are rotated in pairs.")
    return rotate(x, rotary_table(positions, x.shape[-1] // 2, acc_dtype(x)))


def by_distance(values: Tensor, n_queries: int) -> Tensor:
    """The bias [Q, K] of values for the distances 1 - Q, ..., K - 1, index of key minus index of query, [Q + K - 1].

    It uses no indexing, because the gradient of indexing, on a GPU, is summed in a different order at each call.
    """
    # Cut one short of a turn, each row of the repeated values begins a value later.
    turns = F.pad(values, (0, 1)).repeat(n_queries)[: n_queries * values.shape[0]]
    return turns.view(n_queries, values.shape[0])[:, n_queries - 1 :]


def sum_by_distance(x: Tensor) -> Tensor:
    """The sums over the diagonals of a matrix, [Q, K] -> [Q + K - 1]: the gradient of the values of `by_distance`."""
    queries = x.shape[0]
    turns = F.pad(x.flip(0), (0, queries)).flatten()[:-queries]
    return turns.view(queries, -1).sum(0)


def sinusoid(positions: Tensor, d_model: int, dtype: torch.dtype) -> Tensor:
    """The sinusoids of the Transformer (arXiv 1706.03762, section 3.5), sines before cosines: [...] -> [..., d_model].

    Raises:
        ArgumentError: if d_model is odd.
    """
    check_even("every angle has a sine and a cosine", d_model=d_model)
    cos, sin = _rotary_table(positions, d_model // 2, dtype).unbind(0)
    return torch.cat([sin, cos], dim=-1)
