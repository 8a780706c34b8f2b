"""Helpers of the attentions with a sparse pattern: blocks of a row, and softmax over several sets of keys.

Shapes: L tokens of a row, S block size, G blocks, Q queries, K keys, h head width; tensors may have leading dimensions.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.baselines.scores import masked_products


def cut_blocks(x: Tensor, size: int) -> Tensor:
    """[..., L, f] -> [..., G, S, f], padded with zeros; at least one block."""
    length = x.shape[-2]
    blocks = max(1, -(-length // size))
    cut: Tensor = F.pad(x, (0, 0, 0, blocks * size - length)).unflatten(-2, (blocks, size))
    return cut


def real_tokens(x: Tensor, real: Tensor | None) -> Tensor:
    """Which tokens of x [..., L, f] are real: bool [R, L], or [1, L] if `real` is None, for no padding."""
    return torch.ones(1, x.shape[-2], dtype=torch.bool, device=x.device) if real is None else real


def join_blocks(x: Tensor, length: int) -> Tensor:
    """[..., G, S, f] -> [..., L, f]: the inverse of `cut_blocks`."""
    return x.flatten(-3, -2)[..., :length, :]


def with_neighbours(x: Tensor, causal: bool) -> Tensor:
    """Concatenate every block with its visible neighbours: [..., G, S, f] -> [..., G, 2 S or 3 S, f]."""
    before, after = F.pad(x, (0, 0, 0, 0, 1, -1)), F.pad(x, (0, 0, 0, 0, -1, 1))
    return torch.cat([before, x] if causal else [before, x, after], -2)


def visible_band(size: int, causal: bool, device: torch.device) -> Tensor:
    """Which keys of a block and its neighbours are closer than S and, if causal, not later: bool [S, 2 S or 3 S]."""
    offsets = torch.arange((2 if causal else 3) * size, device=device) - size
    distance = torch.arange(size, device=device)[:, None] - offsets
    return (distance < size) & (distance >= 0 if causal else distance > -size)


def joint_softmax(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Attend with one softmax over several sets of keys: pairs of scores [..., Q, K], values [..., K, h] -> [..., Q, h]."""
    scores, values = zip(*parts, strict=True)
    weights = torch.cat(scores, -1).softmax(-1).to(values[0].dtype)
    read = weights.split([part.shape[-1] for part in scores], -1)
    out: Tensor = sum(part @ value for part, value in zip(read, values, strict=True))
    return out


def with_global_queries(out: Tensor, q: Tensor, k: Tensor, v: Tensor, n_global: int, real: Tensor) -> Tensor:
    """Replace the outputs [R, H, L, h] of the first `n_global` tokens by their attention to all tokens of the row.

    `real`, bool [R or 1, L], is False for padding.
    """
    everything = masked_products(q[..., :n_global, :], k, real[:, None, None, :])
    return torch.cat([joint_softmax([(everything, v)]), out[..., n_global:, :]], -2)
