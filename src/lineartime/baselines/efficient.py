"""Efficient attention: softmax over the features of a query, softmax over the positions of the keys' features.

Shapes: B batch, N new tokens of a stream, R rows, H heads, T tokens, h head width (features f are the h of queries and keys).
Source: "Efficient Attention" (arXiv 1812.01243); the causal form, by running sums, is ours.

    out[t] = sum over features f of softmax(q[t])[f] context[f],  context[f] = sum over visible j of softmax(k[:, f])[j] v[j]

If all tokens are visible, there is one context. In the causal form, softmax(k[:, f])[j] is exp(k[j, f]) divided by its running
sum; dividing the query's feature by that sum instead gives linear attention. Keys are clamped to -20 ... 20, so that the
exponentials need no maximum subtracted: with a maximum over all tokens, a large future key would erase the past.
"""

import torch
from torch import Tensor

from lineartime.layers.multi_head import MultiHeadMixer
from lineartime.ops.linear import LinearState, continued_sums, with_ones
from lineartime.ops.precision import acc_dtype

LARGEST_KEY = 20.0

# 1. The definition ----------------------------------------------------------------------------------------------------


def efficient_attention_oracle(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """The definition for one head and one document, one query at a time: [T, h] three times -> [T, h]."""
    k = k.clamp(-LARGEST_KEY, LARGEST_KEY)
    rows = []
    for t in range(len(v)):
        visible = slice(0, t + 1) if causal else slice(None)
        context = k[visible].softmax(0).mT @ v[visible]
        rows.append(q[t].softmax(0) @ context)
    return torch.stack(rows)


# 2. The parallel form -------------------------------------------------------------------------------------------------


def efficient_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, real: Tensor | None = None) -> Tensor:
    """Attend in time linear in T: [R, H, T, h] three times -> the same; `real`, [R, T], is False behind a row's tokens."""
    if causal:  # padding comes after the real tokens, and no token reads later ones
        return _causal(q, k, v, None)[0]
    weights = _exponentials(k)
    if real is not None:
        weights = weights * real[:, None, :, None]
    # A row without tokens has weights of zero: do not divide by their sum.
    weights = weights / weights.sum(-2, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    return _softmax(q).to(v.dtype) @ (weights.to(v.dtype).mT @ v)


def _causal(q: Tensor, k: Tensor, v: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """The causal outputs after a state [..., h, h + 1], and the state after them."""
    weights = _exponentials(k)
    totals = weights.cumsum(-2) if before is None else before[..., -1][..., None, :] + weights.cumsum(-2)
    sums, state = continued_sums((_softmax(q) / totals).to(v.dtype), weights.to(v.dtype), with_ones(v), before)
    return sums[..., :-1], state


def _exponentials(k: Tensor) -> Tensor:
    return k.to(acc_dtype(k)).clamp(-LARGEST_KEY, LARGEST_KEY).exp()


def _softmax(q: Tensor) -> Tensor:
    return q.to(acc_dtype(q)).softmax(-1)


# 3. The streaming form, and the layer ---------------------------------------------------------------------------------


def efficient_attention_extend(q: Tensor, k: Tensor, v: Tensor, state: LinearState) -> tuple[Tensor, LinearState]:
    """Continue a causal sequence by N tokens: [B, H, N, h] three times -> [B, H, N, h], and the state after them.

    The summary in the state is the sum of exp(k) (v, 1)^T.
    """
    out, summary = _causal(q, k, v, state.summary)
    return out, LinearState(summary, state.position + v.shape[-2])


class Efficient(MultiHeadMixer[LinearState]):
    """Efficient attention: softmax over features and positions.

    Causal, it streams with constant memory. Options are those of `MultiHeadMixer`; rotary positions come before both softmaxes.
    """

    name = "efficient"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Efficient attention, [R, H, L, h] three times -> [R, H, L, h]."""
        return efficient_attention(q, k, v, causal=self.causal, real=real)

    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, state: LinearState) -> tuple[Tensor, LinearState]:
        """Attend with a state of constant size, and the state N tokens later."""
        return efficient_attention_extend(q, k, v, state)

    def init_state(self, batch_size: int) -> LinearState:
        """The state before the first token of `batch_size` streams; ValueError unless the layer is causal."""
        empty = self.empty_cache(batch_size, acc_dtype(self.to_output.weight))
        return LinearState(empty.new_zeros(batch_size, self.n_heads, self.head_dim, self.head_dim + 1), 0)
