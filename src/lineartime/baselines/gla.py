"""Gated linear attention: every feature of the keys forgets as the token says.

Source: "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635).

    S[t] = diag(alpha[t]) S[t - 1] + k[t] v[t]^T        o[t] = S[t]^T q[t] / sqrt(s)
    alpha = sigmoid(x W1 W2 + b)^(1 / 16)
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from lineartime.baselines.recurrence import LONGEST_DECAY, Tokens
from lineartime.baselines.recurrent import RecurrentMixer
from lineartime.layers.dense import Dense, factory
from lineartime.layers.mixer import MixerOptions
from lineartime.ops.checks import check_positive
from lineartime.ops.packing import Packing

RANK = 16
SMOOTHING = 16


def gla_oracle(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    """The definition for one head of one document, one token at a time: q, k, alpha [T, s], v [T, e] -> [T, e]."""
    s, rows = v.new_zeros(k.shape[1], v.shape[1]), []
    for t in range(len(v)):
        s = alpha[t][:, None] * s + torch.outer(k[t], v[t])
        rows.append(s.mT @ q[t] / q.shape[1] ** 0.5)
    return torch.stack(rows)


class GLA(RecurrentMixer):
    """Gated linear attention: each feature of the keys forgets as the token says.

    Keys are half as wide as values. A decay below exp(-5), of a gate's logit below -80, counts as exp(-5).

    Args:
        n_heads: H, which must divide d / 2.
        short_convolution: whether queries, keys and values pass a short convolution.
        **options: the options of `Mixer`; causal is True, and False raises an error.
    """

    name = "gla"
    activated = False
    chunk = 16

    def __init__(
        self, d_model: int, *, n_heads: int = 4, short_convolution: bool = False, **options: Unpack[MixerOptions]
    ) -> None:
        check_positive(d_model=d_model)
        keys = d_model // 2
        super().__init__(d_model, n_heads, (keys, d_model), short_convolution=short_convolution, **options)
        self.to_rank = Dense(d_model, RANK, **factory(options))
        self.to_decay = Dense(RANK, keys, **factory(options))

    def tokens(self, normed: Tensor, maps: Sequence[Tensor], packing: Packing) -> Tokens:
        q, k, v = (self.heads(each) for each in maps)
        g = F.logsigmoid(self.to_decay(self.to_rank(normed))) / SMOOTHING
        return Tokens(q * q.shape[-1] ** -0.5, k, v, self.heads(g).clamp(min=-LONGEST_DECAY / self.chunk))
