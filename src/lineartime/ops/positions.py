"""Positions as pure functions: rotary embedding, the two relative biases, the sinusoid table.

Shapes: T tokens, s query/key width, d model width, Q queries, K keys. Positions are integer tensors.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lineartime.ops.operator import register_operator
from lineartime.ops.precision import without_autocast


def _angles(positions: Tensor, n_frequencies: int) -> Tensor:
    # float64: at position 100,000 a float32 angle is already wrong in the third digit.
    exponents = torch.arange(n_frequencies, device=positions.device, dtype=torch.float64) / n_frequencies
    return positions[..., None].to(torch.float64) * 10000.0**-exponents


def _compute_table(positions: Tensor, n_frequencies: int, dtype: torch.dtype) -> Tensor:
    angles = _angles(positions, n_frequencies)
    return torch.stack([angles.cos(), angles.sin()]).to(dtype)


_last_table: tuple[Tensor, int, torch.dtype, Tensor] | None = None
"""The arguments and the result of the last table on a processor: all layers of a model ask for the same one."""


def rotary_table(positions: Tensor, n_frequencies: int, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of all angles, [2, ..., n_frequencies] for positions [...]; not to be written to."""
    global _last_table
    # On other devices, comparing would mean waiting, and computing costs nothing; tensors of inference mode, and those that
    # stand for others while something is traced, must not be met by whoever comes next.
    plain = type(positions) is Tensor and positions.device.type == "cpu" and not torch.is_inference_mode_enabled()
    if not plain or torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
        return _compute_table(positions, n_frequencies, dtype)
    if _last_table is not None:
        last, *others, table = _last_table
        if others == [n_frequencies, dtype] and torch.equal(last, positions.flatten()):  # be they cut into chunks or not
            return table.view(2, *positions.shape, n_frequencies)
    table = _compute_table(positions, n_frequencies, dtype)
    _last_table = (positions.flatten().clone(), n_frequencies, dtype, table)  # a stream writes to its positions in place
    return table


def _rotary_table(positions: Tensor, n_frequencies: int, dtype: torch.dtype) -> Tensor:
    return rotary_table(positions, n_frequencies, dtype).clone()


def _fake_table(positions: Tensor, n_frequencies: int, dtype: torch.dtype) -> Tensor:
    return positions.new_empty(2, *positions.shape, n_frequencies, dtype=dtype)


_opaque_table = register_operator(_rotary_table, _fake_table)
"""`rotary_table` for compiled code, which would otherwise compute each cosine anew for every map and row."""


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate pairs of features by an angle proportional to the position (RoFormer, arXiv 2104.09864; half-split form).

    Args:
        x: [..., T, s] with even s.
        positions: [T], or any shape that broadcasts to x.shape[:-1].

    Returns:
        [..., T, s] in the dtype of x; computed in float32 or better.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    tabulate = _opaque_table if torch.compiler.is_compiling() else rotary_table
    cos, sin = tabulate(positions, x.shape[-1] // 2, dtype).unbind(0)
    x1, x2 = x.to(dtype).chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)


def table_bias(table: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """Relative bias [Q, K] read from a table of 2n-1 values: bias[t, j] = table[j - t + n - 1].

    Indexing from the centre makes the offset j - t = 0 mean the same value at every length (spec: trap 2).
    """
    centre = (table.shape[0] - 1) // 2
    return table[key_positions[None, :] - query_positions[:, None] + centre]


class FactoredBias(NamedTuple):
    """A bias that is a product: bias[t, j] = of_queries[t] . of_keys[j], [Q, s] and [K, s].

    Fused forms multiply it as they do queries and keys, in bfloat16 too, where the bias is then rounded as much as they are.
    """

    of_queries: Tensor
    of_keys: Tensor

    def dense(self) -> Tensor:
        """[Q, K]."""
        with without_autocast(self.of_keys):  # a bias is added to float32 scores
            return self.of_queries @ self.of_keys.mT


def rotary_bias(a: Tensor, b: Tensor, query_positions: Tensor, key_positions: Tensor) -> FactoredBias:
    """Relative bias of any length from two vectors a, b in R^s: bias[t, j] = rope(a)_t . rope(b)_j."""
    return FactoredBias(
        rope(a.expand(query_positions.shape[0], -1), query_positions), rope(b.expand(key_positions.shape[0], -1), key_positions)
    )


def sinusoid(positions: Tensor, d_model: int, dtype: torch.dtype) -> Tensor:
    """The sinusoid table of the Transformer, sines before cosines: [..., d_model] for positions [...]."""
    angles = _angles(positions, d_model // 2)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)
