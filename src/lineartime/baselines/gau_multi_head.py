"""GAU with several heads, which share the query/key width and the value width: an ablation of the single head.

Shapes: B batch, T tokens, N new tokens of a stream, R rows, L tokens of a row, H heads,
s query/key width and e value width of all heads together.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), the ablation "single-head -> multi-head".

    attention = that of each head, with s / H and e / H for s and e, joined
"""

from torch import Tensor
from typing_extensions import Unpack

from lineartime.errors import ArgumentError
from lineartime.layers.checks import check_even, check_positive
from lineartime.layers.gated import GatedOptions
from lineartime.layers.gau import GAU
from lineartime.layers.multi_head import fold_heads
from lineartime.layers.opened import Opened
from lineartime.ops.cache import KVCache
from lineartime.ops.checks import check_rotary_width
from lineartime.ops.layout import Layout, LayoutPlan
from lineartime.ops.positions import over_heads, rotate


class GAUMultiHead(GAU):
    """GAU with several heads.

    It has as many parameters as a `GAU`. The relative bias is the rotary form, and the same for all heads; `rotary_width` is
    that of a head.

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
        check_rotary_width(self.rotary_width, self.d_qk // n_heads)
        self.n_heads = n_heads

    def open_normed(self, normed: Tensor, layout: Layout) -> Opened:
        """The attention of `mix`, taken apart, with weights for every head."""
        return super().open_normed(normed, layout)._replace(n_heads=self.n_heads)

    def plan(self) -> LayoutPlan:
        """As for `GAU`, with rotations of a head's width."""
        plan = super().plan()
        return plan._replace(rotary_width=self.d_qk // self.n_heads if self.rope else None)

    def queries_and_keys(self, base: Tensor, rotations: Tensor | None) -> Tensor:
        """Z [B, T, s] -> [B, maps, T, s], each head being rotated by itself."""
        heads = super().queries_and_keys(base, None).unflatten(-1, (self.n_heads, -1))  # [B, maps, T, H, s / H]
        rotations = over_heads(rotations)
        return rotate(heads, None if rotations is None else rotations[..., None, :]).flatten(-2)

    def attend_rows(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, layout: Layout, causal: bool) -> Tensor:
        """Every head of every row by itself: [R, L, s], [R, L, s], [R, L, e] -> [R, L, e]."""
        mask = None if real is None else real.repeat_interleave(self.n_heads, 0)
        q, k, v = (fold_heads(self._split(x)) for x in (q, k, v))
        return self._merge(super().attend_rows(q, k, v, mask, layout, causal).unflatten(0, (-1, self.n_heads)))

    def init_own_state(self, batch_size: int) -> KVCache:
        """The state before the first token of `batch_size` streams."""
        return KVCache(*(self._split(x) for x in super().init_own_state(batch_size)))

    def attend_next(self, maps: Tensor, v: Tensor, state: KVCache, layout: Layout) -> tuple[Tensor, KVCache]:
        """Attend with the cache of all earlier keys and values, and the cache grown by N tokens."""
        attended, state = super().attend_next(self._split(maps), self._split(v), state, layout)
        return self._merge(attended), state

    def _split(self, x: Tensor) -> Tensor:
        """[..., L, f] -> [..., H, L, f / H]."""
        heads: Tensor = x.unflatten(-1, (self.n_heads, -1)).transpose(-3, -2)
        return heads

    def _merge(self, x: Tensor) -> Tensor:
        """[..., H, L, f / H] -> [..., L, f]."""
        return x.transpose(-3, -2).flatten(-2)
