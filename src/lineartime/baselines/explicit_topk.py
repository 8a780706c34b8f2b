"""Explicit sparse Transformer: softmax attention to the k tokens with the largest scores.

Shapes: T tokens, R rows (one for each document or stream), H heads, L tokens of the longest row, h head width.
Source: "Explicit Sparse Transformer: Concentrated Attention Through Explicit Selection" (arXiv 1912.11637).

    o[i] = sum over j in A(i) of softmax over j (s[i, j]) v[j]        s[i, j] = q[i].k[j] / sqrt(h)
    A(i) = the visible tokens whose score is at least the k-th largest of i's visible scores; all of them if they are k or fewer

All tokens whose score equals the k-th largest are in A(i), as published, so that their order does not matter. A(i) can then
have more than k tokens. All T x T scores are computed.
"""

import torch
from torch import Tensor
from typing_extensions import Unpack

from lineartime.baselines.blocks import masked_products, real_tokens
from lineartime.layers.attention import HeadOptions, MultiHeadMixer, append
from lineartime.ops.checks import check_positive
from lineartime.ops.modes import acc_dtype
from lineartime.ops.packing import Packing
from lineartime.ops.state import KVCache

COMPARED = 2**20
"""The number of pairs of a new and a cached token that a stream compares at a time; bounds the memory for a long prompt."""


def explicit_topk_attention_oracle(q: Tensor, k: Tensor, v: Tensor, *, n_largest: int, causal: bool = False) -> Tensor:
    """The definition for one head of one document: q, k, v [T, h] -> [T, h]. Slow, one query at a time."""
    rows = []
    for i in range(len(q)):
        visible = slice(0, i + 1) if causal else slice(None)
        scores = k[visible] @ q[i] / q.shape[-1] ** 0.5
        threshold = scores.sort(descending=True).values[min(n_largest, len(scores)) - 1]
        reads = scores >= threshold
        rows.append(scores[reads].softmax(0) @ v[visible][reads])
    return torch.stack(rows)


class ExplicitTopK(MultiHeadMixer):
    """Explicit top-k: softmax over the k largest scores.

    Two forms of the layer agree up to rounding, unless rounding changes which scores are the k largest.

    Args:
        n_largest: k, the number of tokens that each token attends to in each head.
        **options: the options of `MultiHeadMixer`.
    """

    name = "explicit-topk"
    any_positions = True

    def __init__(self, d_model: int, *, n_largest: int = 8, **options: Unpack[HeadOptions]) -> None:
        super().__init__(d_model, **options)
        check_positive(n_largest=n_largest)
        self.n_largest = n_largest

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        visible = real_tokens(q, real)[:, None, None, :]
        if self.causal:  # padding comes after the real tokens
            visible = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        return self._read_largest(q, k, v, visible)

    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, state: KVCache, packing: Packing) -> tuple[Tensor, KVCache]:
        state, keys, values, visible = append(state, k, v, packing)
        at_a_time = max(1, COMPARED // max(1, keys.shape[2]))
        values = values.to(acc_dtype(q))
        outputs = [
            self._read_largest(new, keys, values, seen)
            for new, seen in zip(q.split(at_a_time, 2), visible.split(at_a_time, -2), strict=True)
        ]
        return torch.cat(outputs, 2), state

    def _read_largest(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """Attend to the largest scores: q [..., Q, h], k, v [..., K, h], visible bool [..., Q or 1, K] -> [..., Q, h]."""
        dtype = acc_dtype(q)  # in a lower precision, different scores could become equal
        scores = masked_products(q.to(dtype), k.to(dtype), visible)
        if self.n_largest < scores.shape[-1]:
            # Where fewer than k keys are visible, the k-th largest score is that of masked keys, whose weight is zero.
            threshold = scores.detach().topk(self.n_largest, -1).values[..., -1:]
            scores = scores.masked_fill(scores < threshold, torch.finfo(dtype).min)
        return scores.softmax(-1).to(v.dtype) @ v
