"""GAU with several heads, which share the query/key width and the value width: an ablation of the single head.

Shapes: B batch, T tokens, N new tokens of a stream, R rows, L tokens of a row, H heads,
s query/key width and e value width of all heads together.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), the ablation "single-head -> multi-head".
"""

import torch
from torch import Tensor
from typing_extensions import Unpack

from lineartime.errors import ArgumentError
from lineartime.layers.checks import check_even, check_positive
from lineartime.layers.gated import GatedOptions
from lineartime.layers.gau import GAU
from lineartime.layers.multi_head import fold_heads, map_state, merge_heads
from lineartime.ops.positions import rope as rotate
from lineartime.ops.quadratic import QuadraticState


class GAUMultiHead(GAU):
    """GAU with several heads.

    It has as many parameters as a `GAU`. The relative bias is the rotary form, and the same for all heads.

    Args:
        n_heads: H, which must divide d_qk and expansion * d.
        relative_bias: whether a learned bias by distance is added to the scores.
        **options: those of `GatedUnit`.
    """

    name = "gau-multi-head"

    def __init__(self, d_model: int, *, n_heads: int = 4, relative_bias: bool = True, **options: Unpack[GatedOptions]) -> None:
        super().__init__(d_model, relative_bias=relative_bias, max_length=None, **options)
        check_positive(n_heads=n_heads)
        for name, width in (("d_qk", self.d_qk), ("expansion * d_model", self.d_value)):
            if width % n_heads:
                raise ArgumentError("n_heads", f"is {n_heads}, but must divide {name} = {width}.")
        check_even("rotary positions turn pairs of features", head_dim=self.d_qk // n_heads)
        self.n_heads = n_heads

    def queries_and_keys(self, base: Tensor, positions: Tensor) -> Tensor:
        """Z [B, T, s] -> [B, maps, T, s]; rotary positions rotate each head separately."""
        maps = base[..., None, :, :] * self.gamma[:, None] + self.beta[:, None]
        if self.rope:
            heads = maps.unflatten(-1, (self.n_heads, -1))  # [B, maps, T, H, s / H]
            maps = rotate(heads, positions[..., None] if positions.dim() == 1 else positions[:, None, :, None]).flatten(-2)
        return maps

    def attend_rows(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Attention per row and head: [R, L, s], [R, L, s], [R, L, e] -> [R, L, e]."""
        mask = None if real is None else real.repeat_interleave(self.n_heads, 0)
        return self._merge(super().attend_rows(self._split(q), self._split(k), self._split(v), mask))

    def attend_next(self, maps: Tensor, v: Tensor, state: QuadraticState) -> tuple[Tensor, QuadraticState]:
        """Attend with the cache of all earlier keys and values, and the cache grown by N tokens."""
        heads = torch.stack([self._split(x) for x in maps.unbind(1)], 1)
        attended, state = super().attend_next(heads, self._split(v), map_state(self._split, state))
        return self._merge(attended), map_state(self._merge, state)

    def _split(self, x: Tensor) -> Tensor:
        """[R, L, f] -> [R * H, L, f / H]."""
        return fold_heads(x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2))

    def _merge(self, x: Tensor) -> Tensor:
        """[R * H, L, f / H] -> [R, L, f]."""
        return merge_heads(x.unflatten(0, (-1, self.n_heads)))
