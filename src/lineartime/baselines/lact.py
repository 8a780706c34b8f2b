"""LaCT: attention in a window, and a small network that is trained on each chunk while the text is read.

Source: "Test-Time Training Done Right" (arXiv 2505.23884), its language model.

Shapes: N tokens, B streams, R rows, L tokens of a row, C chunk size, F networks, f = d / F their width.

    o[t] = window attention + scale[t] norm(net(W[g], q[t]))        for t in chunk g; W[0] are parameters
    net(W, x) = W1 (silu(W0 x) * (W2 x))
    D[i] = - sum over t of rate_i[t] dLoss[t] / dWi  +  m[g] D[i] of the chunk before        Loss[t] = -net(W[g], k[t]).v[t]
    W[g + 1] = rows of (W[g] + orthogonalised D), rescaled to their lengths in W[0]

q, k and v are the silu of the maps of the attention, before it rotates them: q and k after a scale and an offset for each
feature, and with unit length. Rates are softplus and m is the mean sigmoid of linear maps of the tokens of chunk g. The authors
also offer these queries and keys with rotary positions, a norm of those of the attention, and W0 and W2 of low rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.baselines.blocks import StreamState, fill, open_chunk_pieces
from lineartime.baselines.sparse import Longformer, LongformerState
from lineartime.errors import ArgumentError
from lineartime.layers.attention import HeadOptions
from lineartime.layers.dense import Dense, factory
from lineartime.layers.residual import RMSNorm
from lineartime.ops.checks import check_positive
from lineartime.ops.modes import acc_dtype, without_autocast
from lineartime.ops.packing import Packing

FIRST_RATE = 1e-3
ORTHOGONALISED = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""The published coefficients of x <- a x + (b x x^T + c (x x^T)^2) x."""


def orthogonalised(x: Tensor) -> Tensor:
    """A matrix [..., f, f] with its singular values brought near 1, as Muon does (Newton and Schulz)."""
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in ORTHOGONALISED:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def net(weights: Tensor, x: Tensor) -> Tensor:
    """The network W0, W1, W2 = weights [..., 3, f, f] on rows of x: [..., L, f] -> [..., L, f]."""
    w0, w1, w2 = weights.unbind(-3)
    return (F.silu(x @ w0.mT) * (x @ w2.mT)) @ w1.mT


def descent(weights: Tensor, k: Tensor, v: Tensor, rates: Tensor) -> Tensor:
    """The weighted gradients of sum net(W, k).v, [..., 3, f, f]: keys and values [..., C, f], rates [..., C, 3]."""
    w0, w1, w2 = weights.unbind(-3)
    gate, value = k @ w0.mT, k @ w2.mT
    sigma, hidden = gate.sigmoid(), v @ w1
    of_gate = hidden * value * sigma * (1 + gate * (1 - sigma))
    r0, r1, r2 = rates.split(1, -1)
    return torch.stack([of_gate.mT @ (r0 * k), v.mT @ (r1 * F.silu(gate) * value), (hidden * F.silu(gate)).mT @ (r2 * k)], -3)


@dataclass(eq=False)
class LaCTState(StreamState):
    """The state of causal streams, which stops growing after a window.

    Attributes:
        near: the state of the window attention.
        weights, momentum: [B, F, 3, f, f], the weights of the networks, and their last changes before they are orthogonalised.
        open_chunk: [B, F, C, 2 f + 4], keys, values, rates and m of the open chunk.
    """

    near: LongformerState
    weights: Tensor
    momentum: Tensor
    open_chunk: Tensor


