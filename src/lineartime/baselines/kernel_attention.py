"""Multi-head linear attention by a feature map, which a subclass supplies.

Shapes: B batch, N new tokens of a stream, R rows, H heads, L tokens of a row, h head width, f features.
"""

from abc import abstractmethod

from torch import Tensor

from lineartime.layers.multi_head import MultiHeadMixer
from lineartime.ops.linear import LinearState, chunked_sums, linear_attention, linear_attention_extend
from lineartime.ops.precision import acc_dtype


class KernelAttention(MultiHeadMixer[LinearState]):
    """Linear attention with similarity features(q).features(k), streaming with constant memory: [B, T, d] -> [B, T, d].

    Causal, it streams with constant memory. Options are those of `MultiHeadMixer`; the feature map comes after rotary
    positions.

    Source: "Transformers are RNNs" (arXiv 2006.16236).
    """

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """Queries or keys [..., h] -> features [..., f], which must not be negative."""

    def sums(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The causal sums over tokens: q [..., L, f], k [..., L, f], v [..., L, h] -> [..., L, h]."""
        return chunked_sums(q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Linear attention, [R, H, L, h] three times -> [R, H, L, h]."""
        return linear_attention(
            self.features(q),
            self.features(k),
            v,
            causal=self.causal,
            real=None if real is None else real[:, None],
            causal_sums=self.sums,
        )

    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, state: LinearState) -> tuple[Tensor, LinearState]:
        """Attend with a state of constant size, and the state N tokens later."""
        return linear_attention_extend(self.features(q), self.features(k), v, state)

    def init_state(self, batch_size: int) -> LinearState:
        """The state before the first token of `batch_size` streams; ValueError unless the layer is causal."""
        empty = self.empty_cache(batch_size, acc_dtype(self.to_output.weight))
        n_features = self.features(empty).shape[-1]
        return LinearState(empty.new_zeros(batch_size, self.n_heads, n_features, self.head_dim + 1), 0)
