"""Positions as pure functions: rotary embedding, the two relative biases, the sinusoid table.

Shapes: T tokens, s query/key width, d model width, Q queries, K keys. Positions are integer tensors.
"""

import torch
from torch import Tensor

from lineartime.ops.precision import without_autocast


def _angles(positions: Tensor, n_frequencies: int) -> Tensor:
    # float64: at position 100,000 a float32 angle is already wrong in the third digit.
    exponents = torch.arange(n_frequencies, device=positions.device, dtype=torch.float64) / n_frequencies
    return positions[..., None].to(torch.float64) * 10000.0**-exponents


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate pairs of features by an angle proportional to the position (RoFormer, arXiv 2104.09864; half-split form).

    Args:
        x: [..., T, s] with even s.
        positions: [T], or any shape that broadcasts to x.shape[:-1].

    Returns:
        [..., T, s] in the dtype of x; computed in float32 or better.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    angles = _angles(positions, x.shape[-1] // 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    x1, x2 = x.to(dtype).chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)


def table_bias(table: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """Relative bias [Q, K] read from a table of 2n-1 values: bias[t, j] = table[j - t + n - 1].

    Indexing from the centre makes the offset j - t = 0 mean the same value at every length (spec: trap 2).
    """
    centre = (table.shape[0] - 1) // 2
    return table[key_positions[None, :] - query_positions[:, None] + centre]


def rotary_bias(a: Tensor, b: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """Relative bias [Q, K] of any length from two vectors a, b in R^s: bias[t, j] = rope(a)_t . rope(b)_j."""
    queries = rope(a.expand(query_positions.shape[0], -1), query_positions)
    keys = rope(b.expand(key_positions.shape[0], -1), key_positions)
    with without_autocast(a):  # a bias is added to float32 scores
        return queries @ keys.mT


def sinusoid(positions: Tensor, d_model: int, dtype: torch.dtype) -> Tensor:
    """The sinusoid table of the Transformer, sines before cosines: [..., d_model] for positions [...]."""
    angles = _angles(positions, d_model // 2)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)
