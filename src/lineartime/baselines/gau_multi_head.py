"""GAU with several heads, which divide the query/key width and the value width: an ablation of the single head.

Shapes: B batch, T tokens, N new tokens of a stream, R rows, L tokens of a row, H heads,
s query/key width and e value width of all heads together.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), the ablation "single-head -> multi-head".

    attention = the attentions of all heads, with widths s / H and e / H instead of s and e, concatenated
"""

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import Unpack

from lineartime.layers.attention import fold_heads, merge_heads, split_heads
from lineartime.layers.gau import GAU, GatedOptions
from lineartime.ops.batch import Batch
from lineartime.ops.checks import check_n_heads
from lineartime.ops.positions import over_heads, rotate
from lineartime.ops.state import KVCache


class GAUMultiHead(GAU):
    """GAU with several heads.

    It has as many parameters as a `GAU`. The relative bias has the rotary form and is the same for all heads.

    Args:
        n_heads: H, which must divide d_qk and expansion * d.
        relative_bias: whether to add a learned bias, which depends on the distance, to the scores.
        **options: the options of `GatedUnit`.
    """

    name = "gau-multi-head"

    def __init__(self, d_model: int, *, n_heads: int = 4, relative_bias: bool = True, **options: Unpack[GatedOptions]) -> None:
        # Passed explicitly, so that a caller who passes it gets a TypeError.
        super().__init__(d_model, relative_bias=relative_bias, max_length=None, **options)
        check_n_heads(n_heads, {"d_qk": self.d_qk}, in_pairs=True)
        check_n_heads(n_heads, {"expansion * d_model": self.d_value}, in_pairs=False)
        self.n_heads = n_heads
        self.init_own()

    def queries_and_keys(self, base: Tensor, rotations: Tensor | None) -> Sequence[Tensor]:
        """Z [B, T, s] -> [B, T, s] for each map, with each head rotated separately."""
        table = over_heads(rotations)
        return [merge_heads(rotate(split_heads(x, self.n_heads), table)) for x in super().queries_and_keys(base, None)]

    def attend_rows(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, causal: bool, batch: Batch) -> Tensor:
        """Attend within each row, separately for each head: [R, L, s], [R, L, s], [R, L, e] -> [R, L, e]."""
        mask = None if real is None else real.repeat_interleave(self.n_heads, 0)
        q, k, v = (fold_heads(split_heads(x, self.n_heads)) for x in (q, k, v))
        return merge_heads(super().attend_rows(q, k, v, mask, causal, batch).unflatten(0, (-1, self.n_heads)))

    def init_own_state(self, batch_size: int) -> KVCache:
        state = super().init_own_state(batch_size)
        return KVCache(state.position, split_heads(state.k, self.n_heads), split_heads(state.v, self.n_heads))

    def attend_next(self, maps: Sequence[Tensor], v: Tensor, state: KVCache, batch: Batch) -> tuple[Tensor, KVCache]:
        q, k, v = (split_heads(x, self.n_heads) for x in (*maps, v))
        attended, state = super().attend_next((q, k), v, state, batch)
        return merge_heads(attended), state
