"""Performer with its ReLU kernel, in the two causal forms that the FLASH paper measures, and by chunks.

Source: "Rethinking Attention with Performers" (arXiv 2009.14794), generalised attention with features relu(x) + eps.

    features(x) = relu(x) + 0.001
"""

from typing import Literal, get_args

import torch
from torch import Tensor
from typing_extensions import Unpack

from lineartime.baselines.kernel_attention import KernelAttention, KernelOptions, chunked_sums, matmul_sums, prefix_sums
from lineartime.errors import check_choice

CausalSumsForm = Literal["prefix", "matmul", "chunked"]

MIN_FEATURE = 1e-3
"""The published eps. Without it, a query could have no similarity to any key."""


def relu_features(x: Tensor) -> Tensor:
    """The features of queries or keys, [..., h] -> [..., h]."""
    return torch.relu(x) + MIN_FEATURE


class Performer(KernelAttention):
    """Performer with its ReLU kernel, as published.

    Linear attention with features relu(x) + eps.

    Args:
        causal_sums: how a causal layer sums over earlier tokens: "prefix", as published, stores a state of h x h for every
            token and head, which makes it slow; "matmul" computes all T x T products, the paper's Performer-Matmul; "chunked"
            stores a state for every chunk, as linear attention is trained today.
        **options: the options of `KernelAttention`.
    """

    name = "performer"

    def __init__(self, d_model: int, *, causal_sums: CausalSumsForm = "prefix", **options: Unpack[KernelOptions]) -> None:
        super().__init__(d_model, **options)
        check_choice("causal_sums", causal_sums, get_args(CausalSumsForm))
        self.causal_sums: CausalSumsForm = causal_sums

    def features(self, x: Tensor) -> Tensor:
        return relu_features(x)

    def sums(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return {"prefix": prefix_sums, "matmul": matmul_sums, "chunked": chunked_sums}[self.causal_sums](q, k, v)
