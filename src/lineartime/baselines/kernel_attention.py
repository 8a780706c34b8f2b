"""Multi-head linear attention with a feature map that a subclass defines.

Shapes: B batch, N new tokens of a stream, R rows, H heads, L tokens of a row, h head width, f features.
The definition is in `lineartime.ops.linear`; its q and k are features(q) and features(k) here.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from typing_extensions import Unpack

from lineartime.errors import check_choice
from lineartime.layers.multi_head import HeadOptions, MultiHeadMixer, merge_heads
from lineartime.layers.stepping import SteppingMixer
from lineartime.ops.layout import Layout
from lineartime.ops.linear import (
    LinearState,
    LinearStreams,
    chunked_sums,
    linear_attention,
    linear_attention_extend,
    linear_attention_step,
    linear_states,
    linear_streams,
)
from lineartime.ops.precision import acc_dtype, output_dtype, without_autocast

Rotated = Literal["inputs", "features"]
"""What rotary positions rotate in a linear attention."""


class KernelOptions(HeadOptions, total=False):
    """What every linear attention takes: see `KernelAttention`."""

    rotated: Rotated


class KernelAttention(MultiHeadMixer[LinearState]):
    """Linear attention with similarity features(q).features(k), streaming with constant memory: [B, T, d] -> [B, T, d].

    Only a causal layer can stream.

    Args:
        rotated: what rotary positions rotate: "inputs", the queries and keys before the feature map; or "features", the
            features, in the numerator only, as in RoFormer (arXiv 2104.09864, eq. 19).
        **options: the options of `MultiHeadMixer`.

    Source: "Transformers are RNNs" (arXiv 2006.16236).
    """

    def __init__(self, d_model: int, *, rotated: Rotated = "inputs", **options: Unpack[HeadOptions]) -> None:
        super().__init__(d_model, **options)
        check_choice("rotated", rotated, get_args(Rotated))
        self.rotated: Rotated = rotated

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """Map queries or keys [..., h] to features [..., f], which must not be negative."""

    def weigh(self, features: Tensor, first: int) -> Tensor:
        """Weight the features [..., T, f] of tokens at positions `first`, `first` + 1, ... by their positions: [..., T, g].

        By default, they are returned unchanged.
        """
        return features

    def sums(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The causal sums over tokens: q [..., L, f], k [..., L, f], v [..., L, h] -> [..., L, h]."""
        return chunked_sums(q, k, v)

    def rotate(self, q: Tensor, k: Tensor, rotations: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys [B, H, T, h]; or their features, plain ones before rotated ones, [B, H, T, 2 f]."""
        if self.rotated == "inputs":
            return super().rotate(q, k, rotations)
        q, k = self.features(q), self.features(k)
        turned_q, turned_k = self.rotate_features(q, k, rotations)
        return torch.cat([q, turned_q], -1), torch.cat([k, turned_k], -1)

    def rotate_features(self, q: Tensor, k: Tensor, rotations: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rotate features of queries and keys [B, H, T, f] by their positions."""
        return super().rotate(q, k, rotations)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Linear attention: q, k, v [R, H, L, h] -> [R, H, L, h]."""
        q, k, plain = self._features(q, k, first=0)
        real = None if real is None else real[:, None]
        return linear_attention(q, k, v, causal=self.causal, real=real, causal_sums=self.sums, plain=plain)

    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, state: LinearState) -> tuple[Tensor, LinearState]:
        """Attend with a state of constant size; return the outputs and the new state."""
        q, k, plain = self._features(q, k, first=state.position)
        return linear_attention_extend(q, k, v, state, plain=plain)

    def _features(self, q: Tensor, k: Tensor, first: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """The features of what `rotate` returned, and of the denominator if they differ; `first` is the first position."""
        if self.rotated == "inputs":
            return self.weigh(self.features(q), first), self.weigh(self.features(k), first), None
        (plain_q, q), (plain_k, k) = ((self.weigh(part, first) for part in x.chunk(2, -1)) for x in (q, k))
        return q, k, (plain_q, plain_k)

    def init_own_state(self, batch_size: int) -> LinearState:
        """The state before the first token of `batch_size` streams."""
        empty = self.empty_cache(batch_size, acc_dtype(self.any_parameter))
        n_features = self.weigh(self.features(empty), first=0).shape[-1]
        return LinearState(empty.new_zeros(batch_size, self.n_heads, n_features, self.head_dim + 1), 0)


class SteppingKernelAttention(KernelAttention, SteppingMixer[LinearState, LinearStreams]):
    """A `KernelAttention` whose features do not depend on positions, so that streams at different positions step together."""

    steps_in_place = True

    def join_own_streams(self, states: Sequence[LinearState]) -> LinearStreams:
        """Join streams at different positions."""
        return linear_streams(states)

    def separate_own_streams(self, streams: LinearStreams, positions: Sequence[int]) -> list[LinearState]:
        """The state of each stream."""
        return linear_states(streams, positions)

    def mix_step(self, normed: Tensor, streams: LinearStreams, layout: Layout) -> Tensor:
        """Compute one more normed token of every stream, [B, 1, d] -> [B, 1, d]; updates `streams` in place."""
        q, k, v = self.project(normed, layout)
        compute = self.compute_dtype(q, k, v)
        with without_autocast(v):
            q, k, plain = self._features(q.to(compute), k.to(compute), first=0)
            attended = linear_attention_step(q, k, v.to(compute), streams, plain=plain)
        return self.combine(normed, merge_heads(attended.to(output_dtype(v, compute))))
