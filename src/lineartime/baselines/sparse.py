"""The strided pattern of the Sparse Transformer: nearby tokens, and every S-th token.

Shapes: T tokens, H heads, h head width, S stride, R rows (one for each document or stream), L tokens of the longest row,
G blocks of S tokens, K keys that a token attends to at most.
Source: "Generating Long Sequences with Sparse Transformers" (arXiv 1904.10509), both of its heads' patterns in one softmax.

    o[i] = sum over j in A(i) of softmax over j (q[i].k[j] / sqrt(h)) v[j]
    A(i) = tokens with |i - j| < S or (i - j) a multiple of S; causal: those of them with j <= i
"""

import torch
from torch import Tensor
from typing_extensions import Unpack

from lineartime.baselines.blocks import cut_blocks, join_blocks, masked_products, real_tokens, visible_band, with_neighbours
from lineartime.layers.attention import HeadOptions, MultiHeadMixer
from lineartime.ops.checks import check_positive
from lineartime.ops.modes import acc_dtype
from lineartime.ops.packing import Packing
from lineartime.ops.state import KVCache

GATHERED = 8192
"""The number of keys of a head that a stream gathers at a time; bounds the memory for a long prompt."""


def sparse_attention_oracle(q: Tensor, k: Tensor, v: Tensor, *, stride: int, causal: bool) -> Tensor:
    """The definition for one head of one document: q, k, v [T, h] -> [T, h]. Slow, one query at a time."""
    rows = []
    for i in range(len(q)):
        reads = [j for j in range(len(k)) if (abs(i - j) < stride or (i - j) % stride == 0) and (j <= i or not causal)]
        rows.append((k[reads] @ q[i] / q.shape[-1] ** 0.5).softmax(0) @ v[reads])
    return torch.stack(rows)


class Sparse(MultiHeadMixer):
    """Sparse Transformer: nearby tokens and every n-th token.

    Args:
        stride: S; a value near the square root of the sequence length has the lowest cost.
        **options: the options of `MultiHeadMixer`.
    """

    name = "sparse"

    def __init__(self, d_model: int, *, stride: int = 128, **options: Unpack[HeadOptions]) -> None:
        super().__init__(d_model, **options)
        check_positive(stride=stride)
        self.stride = stride

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Attend to near tokens and every S-th one, with S + L / S scores per token: q, k, v [R, H, L, h] -> [R, H, L, h]."""
        length, causal = q.shape[-2], self.causal
        stride = max(1, min(self.stride, length))  # a larger stride also covers everything
        blocks = max(1, -(-length // stride))

        def columns(x: Tensor) -> Tensor:
            """Group tokens that are multiples of S apart: [..., G, S, f] -> [..., S, G, f], and back."""
            return x.transpose(-3, -2)

        # [R, H, G, S, h], and [R or 1, 1, G, S, 1]
        q, k, v, present = (cut_blocks(x, stride) for x in (q, k, v, real_tokens(q, real)[:, None, :, None]))

        readable = with_neighbours(present, causal).mT & visible_band(stride, causal, q.device)
        near = masked_products(q, with_neighbours(k, causal), readable)  # [R, H, G, S, 2 S or 3 S]

        others = ~torch.eye(blocks, dtype=torch.bool, device=q.device)  # the near tokens include the token itself
        others = others.tril() if causal else others
        far = columns(masked_products(columns(q), columns(k), others & columns(present).mT))  # [R, H, G, S, G]

        weights = torch.cat([near, far], -1).softmax(-1).to(v.dtype)
        near, far = weights.split([near.shape[-1], blocks], -1)
        return join_blocks(near @ with_neighbours(v, causal) + columns(columns(far) @ columns(v)), length)

    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, state: KVCache, packing: Packing) -> tuple[Tensor, KVCache]:
        first, stride = packing.common_start or 0, self.stride
        state, *cached, _ = state.append(k, v, packing)
        length = first + q.shape[2]
        # The distances that a token attends to: its window, then every S-th token before it.
        window = torch.arange(min(stride, length), device=q.device)
        distances = torch.cat([window, torch.arange(stride, max(stride, length), stride, device=q.device)])
        at_a_time = max(1, GATHERED // max(1, len(distances)))
        outputs = []
        for new in q.split(at_a_time, 2):
            queries = torch.arange(first, first + new.shape[2], device=q.device)
            first += new.shape[2]
            reads = queries[:, None] - distances  # [L, K]
            keys, values = (x[:, :, reads.clamp(min=0)].to(acc_dtype(q)) for x in cached)  # [R, H, L, K, h]
            scores = masked_products(new[..., None, :].to(keys.dtype), keys, (reads >= 0)[:, None, :])
            outputs.append((scores.softmax(-1) @ values)[..., 0, :])
        return torch.cat(outputs, 2), state
