"""RWKV-7: a generalised delta rule, in which a token decides for each feature how fast it forgets and learns.

Source: "RWKV-7 Goose with Expressive Dynamic State Evolution" (arXiv 2503.14456), its time mixing.

    S[t] = diag(w[t]) S[t - 1] - (a[t] * c[t]) c[t]^T S[t - 1] + k[t] v[t]^T        o[t] = S[t]^T r[t]
    w = exp(-exp(-1/2) sigmoid(.))        a = sigmoid(.)        c = k' * kappa / |k' * kappa|        k = k' (1 + (a - 1) alpha)

Every input is a mixture of a token and the one before it. The layers of the paper also share the values of the first one, which
is left out here. Mixtures and decays start by the depth of a layer, as its authors'.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.baselines.recurrence import RecurrentMixer, Tokens
from lineartime.layers.dense import Dense, FactoryOptions, factory
from lineartime.layers.mixer import MixerOptions
from lineartime.ops.packing import Packing

FASTEST = 0.6065306597126334
"""exp(-1 / 2): no feature forgets faster than by exp(-FASTEST) a token."""
MIXED = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
"""The inputs, and the powers by which the features of each begin to read the token before."""


def rwkv7_oracle(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, c: Tensor) -> Tensor:
    """The definition for one head of one document, one token at a time: v [T, e], the others [T, s] -> [T, e]."""
    s, rows = v.new_zeros(k.shape[1], v.shape[1]), []
    for t in range(len(v)):
        s = (torch.diag(w[t]) - torch.outer(a[t] * c[t], c[t])) @ s + torch.outer(k[t], v[t])
        rows.append(s.mT @ r[t])
    return torch.stack(rows)


class LowRank(nn.Module):
    """f(x W1) W2, a linear map through a few features: [..., d] -> [..., d]."""

    maps = ("down", "up")

    def __init__(
        self, d_model: int, rank: int, f: Callable[[Tensor], Tensor] | None = None, **factory: Unpack[FactoryOptions]
    ) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, d_model, **factory))
        self.up = nn.Parameter(torch.empty(d_model, rank, **factory))
        self.f = f
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.down, std=0.02)
        nn.init.normal_(self.up, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        few = F.linear(x, self.down)
        return F.linear(few if self.f is None else self.f(few), self.up)


class RWKV7(RecurrentMixer):
    """RWKV-7: its time mixing, with this library's feed-forward layers.

    Args:
        n_heads: H, which must divide d; published are heads of width 64.
        **options: the options of `Mixer`; causal is True, and False raises an error.
    """

    name = "rwkv7"
    depth = 0, 1
    """The block that it is in, and their number, by which it is initialised."""

    def __init__(self, d_model: int, *, n_heads: int = 12, **options: Unpack[MixerOptions]) -> None:
        widths, made = (d_model, d_model), factory(options)
        super().__init__(d_model, n_heads, widths, maps=(), gated=False, short_convolution=False, **options)
        rank = max(32, 32 * round(2.5 * d_model**0.5 / 32))
        self.mixture = nn.Parameter(torch.empty(len(MIXED), d_model, **made))
        self.to_r, self.to_k, self.to_v = (Dense(d_model, d_model, **made) for _ in range(3))
        self.to_decay = LowRank(d_model, rank, torch.tanh, **made)
        self.to_rate = LowRank(d_model, rank, **made)
        self.to_low_gate = LowRank(d_model, 2 * rank, torch.sigmoid, **made)
        self.decay, self.rate, self.removal, self.replacement, self.bonus = (
            nn.Parameter(torch.empty(d_model, **made)) for _ in range(5)
        )
        self.head_norm = nn.GroupNorm(n_heads, d_model, eps=1e-5 * d_model / n_heads, **made)
        self.init_own()

    def init_at_depth(self, block: int, n_blocks: int) -> None:
        self.depth = block, n_blocks
        self.init_own()

    def init_own(self) -> None:
        """Begin as the authors: slow and fast decays in each head; deeper layers forget less, and mix in less of the past."""
        feature, width = torch.arange(self.d_model, dtype=torch.float64, device="cpu"), self.d_model // self.n_heads
        place, within = feature / max(1, self.d_model - 1), feature % width / max(1, width - 1) * 2 - 1
        curve, (block, n_blocks) = within * within.abs(), self.depth
        powers = torch.tensor(list(MIXED.values()), dtype=torch.float64, device="cpu") * (1 - block / n_blocks)
        with torch.no_grad():
            self.mixture.copy_(1 - (feature / self.d_model) ** powers[:, None])
            self.decay.copy_(-5.5 + 6 * place ** (1 + (block / max(1, n_blocks - 1)) ** 0.3) + 2.5 * curve)
            self.rate.copy_(-0.39 + 0.4 * place + 0.3 * curve)
            self.removal.copy_(0.76 - 0.1 * place)
            self.replacement.fill_(1.02)
            self.bonus.fill_(-0.04)

    @property
    def recent_shape(self) -> tuple[int, int]:
        return 1, self.d_model

    def remember(self, normed: Tensor) -> Tensor:
        return normed

    def project(self, earlier: Sequence[Tensor]) -> Sequence[Tensor]:
        x, before = earlier
        r, w, k, v, a, g = (torch.addcmul(x, before - x, share) for share in self.mixture)
        return (
            self.to_r(r),
            self.decay + self.to_decay(w),
            self.to_k(k),
            self.to_v(v),
            (self.rate + self.to_rate(a)).sigmoid(),
            self.to_low_gate(g),
        )

    def tokens(self, normed: Tensor, maps: Sequence[Tensor], packing: Packing) -> Tokens:
        r, w, k, v, a, _ = maps
        removed = F.normalize(self.heads(k * self.removal), dim=-1, eps=1e-6)
        g = -FASTEST * w.sigmoid()
        k = k * (1 + (a - 1) * self.replacement)
        r, k, v, g, a = (self.heads(each) for each in (r, k, v, g, a))
        return Tokens(r, k, v, g, removed * a, -removed)

    def combine(self, normed: Tensor, maps: Sequence[Tensor], x: Tokens, out: Tensor) -> Tensor:
        own = (x.q * x.k * self.heads(self.bonus)).sum(-1, keepdim=True) * x.v
        added: Tensor = self.to_output((self.head_norm(out.flatten(1)) + own.flatten(1)) * maps[5])
        return added
