"""Flowformer: linear attention with competition among keys and an allocation to each query.

Shapes: T tokens, R rows (one for each document or stream), H heads, L tokens of the longest row, h head width; tensors may have
leading dimensions.
Source: "Flowformer: Linearizing Transformers with Conservation Flows" (arXiv 2202.06258), and its authors' code, the
source of eps and of the bound (that of their language model).

    a = sigmoid(q), b = sigmoid(k), a.b' = (a + eps).(b' + eps) for a sum b'

    I[t] = a[t].sum over j of b[j]               O[j] = b[j].sum over t of a[t]               incoming and outgoing flow
    i[t] = a[t].sum over j of b[j] / O[j]        o[j] = b[j].sum over t of a[t] / I[t]        the same, the other flow being 1
    w[j] = T softmax over j (min(o[j], 5))                                                    competition
    out[t] = sigmoid(i[t]) sum over j of (a[t].b[j] / I[t]) w[j] v[j]                         allocation

In the causal form, every sum at a token is over the tokens so far, and I, O, i and o are means. With n[t] tokens so far,

    i[t] = a[t].sum over j <= t of (n[j] b[j] / O[j]) / n[t]        o[j] = b[j].sum over t <= j of (n[t] a[t] / I[t]) / n[j]
    w[j] = n[j] exp(min(o[j], 5)) / sum over j' <= j of exp(min(o[j'], 5))

So no token depends on later ones. The outgoing flow of a key is estimated from the queries up to its own position, because the
queries that attend to it come later. A stream stores only the sums.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lineartime.baselines.blocks import StreamState, real_tokens
from lineartime.baselines.kernel_attention import continued_sums
from lineartime.layers.attention import MultiHeadMixer
from lineartime.ops.modes import acc_dtype
from lineartime.ops.packing import Packing

EPS = 1e-6
MAX_FLOW = 5.0
"""The upper bound of a conserved flow, which is 1 on average, before the competition."""


def _flow(x: Tensor, total: Tensor) -> Tensor:
    """The flow between every token and a sum of others: [..., L, h] and [..., L or 1, h] -> [..., L, 1]."""
    return ((x + EPS) * (total + EPS)).sum(-1, keepdim=True)


@dataclass(eq=False)
class FlowformerState(StreamState):
    """The state of causal streams, of constant size, in float32 or better: sums over all tokens so far.

    Attributes:
        summary: [B, H, h, h], the sum of b (w v)^T.
        flows: [B, H, 4, h], the sums of b, of a, of n b / O and of n a / I.
        strength: [B, H, 1, 1], the sum of the exponentials that compete.
    """

    summary: Tensor
    flows: Tensor
    strength: Tensor


def _continued(
    q: Tensor, k: Tensor, v: Tensor, state: FlowformerState, position: Tensor | int, real: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The outputs [..., L, h] of L tokens after `position` others, and the new sums; `real`, bool [R, L], comes first."""

    def kept(x: Tensor) -> Tensor:
        return x if real is None else x.masked_fill(~real[:, None, :, None], 0.0)

    a, b = (kept(x.to(acc_dtype(x)).sigmoid()) for x in (q, k))
    count = torch.arange(1, v.shape[-2] + 1, dtype=a.dtype, device=a.device)[:, None] + position
    before = state.flows.split(1, -2)
    incoming, outgoing = _flow(a, before[0] + b.cumsum(-2)) / count, _flow(b, before[1] + a.cumsum(-2)) / count
    given, taken = b / outgoing, a / incoming
    sinks, sources = _flow(a, before[2] + given.cumsum(-2)) / count, _flow(b, before[3] + taken.cumsum(-2)) / count
    strength = kept(sources.clamp(max=MAX_FLOW).exp())
    # The strength of a token is at least 1, so the sum is smaller only for a stream without tokens.
    share = strength / (state.strength + strength.cumsum(-2)).clamp(min=1.0) * count
    out, summary = continued_sums((taken / count).to(v.dtype), b.to(v.dtype), (share * v).to(v.dtype), state.summary)
    flows = state.flows + torch.stack([x.sum(-2) for x in (b, a, given, taken)], -2)
    total = state.strength + strength.sum(-2, keepdim=True)
    return out * sinks.sigmoid().to(out.dtype), summary, flows, total


class Flowformer(MultiHeadMixer):
    """Flowformer: linear attention with conserved flows.

    A causal layer streams with constant memory. The options are those of `MultiHeadMixer`.
    """

    name = "flowformer"
    any_positions = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Attend in time linear in L: q, k, v [R, H, L, h] -> [R, H, L, h]."""
        if self.causal:  # padding comes after the real tokens, and no token attends to later ones
            return _continued(q, k, v, self.init_own_state(len(q)), 0)[0]
        a, b = (x.to(acc_dtype(x)).sigmoid() for x in (q, k))
        here = real_tokens(v, real)[:, None, :, None]

        def total(x: Tensor) -> Tensor:
            return x.masked_fill(~here, 0.0).sum(-2, keepdim=True)

        incoming, outgoing = _flow(a, total(b)), _flow(b, total(a))
        sinks, sources = _flow(a, total(b / outgoing)), _flow(b, total(a / incoming))
        strength = sources.clamp(max=MAX_FLOW).exp().masked_fill(~here, 0.0)
        # The strength of a token is at least 1, so the sum is smaller only for a row without tokens.
        share = strength * here.sum(-2, keepdim=True) / strength.sum(-2, keepdim=True).clamp(min=1.0)
        out = (a / incoming).to(v.dtype) @ (b.to(v.dtype).mT @ (share * v).to(v.dtype))
        return out * sinks.sigmoid().to(out.dtype)

    def attend_next(
        self, q: Tensor, k: Tensor, v: Tensor, state: FlowformerState, packing: Packing
    ) -> tuple[Tensor, FlowformerState]:
        real = None if packing.even else packing.grids(None, causal=True)[0].real
        out, *sums = _continued(q, k, v, state, state.position[:, None, None, None], real)
        return out, FlowformerState(state.position + packing.new, *sums)

    def init_own_state(self, batch_size: int) -> FlowformerState:
        empty, width = self.empty_cache(batch_size, acc_dtype(self.any_parameter)), self.head_dim
        sums = (empty.new_zeros(batch_size, self.n_heads, *shape) for shape in ((width, width), (4, width), (1, 1)))
        return FlowformerState(self.first_position(batch_size), *sums)
