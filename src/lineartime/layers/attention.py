"""Softmax multi-head attention, the baseline for GAU and FLASH.

Shapes: B batch, T tokens, N new tokens of a stream, H heads, h = d / H head width, d model width,
R rows (one for each document), L tokens of the longest row.

    q, k, v = rope(x Wq + bq), rope(x Wk + bk), x Wv + bv, cut into H heads        x = norm(input)
    with qk_norm, q and k are rope(rmsnorm(.)) of each head instead
    o[t] = sum over visible j of softmax over j (q[t].k[j] / sqrt(h)) v[j]
    out = input + (o of all heads) Wo + bo
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import Unpack

from lineartime.layers.dense import factory
from lineartime.layers.multi_head import HeadOptions, MultiHeadMixer
from lineartime.layers.residual import RMSNorm
from lineartime.ops.batch import Batch
from lineartime.ops.cache import KVCache
from lineartime.ops.precision import common_dtype
from lineartime.ops.tracing import under_transform

MANY_KEYS = 2048
"""From this number of keys on, two products are faster than fused attention for one query in bf16 on a CPU."""


class AttentionOptions(HeadOptions, total=False):
    """What `Attention` takes."""

    qk_norm: bool


class Attention(MultiHeadMixer):
    """Softmax multi-head self-attention.

    The layer includes a pre-norm and a residual connection: [B, T, d] -> [B, T, d].

    Args:
        qk_norm: whether the queries and keys of each head pass through an `RMSNorm` before they are rotated (arXiv 2010.04245).
        **options: the options of `MultiHeadMixer`.

    Source: "Attention Is All You Need" (arXiv 1706.03762), with rotary positions (arXiv 2104.09864).
    """

    name = "attention"
    reads_prefix = True
    any_positions = True

    def __init__(self, d_model: int, *, qk_norm: bool = False, **options: Unpack[HeadOptions]) -> None:
        super().__init__(d_model, **options)
        self.qk_norm = qk_norm
        self.q_norm: nn.Module = RMSNorm(self.head_dim, **factory(options)) if qk_norm else nn.Identity()
        self.k_norm: nn.Module = RMSNorm(self.head_dim, **factory(options)) if qk_norm else nn.Identity()

    def rotate(self, q: Tensor, k: Tensor, rotations: Tensor | None) -> tuple[Tensor, Tensor]:
        """Normalise queries and keys, if the layer does so, and rotate them by their positions."""
        return super().rotate(self.q_norm(q), self.k_norm(k), rotations)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Softmax attention: q, k, v [R, H, L, h] -> [R, H, L, h]."""
        return _attend(q, k, v, real, self.causal)

    def attend_bidirectional(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Bidirectional `attend`, for prefixes."""
        return _attend(q, k, v, real, causal=False)

    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, state: KVCache, batch: Batch) -> tuple[Tensor, KVCache]:
        """Attend to all cached keys and values; return the outputs and the cache extended by N tokens."""
        state, keys, values, visible = state.append(k, v, batch)
        q = q.to(keys.dtype)
        visible = visible if visible.dim() == 2 else visible[:, None]
        if q.shape[2] == 1:
            return _attend_last(q, keys, values, None if batch.start is not None and batch.counts is None else visible), state
        return _softmax_attention(q, keys, values, visible), state

    def compute_dtype(self, q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
        """The dtype of autocast or of the values, float16 included: this softmax computes its scores in float32."""
        return common_dtype(v)


def _attend(q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, causal: bool) -> Tensor:
    visible: Tensor | None = None  # causal needs no mask: padding comes after the real tokens
    if real is not None and not causal:
        # A softmax over no keys is NaN, so a row without real tokens attends to its padding, which is zero.
        visible = (real | ~real.any(1, keepdim=True))[:, None, None, :]
    return _softmax_attention(q, k, v, visible, causal)


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool = False) -> Tensor:
    # PyTorch's fused softmax attention has no forward-mode derivative; its math backend has one.
    with sdpa_kernel(SDPBackend.MATH) if under_transform() else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=causal)


def _attend_last(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    """Attend from the last token to all, or to the `visible` ones: q [B, H, 1, h], k, v [B, H, T, h] -> [B, H, 1, h].

    In bf16 on a CPU, PyTorch's fused softmax attention takes several times as long for one query as two products.
    """
    if q.device.type != "cpu" or q.dtype != torch.bfloat16 or k.shape[2] < MANY_KEYS or q.shape[0] == 0:
        return _softmax_attention(q, k, v, visible)
    scores = _product(q, k.mT).float() * q.shape[-1] ** -0.5
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return _product(scores.softmax(-1).to(v.dtype), v)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """The products of matrices, one by one: [B, H, 1, n], [B, H, n, m] -> [B, H, 1, m].

    A batched product in bf16 would copy the part of a cache that is in use.
    """
    products = [a @ b for a, b in zip(x.flatten(0, 1), y.flatten(0, 1), strict=True)]
    stacked: Tensor = torch.stack(products).unflatten(0, x.shape[:2])
    return stacked
