"""Efficient attention: softmax over the features of a query, softmax over the positions of the keys' features.

Shapes: B batch, N new tokens of a stream, R rows, H heads, T tokens, h head width (features f are the h of queries and keys).
Source: "Efficient Attention" (arXiv 1812.01243).

    out[t] = sum over features f of softmax(q[t])[f] context[f],  context[f] = sum over visible j of softmax(k[:, f])[j] v[j]

Where all tokens are visible there is one context; causal, exp(k) and its running sum give a context for every token.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lineartime.layers.multi_head import MultiHeadMixer

# 1. The definition ----------------------------------------------------------------------------------------------------


def efficient_attention_oracle(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """The definition for one head and one document, one query at a time: [T, h] three times -> [T, h]."""
    rows = []
    for t in range(len(v)):
        visible = slice(0, t + 1) if causal else slice(None)
        context = k[visible].softmax(0).mT @ v[visible]
        rows.append(q[t].softmax(0) @ context)
    return torch.stack(rows)


# 2. The parallel form -------------------------------------------------------------------------------------------------


def efficient_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, real: Tensor | None = None) -> Tensor:
    """Attend in time linear in T: [R, H, T, h] three times -> the same; `real`, [R, T], is False behind a row's tokens."""
    if causal:  # nobody reads what stands behind the real tokens
        return efficient_attention_extend(q, k, v, _empty_state(q, v))[0]
    wide = k.to(torch.promote_types(k.dtype, torch.float32))
    if real is not None:
        wide = wide.masked_fill(~real[:, None, :, None], torch.finfo(wide.dtype).min)
    return _softmax(q) @ (wide.softmax(-2).to(v.dtype).mT @ v)


def _softmax(q: Tensor) -> Tensor:
    return q.to(torch.promote_types(q.dtype, torch.float32)).softmax(-1).to(q.dtype)


# 3. The streaming form, which is the causal form too ------------------------------------------------------------------


class EfficientState(NamedTuple):
    """What a causal stream has to remember, in float32 or better.

    Attributes:
        summary: [B, H, h, h], the sum of exp(k) v^T over all tokens so far, divided by 2^peak.
        total: [B, H, h], the sum of exp(k), divided by 2^peak.
        peak: [B, H, h], the largest whole power of two in an exp(k) so far, without which these would overflow.
        position: the number of tokens so far.
    """

    summary: Tensor
    total: Tensor
    peak: Tensor
    position: int


def _empty_state(q: Tensor, v: Tensor) -> EfficientState:
    total = q.new_zeros(*q.shape[:-2], q.shape[-1], dtype=torch.promote_types(q.dtype, torch.float32))
    summary = total.new_zeros(*total.shape, v.shape[-1])
    return EfficientState(summary, total, torch.full_like(total, torch.finfo(total.dtype).min), 0)


def efficient_attention_extend(
    q: Tensor, k: Tensor, v: Tensor, state: EfficientState, chunk_size: int = 128
) -> tuple[Tensor, EfficientState]:
    """Continue a causal sequence by N tokens: [B, H, N, h] three times -> [B, H, N, h], and the state after them."""
    outputs = [v[..., :0, :]]
    pieces = (x.split(chunk_size, dim=-2) for x in (_softmax(q), k.to(state.peak.dtype), v))
    for q_chunk, k_chunk, v_chunk in zip(*pieces, strict=True):
        if not v_chunk.shape[-2]:
            continue
        # exp(k) = 2^power. Any peak gives the same outputs; a whole one the same bits, for it only moves exponents.
        power = k_chunk * math.log2(math.e)
        whole = power.detach().floor()
        peak = torch.maximum(state.peak, whole.amax(-2))
        weights = torch.exp2(power - whole) * torch.exp2(whole - peak[..., None, :])
        decay = torch.exp2(state.peak - peak)
        earlier, total = state.summary * decay[..., None], state.total * decay
        totals = total[..., None, :] + weights.cumsum(-2)
        # Keys of one chunk may differ by 40 before float32 loses the smallest; the square of the bound is still a number.
        queries = (q_chunk / totals.clamp(min=torch.finfo(totals.dtype).tiny ** 0.5)).to(v.dtype)
        weights = weights.to(v.dtype)
        outputs.append((queries @ weights.mT).tril() @ v_chunk + queries @ earlier.to(v.dtype))
        state = EfficientState(
            earlier + (weights.mT @ v_chunk).to(earlier.dtype), totals[..., -1, :], peak, state.position + v_chunk.shape[-2]
        )
    return torch.cat(outputs, -2), state


# 4. The layer ---------------------------------------------------------------------------------------------------------


class EfficientAttention(MultiHeadMixer):
    """Multi-head efficient attention, streaming with constant memory: [B, T, d] -> [B, T, d].

    Arguments are those of every `MultiHeadMixer`; rotary positions come before both softmaxes.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Efficient attention, [R, H, L, h] three times -> [R, H, L, h]."""
        return efficient_attention(q, k, v, causal=self.causal, real=real)

    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, state: EfficientState) -> tuple[Tensor, EfficientState]:
        """Attend with a state of constant size, and the state N tokens later."""
        return efficient_attention_extend(q, k, v, state)

    def init_state(self, batch_size: int) -> EfficientState:
        """The state before the first token of `batch_size` streams; ValueError unless the layer is causal."""
        one = self.empty_cache(batch_size).new_zeros(batch_size, self.n_heads, 1, self.head_dim)
        return _empty_state(one, one)
