"""GAU with several heads, which divide the query/key width and the value width: an ablation of the single head.

Shapes: N tokens, H heads, s query/key width and e value width of all heads together.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), the ablation "single-head -> multi-head".

    attention = the attentions of all heads, with widths s / H and e / H instead of s and e, concatenated
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from lineartime.baselines.blocks import attend_by_head
from lineartime.layers.attention import split_heads
from lineartime.layers.flash import GAU, GatedOptions
from lineartime.ops.checks import check_n_heads
from lineartime.ops.packing import Packing
from lineartime.ops.state import KVCache


class GAUMultiHead(GAU):
    """GAU with several heads.

    It has as many parameters as a `GAU`. The relative bias has the rotary form and is the same for all heads.

    Args:
        n_heads: H, which must divide d_qk and expansion * d.
        **options: the options of `GAU`, except max_length.
    """

    name = "gau-multi-head"

    def __init__(self, d_model: int, *, n_heads: int = 4, **options: Unpack[GatedOptions]) -> None:
        # Passed explicitly, so that a caller who passes it gets a TypeError.
        super().__init__(d_model, max_length=None, **options)
        check_n_heads(n_heads, {"d_qk": self.d_qk}, in_pairs=True)
        check_n_heads(n_heads, {"expansion * d_model": self.d_value}, in_pairs=False)
        self.n_heads = n_heads
        self.rotated_width //= n_heads
        self.init_own()

    def rotated(self, z: Tensor, packing: Packing, n: int) -> Sequence[Tensor]:
        """The first n maps, [N, H, s / H] each, with each head rotated separately."""
        maps = torch.addcmul(self.beta[:n], z[:, None], self.gamma[:n]).unflatten(-1, (self.n_heads, -1))
        return (packing.rotate(maps) if self.rope else maps).unbind(1)

    def attend(self, maps: Sequence[Tensor], v: Tensor, packing: Packing, state: KVCache | None) -> tuple[Tensor, Any]:
        """Attend separately for each head: [N, H, s / H] and [N, e] -> [N, e]."""
        (q, k), v = maps, v.unflatten(-1, (self.n_heads, -1))
        out, state = attend_by_head(q, k, v, packing, self.options(packing), state)
        return out.flatten(1), state

    def init_own_state(self, batch_size: int) -> KVCache:
        state = super().init_own_state(batch_size)
        return KVCache(state.position, split_heads(state.k, self.n_heads), split_heads(state.v, self.n_heads))
