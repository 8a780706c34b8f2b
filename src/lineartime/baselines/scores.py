"""Scores for a softmax, shared by the baselines in which a token attends to only some of the others.

Shapes: Q queries, K keys, h head width; every tensor may have leading batch dimensions.
"""

import torch
from torch import Tensor

from lineartime.ops.precision import acc_dtype


def scaled_products(q: Tensor, k: Tensor) -> Tensor:
    """The scores q.k / sqrt(h), [..., Q, h] and [..., K, h] -> [..., Q, K], in float32 or better."""
    scores: Tensor = (q @ k.mT).to(acc_dtype(q)) * q.shape[-1] ** -0.5
    return scores


def masked_products(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """`scaled_products`, with the lowest finite score where a key is not visible: a softmax over no keys stays finite."""
    scores = scaled_products(q, k)
    return scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
