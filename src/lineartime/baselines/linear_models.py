"""Linear models of today, each by what its tokens give to a linear recurrence, `lineartime.baselines.recurrence`.

    RetNet:          S[t] = gamma S[t - 1] + k[t] v[t]^T          gamma = 1 - 2^(-5 - head), with rotary positions
    GLA:             S[t] = diag(alpha[t]) S[t - 1] + k[t] v[t]^T          alpha = sigmoid(x W1 W2 + b)^(1 / 16)
    DeltaNet:        S[t] = S[t - 1] + beta[t] k[t] (v[t] - S[t - 1]^T k[t])^T          |q| = |k| = 1
    Gated DeltaNet:  S[t] = alpha[t] S[t - 1] + beta[t] k[t] (v[t] - alpha[t] S[t - 1]^T k[t])^T
                     alpha = exp(-A softplus(x w + b))
    of all four:     o[t] = S[t]^T q[t] / sqrt(s)

    Mamba-2:         S[t] = exp(-A step[t]) S[t - 1] + step[t] B[t] x[t]^T          step = softplus(u w + b)
                     y[t] = S[t]^T C[t] + D x[t]

    RWKV-7:          S[t] = diag(w[t]) S[t - 1] - (a[t] * c[t]) c[t]^T S[t - 1] + k[t] v[t]^T        o[t] = S[t]^T r[t]
                     w = exp(-exp(-1/2) sigmoid(.))  a = sigmoid(.)  c = k' * kappa / |k' * kappa|  k = k' (1 + (a - 1) alpha)

Every input of RWKV-7 is a mixture of a token and the one before it. The layers of the paper also share the values of the first
one, which is left out here. Mixtures and decays start by the depth of a layer, as its authors'.

Shapes: N tokens, T tokens of a document, H heads, s key width, e value width, d model width.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.baselines.recurrence import LONGEST_DECAY, RecurrentMixer, SoftplusDecay, Tokens
from lineartime.layers.dense import Dense, FactoryOptions, factory
from lineartime.layers.mixer import MixerOptions
from lineartime.layers.residual import RMSNorm
from lineartime.ops.checks import check_n_heads, check_positive
from lineartime.ops.modes import acc_dtype
from lineartime.ops.packing import Packing

RANK = 16
"""The width between W1 and W2 of GLA."""
SMOOTHING = 16
"""The root of GLA's decays."""
FASTEST = 0.6065306597126334
"""exp(-1 / 2): no feature of RWKV-7 forgets faster than by exp(-FASTEST) a token."""
MIXED = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
"""The inputs of RWKV-7, and the powers by which the features of each begin to read the token before."""


class RetNet(RecurrentMixer):
    """RetNet: rotary positions, and one decay a head.

    Args:
        n_heads: H, which must divide d into even widths.
        **options: the options of `Mixer`; causal is True, and False raises an error.

    Source: "Retentive Network" (arXiv 2307.08621), multi-scale retention with rotary positions.
    """

    name = "retnet"
    activated = False

    def __init__(
        self, d_model: int, *, n_heads: int = 3, short_convolution: bool = False, **options: Unpack[MixerOptions]
    ) -> None:
        super().__init__(d_model, n_heads, (d_model, d_model), short_convolution=short_convolution, **options)
        check_n_heads(n_heads, {"d_model": d_model}, in_pairs=True)
        self.rotated_width = d_model // n_heads

    def tokens(self, normed: Tensor, maps: Sequence[Tensor], packing: Packing) -> Tokens:
        q, k, v = (self.heads(each) for each in maps)
        powers = 5 + torch.arange(self.n_heads, device=v.device, dtype=acc_dtype(v))
        g = torch.log1p(-(2**-powers))[:, None].expand(*v.shape[:-1], 1)
        return Tokens(packing.rotate(q) * q.shape[-1] ** -0.5, packing.rotate(k), v, g)


