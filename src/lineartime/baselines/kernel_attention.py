"""Multi-head linear attention with a feature map that a subclass defines.

Shapes: N tokens, D streams, R rows, H heads, L tokens of a row, h head width, f features.
The definition is in `lineartime.baselines.linear`; its q and k are features(q) and features(k) here.
"""

from abc import abstractmethod
from typing import Literal, get_args

import torch
from torch import Tensor
from typing_extensions import Unpack

from lineartime.baselines.linear import LinearState, chunked_sums, linear_attention, linear_attention_extend
from lineartime.errors import check_choice
from lineartime.layers.attention import HeadOptions, MultiHeadMixer
from lineartime.ops.modes import acc_dtype
from lineartime.ops.packing import Packing

Rotated = Literal["inputs", "features"]
"""What rotary positions rotate in a linear attention."""


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

    Source: "Transformers are RNNs" (arXiv 2006.16236).
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
        return chunked_sums(q, k, v)

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
        q, k, plain = self._features(q, k, first=0)
        real = None if real is None else real[:, None]
        return linear_attention(q, k, v, causal=self.causal, real=real, causal_sums=self.sums, plain=plain)

    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, state: LinearState, packing: Packing) -> tuple[Tensor, LinearState]:
        q, k, plain = self._features(q, k, first=packing.common_start or 0)
        return linear_attention_extend(q, k, v, state, counts=packing.counts, plain=plain)

    def _features(self, q: Tensor, k: Tensor, first: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """The features of what `rotate` returned, and of the denominator if they differ; `first` is the first position."""
        if self.rotated == "inputs":
            return self.weigh(self.features(q), first), self.weigh(self.features(k), first), None
        (plain_q, q), (plain_k, k) = ((self.weigh(part, first) for part in x.chunk(2, -1)) for x in (q, k))
        return q, k, (plain_q, plain_k)

    def init_own_state(self, batch_size: int) -> LinearState:
        empty = self.empty_cache(batch_size, acc_dtype(self.any_parameter))
        n_features = self.weigh(self.features(empty), first=0).shape[-1]
        summary = empty.new_zeros(batch_size, self.n_heads, n_features, self.head_dim + 1)
        return LinearState(self.first_position(batch_size), summary)
