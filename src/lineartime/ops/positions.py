"""Positions as pure functions: rotary embedding, the two relative biases, the sinusoid table.

Shapes: T tokens, s query/key width, d model width, Q queries, K keys. Positions are integer tensors.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.ops.checks import check_even, is_readable
from lineartime.ops.modes import acc_dtype, has_float64, is_exporting, is_traced, look_up, without_autocast
from lineartime.ops.operator import register_operator

_DIGITS, _BASE = 3, 1024
"""The number of digits, and their base, in which positions below 2^30 are written on devices without float64."""


def _rotary_table(positions: Tensor, n_frequencies: int, dtype: torch.dtype) -> Tensor:
    compute = _exact_table if has_float64(positions.device) else _table_by_digits
    return compute(positions, n_frequencies).to(dtype)


def _exact_table(positions: Tensor, n_frequencies: int) -> Tensor:
    # float64: at position 100,000 a float32 angle is already wrong in the third digit.
    exponents = torch.arange(n_frequencies, device=positions.device, dtype=torch.float64) / n_frequencies
    angles = positions[..., None].to(torch.float64) * 10000.0**-exponents
    return torch.stack([angles.cos(), angles.sin()])


def _table_by_digits(positions: Tensor, n_frequencies: int) -> Tensor:
    """The same in float32 without losing precision: it rotates by each digit of the position in turn."""
    tables = _digit_tables(n_frequencies, positions.device)
    first, *others = (table[:, positions // _BASE**place % _BASE] for place, table in enumerate(tables))
    cos, sin = first.unbind(0)
    for c, s in others:
        cos, sin = cos * c - sin * s, sin * c + cos * s
    return torch.stack([cos, sin])


@lru_cache(maxsize=16)
def _digit_tables(n_frequencies: int, device: torch.device) -> Tensor:
    """float32 [digits, 2, base, n_frequencies] on the device: cosines and sines of each digit's angles, computed on the CPU."""
    multiples = torch.stack([torch.arange(_BASE, device="cpu") * _BASE**place for place in range(_DIGITS)])
    return _exact_table(multiples, n_frequencies).transpose(0, 1).float().to(device)


def _fake_table(positions: Tensor, n_frequencies: int, dtype: torch.dtype) -> Tensor:
    return positions.new_empty(2, *positions.shape, n_frequencies, dtype=dtype)


_opaque_table = register_operator(_rotary_table, _fake_table)
"""The table for compiled code, where each use would otherwise recompute the cosines."""


def rotary_table(positions: Tensor, n_frequencies: int, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of all angles, [2, ..., n_frequencies] for positions [...]: what `rotate` takes."""
    # An exported program must run without this operator.
    opaque = torch.compiler.is_compiling() and not is_exporting()
    table: Tensor = (_opaque_table if opaque else _rotary_table)(positions, n_frequencies, dtype)
    return table


def no_rotation_table(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The table of zero angles for vectors of this width, [2, 1, width / 2]: cosines of 1 and sines of 0."""
    return torch.tensor([1.0, 0.0], dtype=dtype, device=device)[:, None, None].expand(2, 1, width // 2)


def rotate(x: Tensor, rotations: Tensor | None) -> Tensor:
    """Rotate pairs of features (RoFormer, arXiv 2104.09864; half-split form).

    Args:
        x: [..., T, s] with even s.
        rotations: [2, T, s / 2], or [2, ..., T, s / 2] that broadcasts to x, of `rotary_table`; None leaves x unchanged.

    Returns:
        [..., T, s] in the dtype of x; computed in float32 or better.
    """
    if rotations is None:
        return x
    dtype = acc_dtype(x)
    cos, sin = rotations.to(dtype).unbind(0)
    x1, x2 = x.to(dtype).chunk(2, dim=-1)
    turned = torch.addcmul(x1 * cos, x2, sin, value=-1), torch.addcmul(x2 * cos, x1, sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


def over_heads(rotations: Tensor | None) -> Tensor | None:
    """Reshape rotations of tokens, [2, T, f] or [2, B, T, f], to broadcast to heads or maps [B, H, T, 2 f]."""
    return rotations if rotations is None or rotations.dim() == 3 else rotations[:, :, None]


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """`rotate` x [..., T, s] by positions, [T] or any shape that broadcasts to x.shape[:-1]; ArgumentError for an odd s."""
    if x.shape[-1] % 2:
        raise ArgumentError("x", f"has {x.shape[-1]} features, but must have an even number: they are rotated in pairs.")
    return rotate(x, rotary_table(positions, x.shape[-1] // 2, acc_dtype(x)))


def table_bias(table: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """Relative bias [Q, K] read from a table of 2n-1 values: bias[t, j] = table[j - t + n - 1].

    Indexing from the centre makes the offset j - t = 0 mean the same value at every length.

    Raises:
        ArgumentError: for positions that are further apart than n - 1. On a GPU and in compiled code, this is not checked.
    """
    centre = (table.shape[0] - 1) // 2
    offsets = key_positions[None, :] - query_positions[:, None]
    if is_readable(offsets) and not is_traced() and (farthest := int(offsets.abs().max())) > centre:
        raise ArgumentError("table", f"has values for offsets up to {centre}, but there is one of {farthest}: make it longer.")
    return look_up(table, offsets + centre)


def by_distance(values: Tensor, n_queries: int, n_keys: int) -> Tensor:
    """Relative bias [Q, K] from a value for each distance, [Q + K - 1]: bias[t, j] = values[j - t + Q - 1].

    It uses no indexing, because the gradient of indexing, compiled for a GPU, is summed in a different order at each call.
    """
    # The repeated values have period Q + K - 1. Viewed in rows of Q + K, they shift by one place from row to row.
    rows = values.expand(n_queries, -1).reshape(-1)
    return F.pad(rows, (0, n_queries)).view(n_queries, n_keys + n_queries)[:, :n_keys].flip(0)


class FactoredBias(NamedTuple):
    """A bias that is a product: bias[t, j] = of_queries[t] . of_keys[j], [Q, s] and [K, s].

    Fused forms multiply the factors like queries and keys, with the same rounding in bfloat16.
    """

    of_queries: Tensor
    of_keys: Tensor

    def dense(self) -> Tensor:
        """The product of the factors, [Q, K]."""
        with without_autocast(self.of_keys):  # a bias is added to float32 scores
            return self.of_queries @ self.of_keys.mT


def rotary_bias(
    a: Tensor, b: Tensor, query_positions: Tensor, key_positions: Tensor, table: Tensor | None = None
) -> FactoredBias:
    """Relative bias of any length from two vectors a, b in R^s: bias[t, j] = rope(a)_t . rope(b)_j.

    `table`, if given, is the `rotary_table` of positions 0, 1, ... Source: arXiv 2202.10447, appendix, `rel_pos_bias`.
    """

    def rotated(x: Tensor, positions: Tensor) -> Tensor:
        x = x.expand(positions.shape[0], -1)
        return rope(x, positions) if table is None else rotate(x, table[:, positions])

    return FactoredBias(rotated(a, query_positions), rotated(b, key_positions))


def sinusoid(positions: Tensor, d_model: int, dtype: torch.dtype) -> Tensor:
    """The sinusoids of the Transformer (arXiv 1706.03762, section 3.5), sines before cosines: [...] -> [..., d_model].

    Raises:
        ArgumentError: if d_model is odd.
    """
    check_even("every angle has a sine and a cosine", d_model=d_model)
    cos, sin = _rotary_table(positions, d_model // 2, dtype).unbind(0)
    return torch.cat([sin, cos], dim=-1)