class GLA(RecurrentMixer):
    """Gated linear attention: each feature of the keys forgets as the token says.

    Keys are half as wide as values. A decay below exp(-5), of a gate's logit below -80, counts as exp(-5).

    Args:
        n_heads: H, which must divide d / 2.
        **options: the options of `Mixer`; causal is True, and False raises an error.

    Source: "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635).
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


class Mamba2(RecurrentMixer):
    """Mamba-2: a state space unit that needs no feed-forward layer.

    Args:
        n_heads: H, which must divide 2 d; published are heads of 64 values.
        d_state: s, the width of the queries and keys that all heads share.
        **options: the options of `Mixer`; causal is True, and False raises an error.

    Source: "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space Duality"
    (arXiv 2405.21060).
    """

    name = "mamba2"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 24,
        d_state: int = 128,
        short_convolution: bool = True,
        **options: Unpack[MixerOptions],
    ) -> None:
        check_positive(d_model=d_model, n_heads=n_heads, d_state=d_state)
        values = 2 * d_model
        widths, maps = (n_heads * d_state, values), (d_state, d_state, values)
        super().__init__(d_model, n_heads, widths, maps, short_convolution=short_convolution, **options)
        self.d_state = d_state
        self.decay = SoftplusDecay(d_model, n_heads, **factory(options))
        self.skip = nn.Parameter(torch.empty(n_heads, **factory(options)))
        self.head_norm = RMSNorm(values, **factory(options))
        self.init_own()

    def init_own(self) -> None:
        nn.init.ones_(self.skip)

    def tokens(self, normed: Tensor, maps: Sequence[Tensor], packing: Packing) -> Tokens:
        q, k, v = maps
        step, g = self.decay(normed)
        return Tokens(q[:, None], k[:, None], step * self.heads(v), g)

    def combine(self, normed: Tensor, maps: Sequence[Tensor], x: Tokens, out: Tensor) -> Tensor:
        assert self.to_gate is not None
        out = (out + self.skip[:, None] * self.heads(maps[2])).flatten(1)
        added: Tensor = self.to_output(self.head_norm(out * F.silu(self.to_gate(normed))))
        return added


class DeltaNet(RecurrentMixer):
    """DeltaNet: the delta rule with keys of unit length.

    Args:
        n_heads: H, which must divide d.
        **options: the options of `Mixer`; causal is True, and False raises an error.

    Source: "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (arXiv 2406.06484).
    """

    name = "deltanet"
    forgets: ClassVar[bool] = False
    """Whether there is a decay, and a gate on the output."""

    def __init__(
        self, d_model: int, *, n_heads: int = 6, short_convolution: bool = True, **options: Unpack[MixerOptions]
    ) -> None:
        widths = (d_model, d_model)
        super().__init__(d_model, n_heads, widths, gated=self.forgets, short_convolution=short_convolution, **options)
        self.to_beta = Dense(d_model, n_heads, **factory(options))
        self.decay = SoftplusDecay(d_model, n_heads, **factory(options)) if self.forgets else None

    def tokens(self, normed: Tensor, maps: Sequence[Tensor], packing: Packing) -> Tokens:
        q, k, v = (self.heads(each) for each in maps)
        q, k = (F.normalize(each, dim=-1, eps=1e-6) for each in (q, k))
        beta = self.to_beta(normed).sigmoid()[..., None]
        g = torch.zeros_like(beta) if self.decay is None else self.decay(normed)[1]
        stored = beta * k
        return Tokens(q * q.shape[-1] ** -0.5, stored, v, g, -g.exp() * stored, k)


class GatedDeltaNet(DeltaNet):
    """Gated DeltaNet: a decay for each head and token, and a gate on the output.

    The options are those of `DeltaNet`.

    Source: "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv 2412.06464).
    """

    name = "gated-deltanet"
    forgets = True


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

    Source: "RWKV-7 Goose with Expressive Dynamic State Evolution" (arXiv 2503.14456), its time mixing.
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