class LaCT(Longformer):
    """LaCT: a window, and networks that are trained on every chunk at test time.

    Args:
        chunk_size: C, the number of tokens after which the networks are trained, and the width of the window.
        n_nets: F, the number of networks, which must divide d.
        **options: the options of `MultiHeadMixer`; causal is True, and False raises an error.
    """

    name = "lact"
    why_only_causal = "its networks learn from the tokens before"

    def __init__(self, d_model: int, *, chunk_size: int = 256, n_nets: int = 4, **options: Unpack[HeadOptions]) -> None:
        check_positive(d_model=d_model, chunk_size=chunk_size)
        options.setdefault("causal", True)
        super().__init__(d_model, window=chunk_size, n_global=0, **options)
        check_positive(n_nets=n_nets)
        if d_model % n_nets:
            raise ArgumentError("n_nets", f"is {n_nets}, but must divide d_model = {d_model}.")
        self.chunk_size, self.n_nets, made = chunk_size, n_nets, factory(options)
        width = d_model // n_nets
        self.weights = nn.Parameter(torch.empty(n_nets, 3, width, width, **made))
        self.scales, self.offsets = (nn.Parameter(torch.empty(2, d_model, **made)) for _ in range(2))
        self.to_rates = Dense(d_model, 5 * n_nets, **made)  # three rates, m and the scale of the output
        self.net_norm = RMSNorm(width, **made)
        self.init_own()

    def init_own(self) -> None:
        """Draw the networks as linear layers with outputs of the size of their inputs."""
        nn.init.normal_(self.weights, std=self.weights.shape[-1] ** -0.5)
        nn.init.ones_(self.scales)
        nn.init.zeros_(self.offsets)

    def split_maps(self, normed: Tensor) -> tuple[Sequence[Tensor], Tensor, Tensor]:
        """Queries, keys and values of the attention, [N, d]; those of the networks with their rates; and their scales."""
        q, k, v = self.to_qkv(normed).chunk(3, -1)
        fast_q, fast_k = (
            F.normalize(F.silu(x * scale + offset).unflatten(-1, (self.n_nets, -1)), dim=-1, eps=1e-5)
            for x, scale, offset in zip((q, k), self.scales, self.offsets, strict=True)
        )
        rates, momentum, scale = self.to_rates(normed).unflatten(-1, (self.n_nets, 5)).split([3, 1, 1], -1)
        rates = F.softplus(rates + math.log(math.expm1(FIRST_RATE)))
        fast = torch.cat([fast_q, fast_k, F.silu(v).unflatten(-1, (self.n_nets, -1)), rates, momentum.sigmoid()], -1)
        return (q, k, v), fast, F.silu(scale)

    def learn(self, weights: Tensor, momentum: Tensor, chunk: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and the momentum [..., F, 3, f, f] after a chunk of keys, values, rates and m, [..., F, C, 2 f + 4]."""
        width = weights.shape[-1]
        k, v, rates, kept = chunk.split([width, width, 3, 1], -1)
        momentum = descent(weights, k, v, rates) + kept.mean(-2, keepdim=True)[..., None] * momentum
        lengths = self.weights.to(weights.dtype).norm(dim=-1, keepdim=True)
        changed = weights + orthogonalised(momentum)
        return changed / (changed.norm(dim=-1, keepdim=True) + 1e-5) * lengths, momentum

    def begin(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """The weights, the momentum and the open chunk before the first token."""
        weights = self.weights.to(acc_dtype(self.weights)).expand(rows, *self.weights.shape)
        chunk = weights.new_zeros(rows, self.n_nets, self.chunk_size, 2 * weights.shape[-1] + 4)
        return weights, torch.zeros_like(weights), chunk

    def read_fast(self, x: Tensor, position: int, state: LaCTState | None) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The networks over rows that begin at a position, [R, F, L, 3 f + 4] -> [R, F, L, f], and the new state of streams."""
        width, dtype, outputs = self.weights.shape[-1], acc_dtype(self.weights), []
        weights, momentum, chunk = self.begin(len(x)) if state is None else (state.weights, state.momentum, state.open_chunk)
        for new, first, last in open_chunk_pieces(position, x.shape[2], self.chunk_size):
            outputs.append(net(weights, x[:, :, new, :width].to(dtype)))
            if state is None and new.stop == x.shape[2]:
                break  # nobody reads what is learnt of the last chunk
            chunk = fill(chunk, first, x[:, :, new, width:])
            if last == self.chunk_size:
                weights, momentum = self.learn(weights, momentum, chunk)
        return torch.cat(outputs, 2) if outputs else x[..., :width], (weights, momentum, chunk)

    def read(self, x: Tensor, packing: Packing, state: Any = None) -> tuple[Tensor, Any]:
        maps, fast, scale = self.split_maps(x)
        q, k, v = (each.unflatten(1, (self.n_heads, -1)) for each in maps)
        near, of_window = self.attend_heads((*self.rotate(q, k, packing), v), packing, None if state is None else state.near)
        outputs: list[Tensor] = []
        learnt: tuple[Tensor, ...] = ()
        with without_autocast(x):
            for grid, own in packing.by_grid(None, True, fast):
                out, learnt = self.read_fast(grid.queries(own).transpose(1, 2), packing.common_start or 0, state)
                outputs.append(grid.tokens(out.transpose(1, 2)))
        normed = self.net_norm(torch.cat(outputs))
        added = self.combine(x, near + (scale * normed).flatten(1).to(near.dtype))
        return added, None if state is None else LaCTState(state.position + packing.new, of_window, *learnt)

    def init_own_state(self, batch_size: int) -> Any:
        weights, momentum, chunk = self.begin(batch_size)
        near = super().init_own_state(batch_size)
        return LaCTState(self.first_position(batch_size), near, weights.clone(), momentum, chunk)
