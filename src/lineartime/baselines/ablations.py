"""The ablations of GAU and of the Transformer that are layers of their own.

    gau-multi-head:  attention = the attentions of H heads, with widths s / H and e / H instead of s and e, concatenated
    gau-ungated:     V = silu(x Wv + bv)  [N, 2 e]      out = input + attention(..., V) Wo + bo
    mhsa-gated:      out = input + (silu(x Wu + bu) * (o of all heads)) Wo + bo
    mhsa-relu2:      o[t] = sum over visible j of relu(q[t].k[j] / sqrt(h))^2 v[j]  /  n        n: the number of visible keys

Shapes: N tokens, H heads, s query/key width and e value width of all heads together, d model width, h = d / H head width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), its ablations "single-head -> multi-head", "no gating", "add
gating" and "softmax -> relu^2".
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from lineartime.layers.attention import Attention, AttentionOptions, MultiHeadMixer, split_heads
from lineartime.layers.dense import Dense, factory
from lineartime.layers.flash import GAU, GatedOptions
from lineartime.ops.checks import check_n_heads
from lineartime.ops.mixed_chunk import MixedChunkOptions, Scales, attend_cached, quadratic_part, reciprocal
from lineartime.ops.modes import acc_dtype, matmul_dtype, output_dtype, without_autocast
from lineartime.ops.packing import Packing
from lineartime.ops.state import KVCache


def attend_by_head(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: MixedChunkOptions, state: KVCache | None
) -> tuple[Tensor, KVCache | None]:
    """The attention of a GAU for each head, [N, H, s], [N, H, s], [N, H, e] -> [N, H, e], and the state of streams."""
    if state is not None:
        return attend_cached(q, k, v, packing, options, state)
    compute, heads, outputs = matmul_dtype(q, k, v), q.shape[1], []
    dtype = output_dtype(v, compute)
    with without_autocast(v):
        for grid, *own in packing.by_grid(None, options.causal, *(x.to(compute) for x in (q, k, v))):
            # Each head of a document becomes a document.
            document, begin = (x.repeat_interleave(heads, output_size=heads * len(x)) for x in (grid.document, grid.begin))
            folded = replace(grid, document=document, begin=begin, count=heads * grid.count)
            q, k, v = (grid.queries(x).transpose(1, 2).flatten(0, 1) for x in own)
            out = quadratic_part(q, k, v, folded, options)
            outputs.append(grid.tokens(out.unflatten(0, (-1, heads)).transpose(1, 2)).to(dtype))
    return torch.cat(outputs), None


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


class GAUUngated(GAU):
    """GAU without its gate, values twice as wide."""

    name = "gau-ungated"

    def gate_and_value_widths(self, width: int) -> tuple[int, int]:
        return 0, 2 * width

    def apply_gate(self, gate: Tensor, attended: Tensor) -> Tensor:
        return attended


class MHSAGated(Attention):
    """Softmax multi-head attention with a gate on its output."""

    name = "mhsa-gated"

    def __init__(self, d_model: int, **options: Unpack[AttentionOptions]) -> None:
        super().__init__(d_model, **options)
        self.to_gate = Dense(d_model, d_model, **factory(options))

    def combine(self, normed: Tensor, attended: Tensor) -> Tensor:
        return super().combine(normed, F.silu(self.to_gate(normed)) * attended)


class MHSARelu2(MultiHeadMixer):
    """Multi-head attention with relu^2 instead of softmax.

    Each head attends like a GAU. The options are those of `MultiHeadMixer`.
    """

    name = "mhsa-relu2"
    any_positions = True
    backend = "auto"

    def attend_heads(self, maps: tuple[Tensor, Tensor, Tensor], packing: Packing, state: Any) -> tuple[Tensor, Any]:
        scales = Scales(self.head_dim**-0.5, reciprocal, reciprocal)
        options = MixedChunkOptions(None, self.causal, scales, backend=self.backend or "auto")
        out, state = attend_by_head(*maps, packing, options, state)
        return out.flatten(1), state

    def init_own_state(self, batch_size: int) -> KVCache:
        empty = self.empty_cache(batch_size, acc_dtype(self.any_parameter))
        return KVCache(self.first_position(batch_size), empty, empty)
