"""Multi-head linear attention: similarities are products of features, so keys and values can be summed before a query attends.

A subclass defines the feature map. With features that are not negative,

    out[t] = sum over visible j of s(t, j) v[j]  /  sum over visible j of s(t, j)        s(t, j) = features(q[t]).features(k[j])

    linear-elu:     features(x) = elu(x) + 1        (eq. 7)
    performer:      features(x) = relu(x) + 0.001
    linear-taylor:  features(x) = (1, x / |x|), so that s(t, j) = 1 + cos(q[t], k[j]), two terms of the exponential's series
    cosformer:      s(t, j) = relu(q[t]).relu(k[j]) cos(pi / 2 (t - j) / M)

That of cosFormer is a product of 2 h features, relu(x[i]) cos(pi / 2 i / M) and relu(x[i]) sin(pi / 2 i / M), because
cos(a - b) = cos(a) cos(b) + sin(a) sin(b). In its source, M is the length of the sequence. Here it is a constant, because the
outputs of a causal model must not change when its text grows.

With rotary positions on the features (arXiv 2104.09864, eq. 19), the numerator takes rotated features and the denominator plain
ones, so that the denominator stays a sum of nonnegative numbers.

Shapes: N tokens, B streams, R rows, H heads, L tokens of a row, T tokens, h head and value width, f features, C chunk size,
G chunks, M the longest sequence of cosFormer; tensors of the functions may have other leading dimensions.
Source: "Transformers are RNNs" (arXiv 2006.16236).
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from lineartime.baselines.blocks import StreamState, cut_blocks, exclusive_cumsum, join_blocks
from lineartime.errors import check_choice
from lineartime.layers.attention import HeadOptions, MultiHeadMixer
from lineartime.ops.checks import check_fits, check_positive
from lineartime.ops.modes import acc_dtype
from lineartime.ops.packing import Packing
from lineartime.ops.state import in_place, writable

Rotated = Literal["inputs", "features"]
"""What rotary positions rotate in a linear attention."""

CausalSumsForm = Literal["prefix", "matmul", "chunked"]

MIN_FEATURE = 1e-3
"""The published eps. Without it, a query could have no similarity to any key."""
MIN_DIVISOR = 1e-18
"""The smallest divisor, so that a query without a similar key does not divide by zero. Its square, which occurs in the
gradient, is still nonzero in float32."""


def continued_sums(q: Tensor, k: Tensor, v: Tensor, before: Tensor | None, chunk_size: int = 128) -> tuple[Tensor, Tensor]:
    """The sums over j <= t of (q[t].k[j]) v[j] that continue a state [..., f, h] (None for the beginning), and the new state.

    By products inside a chunk, and one state for everything before it: linear in L.
    """
    length = q.shape[-2]
    chunk_size = max(1, min(chunk_size, length))  # a larger chunk would only be padded
    q, k, v = (cut_blocks(x, chunk_size) for x in (q, k, v))  # empty slots add nothing: their features are zero
    states = (k.mT @ v).to(acc_dtype(v))  # [..., G, f, h]
    start = torch.zeros_like(states[..., :1, :, :]) if before is None else before[..., None, :, :]
    earlier = start + exclusive_cumsum(states, dim=-3)
    sums = (q @ k.mT).tril() @ v + q @ earlier.to(q.dtype)
    return join_blocks(sums, length), earlier[..., -1, :, :] + states[..., -1, :, :]


def with_ones(v: Tensor) -> Tensor:
    """Append a one to values, [..., h] -> [..., h + 1]; summed like a value, it becomes the normaliser."""
    return F.pad(v, (0, 1), value=1.0)


def normalized(sums: Tensor) -> Tensor:
    """Divide sums of values by the sum of ones in their last place: [..., h + 1] -> [..., h]."""
    return sums[..., :-1] / sums[..., -1:].clamp(min=MIN_DIVISOR)


def relu_features(x: Tensor) -> Tensor:
    """The features of queries or keys, [..., h] -> [..., h]."""
    return torch.relu(x) + MIN_FEATURE


def elu_features(x: Tensor) -> Tensor:
    """The features of queries or keys, [..., h] -> [..., h]."""
    return F.elu(x) + 1


def weigh_by_cosine(features: Tensor, first: int, max_length: int) -> Tensor:
    """Multiply the features [..., L, f] of tokens from position `first` on by the cosine and by the sine: [..., L, 2 f]."""
    positions = torch.arange(first, first + features.shape[-2], dtype=acc_dtype(features), device=features.device)
    angles = (math.pi / 2 / max_length * positions)[:, None]
    return torch.cat([features * angles.cos().to(features.dtype), features * angles.sin().to(features.dtype)], -1)


@dataclass(eq=False)
class LinearState(StreamState):
    """What causal streams remember.

    Attributes:
        summary: [B, H, f, h + 1], the sum of k (v, 1)^T over them, in float32 or better. If features are rotated, the ones are
            summed with plain features.
    """

    summary: Tensor


class KernelOptions(HeadOptions, total=False):
    """What every linear attention takes: see `KernelAttention`."""

    rotated: Rotated


class KernelAttention(MultiHeadMixer):
    """Linear attention with similarity features(q).features(k), streaming with constant memory: [B, T, d] -> [B, T, d].

    Only a causal layer can stream.

    Args:
        rotated: what rotary positions rotate: "inputs", the queries and keys before the feature map; or "features", the
            features, in the numerator only, as in RoFormer (arXiv 2104.09864, eq. 19).
        **options: the options of `MultiHeadMixer`.
    """

    any_positions = True
    constant_state = True

    def __init__(self, d_model: int, *, rotated: Rotated = "inputs", **options: Unpack[HeadOptions]) -> None:
        super().__init__(d_model, **options)
        check_choice("rotated", rotated, get_args(Rotated))
        self.rotated: Rotated = rotated

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """Map queries or keys [..., h] to features [..., f], which must not be negative."""

    def weigh(self, features: Tensor, first: int) -> Tensor:
        """Weight the features [..., L, f] of tokens at positions `first`, `first` + 1, ... by their positions: [..., L, g].

        By default, they are returned unchanged. A mixer that changes them has any_positions = False.
        """
        return features

    def sums(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The causal sums over tokens: q [..., L, f], k [..., L, f], v [..., L, h] -> [..., L, h]."""
        return continued_sums(q, k, v, None)[0]

    def rotate(self, q: Tensor, k: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys [N, H, h]; or their features, plain ones before rotated ones, [N, H, 2 f]."""
        if self.rotated == "inputs":
            return super().rotate(q, k, packing)
        q, k = self.features(q), self.features(k)
        turned_q, turned_k = self.rotate_features(q, k, packing)
        return torch.cat([q, turned_q], -1), torch.cat([k, turned_k], -1)

    def rotate_features(self, q: Tensor, k: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        """Rotate features of queries and keys [N, H, f] by their positions."""
        return super().rotate(q, k, packing)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        parts = self._parts(q, k, v, 0, real)
        if self.causal:
            return normalized(_joined([self.sums(*part) for part in parts]))
        return normalized(_joined([q @ (k.mT @ v) for q, k, v in parts]))

    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, state: LinearState, packing: Packing) -> tuple[Tensor, LinearState]:
        new, counts = v.shape[-2], None if packing.even else packing.new
        real = None if counts is None else torch.arange(new, device=k.device) < counts[:, None]
        parts = self._parts(q, k, v, packing.common_start or 0, real)
        if new == 1 and in_place(*parts[0], state.summary):
            position, summary = writable(state.position), writable(state.summary)
            position += 1 if counts is None else counts
            parts = [(q.to(summary.dtype), k.to(summary.dtype), v.to(summary.dtype)) for q, k, v in parts]
            summary += _joined([k.mT @ v for _, k, v in parts])
            own = summary.split([v.shape[-1] for _, _, v in parts], -1)
            sums = [q @ of_part for (q, _, _), of_part in zip(parts, own, strict=True)]
            return normalized(_joined(sums)), LinearState(position, summary)
        before = state.summary.split([v.shape[-1] for _, _, v in parts], -1)
        read = [continued_sums(*part, of_part) for part, of_part in zip(parts, before, strict=True)]
        sums, after = ([each[i] for each in read] for i in range(2))
        return normalized(_joined(sums)), LinearState(state.position + (new if counts is None else counts), _joined(after))

    def _parts(self, q: Tensor, k: Tensor, v: Tensor, first: int, real: Tensor | None) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Features of what `rotate` returned, and values; their sums, side by side, are those of the values and of ones.

        Two parts if features are rotated, for the numerator and the denominator. `first` is the first position.
        """
        if self.rotated == "inputs":
            parts = [(self.weigh(self.features(q), first), self.weigh(self.features(k), first), with_ones(v))]
        else:
            (plain_q, q), (plain_k, k) = ((self.weigh(part, first) for part in x.chunk(2, -1)) for x in (q, k))
            parts = [(q, k, v), (plain_q, plain_k, torch.ones_like(v[..., :1]))]
        if real is None:
            return parts
        padding = ~real[:, None, :, None]  # of features of zero, no query reads anything
        return [(q, k.masked_fill(padding, 0.0), v) for q, k, v in parts]

    def init_own_state(self, batch_size: int) -> LinearState:
        empty = self.empty_cache(batch_size, acc_dtype(self.any_parameter))
        n_features = self.weigh(self.features(empty), first=0).shape[-1]
        summary = empty.new_zeros(batch_size, self.n_heads, n_features, self.head_dim + 1)
        return LinearState(self.first_position(batch_size), summary)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class LinearELU(KernelAttention):
    """Linear attention with features elu + 1."""

    name = "linear-elu"

    def features(self, x: Tensor) -> Tensor:
        return elu_features(x)


class Performer(KernelAttention):
    """Performer with its ReLU kernel, as published.

    Linear attention with features relu(x) + eps.

    Args:
        causal_sums: how a causal layer sums over earlier tokens: "prefix", as published, stores a state of h x h for every
            token and head, which makes it slow; "matmul" computes all T x T products, the paper's Performer-Matmul; "chunked"
            stores a state for every chunk, as linear attention is trained today.
        **options: the options of `KernelAttention`.

    Source: "Rethinking Attention with Performers" (arXiv 2009.14794), generalised attention, in the two causal forms that the
    FLASH paper measures, and by chunks.
    """

    name = "performer"

    def __init__(self, d_model: int, *, causal_sums: CausalSumsForm = "prefix", **options: Unpack[KernelOptions]) -> None:
        super().__init__(d_model, **options)
        check_choice("causal_sums", causal_sums, get_args(CausalSumsForm))
        self.causal_sums: CausalSumsForm = causal_sums

    def features(self, x: Tensor) -> Tensor:
        return relu_features(x)

    def sums(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.causal_sums == "prefix":
            states = (k[..., None] * v[..., None, :]).to(acc_dtype(v)).cumsum(-3)
            return (q[..., None, :] @ states.to(q.dtype)).squeeze(-2)
        return (q @ k.mT).tril() @ v if self.causal_sums == "matmul" else super().sums(q, k, v)


class LinearTaylor(KernelAttention):
    """Linear attention with similarity 1 + cos(q, k).

    Its features are (1, x / |x|).

    Source: Su, "Exploring linear attention" (2020), https://kexue.fm/archives/7546.
    """

    name = "linear-taylor"

    def features(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h + 1]."""
        # The square of this eps is not zero in float32, so the gradients of empty slots are finite.
        return F.pad(F.normalize(x, dim=-1, eps=1e-6), (1, 0), value=1.0)

    def rotate_features(self, q: Tensor, k: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        """Rotate all features except the constant one by their positions."""
        turned = super().rotate_features(q[..., 1:], k[..., 1:], packing)
        return F.pad(turned[0], (1, 0), value=1.0), F.pad(turned[1], (1, 0), value=1.0)


class CosFormer(KernelAttention):
    """cosFormer: ReLU features, weighted by distance.

    Args:
        max_length: M, the distance at which the weight of a token would be zero, and the maximum number of tokens in a
            sequence. A longer sequence raises an error, also in streaming.
        **options: the options of `MultiHeadMixer`. Rotated features are not among them: where a query and the keys share no
            nonzero feature, the numerator would not be zero, but the denominator would.

    Source: "cosFormer: Rethinking Softmax in Attention" (arXiv 2202.08791).
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
