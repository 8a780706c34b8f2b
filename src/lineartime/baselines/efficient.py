"""Efficient attention: softmax over the features of a query, softmax over the positions of the keys' features.

Shapes: N tokens, R rows, L tokens of a row, H heads, h head width (features f are the h of queries and keys).
Source: "Efficient Attention" (arXiv 1812.01243); the causal form, by running sums, is ours.

    out[t] = sum over features f of softmax(q[t])[f] context[f],  context[f] = sum over visible j of softmax(k[:, f])[j] v[j]

If all tokens are visible, there is one context. In the causal form, softmax(k[:, f])[j] is exp(k[j, f]) divided by its running
sum. Dividing the query's feature by that sum instead gives linear attention. Keys are clamped to -20 ... 20, so that no maximum
has to be subtracted from the exponents. With a maximum over all tokens, a large future key would make earlier terms vanish.

Rotary positions rotate q and k, or the outputs of both softmaxes. A rotated softmax of keys mixes two features with different
running sums. Each feature is therefore summed twice, multiplied by the cosine and by the sine of its angle, and the query
combines the two sums.
"""

from typing import get_args

import torch
from torch import Tensor
from typing_extensions import Unpack

from lineartime.baselines.kernel_attention import LinearState, Rotated, continued_sums
from lineartime.errors import check_choice
from lineartime.layers.attention import HeadOptions, MultiHeadMixer
from lineartime.ops.checks import check_n_heads
from lineartime.ops.modes import acc_dtype
from lineartime.ops.packing import Packing

MAX_KEY = 20.0


def efficient_features(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax of queries, and the exponentials of keys, [..., h] each, in float32 or better."""
    return q.to(acc_dtype(q)).softmax(-1), k.to(acc_dtype(k)).clamp(-MAX_KEY, MAX_KEY).exp()


def _causal(q: Tensor, k: Tensor, weights: Tensor, v: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """The causal outputs that continue a state [..., f, h + 1], the sum of (k v^T, weights), and the new state."""
    of_values, of_ones = (None, 0.0) if before is None else (before[..., :-1], before[..., -1][..., None, :])
    out, of_values = continued_sums((q / (of_ones + weights.cumsum(-2))).to(v.dtype), k.to(v.dtype), v, of_values)
    total = of_ones + weights.sum(-2, keepdim=True)
    return out, torch.cat([of_values, total.mT.to(of_values.dtype)], -1)


class Efficient(MultiHeadMixer):
    """Efficient attention: softmax over features and positions.

    A causal layer streams with constant memory.

    Args:
        rotated: what rotary positions rotate: "inputs", the queries and keys, or "features", the outputs of both softmaxes.
        **options: the options of `MultiHeadMixer`.
    """

    name = "efficient"
    any_positions = True

    def __init__(self, d_model: int, *, rotated: Rotated = "inputs", **options: Unpack[HeadOptions]) -> None:
        super().__init__(d_model, **options)
        check_choice("rotated", rotated, get_args(Rotated))
        self.rotated: Rotated = rotated
        if rotated == "features":
            check_n_heads(self.n_heads, {"d_model": d_model}, in_pairs=True)

    def rotate(self, q: Tensor, k: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys [N, H, h]; or 2 h features, whose sums are those of rotated softmaxes, and weights."""
        if self.rotated == "inputs":
            return super().rotate(q, k, packing)
        q, weights = efficient_features(q, k)
        turns = packing.rotations(self.head_dim, q.dtype) if self.rope else q.new_tensor([1.0, 0.0])[:, None, None]
        halves = weights.view(packing.sharing, packing.position.shape[0], self.n_heads, 1, 2, self.head_dim // 2)
        of_keys = (halves * turns.transpose(0, 1)[:, None, :, None]).flatten(3).flatten(0, 1)  # by cosines, then by sines
        q = packing.rotate(q) if self.rope else q
        first, second = q.chunk(2, -1)
        return torch.cat([q, second, -first], -1), torch.cat([of_keys, weights, weights], -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Attend in time linear in L: q, k as `rotate` returns them, and v [R, H, L, h] -> [R, H, L, h]."""
        if self.causal:  # padding comes after the real tokens, and no token attends to later ones
            return _causal(*self._features(q, k, None), v, None)[0]
        of_queries, of_keys, weights = self._features(q, k, real)
        # A row without tokens has weights of zero: avoid a division by zero.
        totals = weights.sum(-2, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        return of_queries.to(v.dtype) @ ((of_keys / totals).to(v.dtype).mT @ v)

    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, state: LinearState, packing: Packing) -> tuple[Tensor, LinearState]:
        real = None if packing.even else packing.grids(None, causal=True)[0].real
        out, summary = _causal(*self._features(q, k, real), v, state.summary)
        return out, LinearState(state.position + packing.new, summary)

    def _features(self, q: Tensor, k: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Features [R, H, L, f] of queries and of real keys, and the exponentials whose sums normalise the latter."""
        if self.rotated == "inputs":
            q, of_keys = efficient_features(q, k)
            weights = of_keys
        else:
            q, (of_keys, weights) = q.to(acc_dtype(q)), k.to(acc_dtype(q)).chunk(2, -1)
        if real is None:
            return q, of_keys, weights
        padding = ~real[:, None, :, None]
        return q, of_keys.masked_fill(padding, 0.0), weights.masked_fill(padding, 0.0)

    def init_own_state(self, batch_size: int) -> LinearState:
        empty = self.empty_cache(batch_size, acc_dtype(self.any_parameter))
        n_features = self.head_dim * (2 if self.rotated == "features" else 1)
        summary = empty.new_zeros(batch_size, self.n_heads, n_features, self.head_dim + 1)
        return LinearState(self.first_position(batch_size), summary)
