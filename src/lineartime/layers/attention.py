"""Softmax multi-head attention, with which GAU and FLASH are compared.

Shapes: B batch, T tokens, N new tokens of a stream, H heads, h = d / H head width, d model width,
R rows (one for each document), L tokens of the longest.

    q, k, v = rope(x Wq + bq), rope(x Wk + bk), x Wv + bv, cut into H heads        x = norm(input)
    o[t] = sum over visible j of softmax over j (q[t].k[j] / sqrt(h)) v[j]
    out = input + (o of all heads) Wo + bo
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lineartime.layers.multi_head import MultiHeadMixer
from lineartime.layers.prefix import PrefixMixer
from lineartime.ops.cache import KVCache
from lineartime.ops.operator import under_transform
from lineartime.ops.precision import autocast_dtype


class Attention(MultiHeadMixer[KVCache], PrefixMixer[KVCache]):
    """Softmax multi-head self-attention.

    Pre-norm and residual are inside: [B, T, d] -> [B, T, d]. Options are those of `MultiHeadMixer`.

    Source: "Attention Is All You Need" (arXiv 1706.03762), with rotary positions (arXiv 2104.09864).
    """

    name = "attention"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Softmax attention, [R, H, L, h] three times -> [R, H, L, h]."""
        return _attend(q, k, v, real, self.causal)

    def attend_both_ways(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """The same in both directions, for prefixes."""
        return _attend(q, k, v, real, causal=False)

    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, state: KVCache) -> tuple[Tensor, KVCache]:
        """Attend with the cache of all earlier keys and values, and the cache grown by N tokens."""
        state = state.append(k, v)
        visible = state.visible(q.shape[2])
        return F.scaled_dot_product_attention(q.to(state.k.dtype), state.k, state.v, attn_mask=visible), state

    def init_own_state(self, batch_size: int) -> KVCache:
        """The state before the first token of `batch_size` streams."""
        empty = self.empty_cache(batch_size)
        return KVCache(empty, empty)

    def compute_dtype(self, q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
        """That of the values, also float16: this softmax computes its scores in float32."""
        return autocast_dtype(v) or v.dtype


def _attend(q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, causal: bool) -> Tensor:
    visible: Tensor | None = None  # causal needs no mask: padding comes after the real tokens
    if real is not None and not causal:
        # A softmax over no key is NaN: let a row without real tokens read its zeros.
        visible = (real | ~real.any(1, keepdim=True))[:, None, None, :]
    # PyTorch's fused softmax attention has no forward-mode derivative, its plain one has.
    with sdpa_kernel(SDPBackend.MATH) if under_transform() else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=causal)
