"""cosFormer: linear attention with features relu(x), weighted by the cosine of the distance.

Shapes: T tokens, h head width, f features, M the longest sequence allowed; tensors may have leading dimensions.
Source: "cosFormer: Rethinking Softmax in Attention" (arXiv 2202.08791).

    out[t] = sum over visible j of s(t, j) v[j] / sum over visible j of s(t, j)
    s(t, j) = relu(q[t]).relu(k[j]) cos(pi / 2 (t - j) / M)

    cos(a - b) = cos(a) cos(b) + sin(a) sin(b), so that s is a product of 2 h features that are not negative:
    relu(x[i]) cos(pi / 2 i / M) and relu(x[i]) sin(pi / 2 i / M)

In the source, M is the length of the sequence. Here it is a constant, because the outputs of a causal model must not change
when its text grows.
"""

import math

import torch
from torch import Tensor
from typing_extensions import Unpack

from lineartime.baselines.kernel_attention import KernelAttention
from lineartime.layers.attention import HeadOptions
from lineartime.ops.checks import check_fits, check_positive
from lineartime.ops.modes import acc_dtype


def cosformer_attention_oracle(q: Tensor, k: Tensor, v: Tensor, *, max_length: int, causal: bool = False) -> Tensor:
    """The definition for one head and one document, one query at a time: q, k, v [T, h] -> [T, h]."""
    rows = []
    for t in range(len(v)):
        visible = range(t + 1 if causal else len(v))
        similarities = torch.stack([q[t].relu() @ k[j].relu() * math.cos(math.pi / 2 * (t - j) / max_length) for j in visible])
        rows.append(similarities @ v[: len(visible)] / similarities.sum())
    return torch.stack(rows)


def weigh_by_cosine(features: Tensor, first: int, max_length: int) -> Tensor:
    """Multiply the features [..., L, f] of tokens from position `first` on by the cosine and by the sine: [..., L, 2 f]."""
    positions = torch.arange(first, first + features.shape[-2], dtype=acc_dtype(features), device=features.device)
    angles = (math.pi / 2 / max_length * positions)[:, None]
    return torch.cat([features * angles.cos().to(features.dtype), features * angles.sin().to(features.dtype)], -1)


class CosFormer(KernelAttention):
    """cosFormer: ReLU features, weighted by distance.

    Args:
        max_length: M, the distance at which the weight of a token would be zero, and the maximum number of tokens in a
            sequence. A longer sequence raises an error, also in streaming.
        **options: the options of `MultiHeadMixer`. Rotated features are not among them: where a query and the keys share no
            nonzero feature, the numerator would not be zero, but the denominator would.
    """

    name = "cosformer"
    any_positions = False
    constant_state = False

    def __init__(self, d_model: int, *, max_length: int = 1024, **options: Unpack[HeadOptions]) -> None:
        # Passed explicitly, so that a caller who passes it gets a TypeError.
        super().__init__(d_model, rotated="inputs", **options)
        check_positive(max_length=max_length)
        self.max_length = max_length

    @property
    def longest_sequence(self) -> int:
        return self.max_length

    def features(self, x: Tensor) -> Tensor:
        return x.relu()

    def weigh(self, features: Tensor, first: int) -> Tensor:
        """[..., L, h] -> [..., L, 2 h]; ArgumentError beyond `max_length` tokens."""
        check_fits("CosFormer", first + features.shape[-2], self.max_length)
        return weigh_by_cosine(features, first, self.max_length)
