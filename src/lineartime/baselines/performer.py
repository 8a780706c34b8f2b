"""Performer with its ReLU kernel, in the two forms that the FLASH paper times.

Source: "Rethinking Attention with Performers" (arXiv 2009.14794), generalised attention with features relu(x) + eps.
"""

import torch
from torch import Tensor

from lineartime.baselines.kernel_attention import KernelAttention
from lineartime.ops.linear import matmul_sums, prefix_sums

SMALLEST_FEATURE = 1e-3
"""The published eps, without which a query could be similar to no key at all."""


class Performer(KernelAttention):
    """Linear attention with features relu(x) + eps; causal sums are prefix sums over tokens, as published.

    Those store a state of h x h for every token and head, and that is why the published causal Performer is slow.
    """

    def features(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        return torch.relu(x) + SMALLEST_FEATURE

    def causal_sums(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """By a prefix sum over tokens."""
        return prefix_sums(q, k, v)


class PerformerMatmul(Performer):
    """`Performer` with causal sums by all T x T products: the paper's Performer-Matmul."""

    def causal_sums(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """By all products."""
        return matmul_sums(q, k, v)
