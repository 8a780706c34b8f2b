"""What baselines share: their states, and what cuts a row into blocks, or lets a token attend to only some of the others.

Shapes: B streams, R rows, L tokens of a row, H heads, S block size, G blocks, C chunk size, Q queries, K keys, h head width;
tensors of the functions may have other leading dimensions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from lineartime.layers.attention import HeadOptions, MultiHeadMixer
from lineartime.ops.checks import check_positive
from lineartime.ops.modes import acc_dtype
from lineartime.ops.state import State


@dataclass(eq=False)
class StreamState(State):
    """The state of causal streams; `position`, int64 [B], is the number of tokens that each has read."""

    position: Tensor


def scaled_products(q: Tensor, k: Tensor) -> Tensor:
    """The scores q.k / sqrt(h), [..., Q, h] and [..., K, h] -> [..., Q, K], in float32 or better."""
    scores: Tensor = (q @ k.mT).to(acc_dtype(q)) * q.shape[-1] ** -0.5
    return scores


def masked_products(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """`scaled_products`, with the lowest finite score where a key is not visible: a softmax over no keys stays finite."""
    scores = scaled_products(q, k)
    return scores.masked_fill(~visible, torch.finfo(scores.dtype).min)


def cut_blocks(x: Tensor, size: int) -> Tensor:
    """[..., L, f] -> [..., G, S, f], padded with zeros; at least one block."""
    length = x.shape[-2]
    blocks = max(1, -(-length // size))
    cut: Tensor = F.pad(x, (0, 0, 0, blocks * size - length)).unflatten(-2, (blocks, size))
    return cut


def exclusive_cumsum(x: Tensor, dim: int) -> Tensor:
    """The cumulative sum along `dim` that excludes the current element."""
    shape = list(x.shape)
    shape[dim] = 1
    # Sizes of n - 1 would be compiled once for n = 2, and again for other n.
    return torch.cat([x.new_zeros(shape), x], dim).narrow(dim, 0, x.shape[dim]).cumsum(dim)


def open_chunk_pieces(position: int, new: int, chunk_size: int) -> Iterator[tuple[slice, int, int]]:
    """Cut new tokens where a chunk fills up: yield the tokens, and where they begin and end in the open chunk."""
    start = 0
    while start < new:
        first = (position + start) % chunk_size
        last = min(chunk_size, first + new - start)
        yield slice(start, start + last - first), first, last
        start += last - first


def fill(rows: Tensor, first: int, x: Tensor) -> Tensor:
    """An open chunk's rows [..., C, f] with x [..., n, f] from `first` on, in a copy, or x itself if it fills the chunk."""
    if x.shape[-2] == rows.shape[-2]:
        return x.to(rows.dtype)
    return torch.cat([rows[..., :first, :], x.to(rows.dtype), rows[..., first + x.shape[-2] :, :]], -2)


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


def joint_softmax(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Attend with one softmax over several sets of keys: pairs of scores [..., Q, K], values [..., K, h] -> [..., Q, h]."""
    scores, values = zip(*parts, strict=True)
    weights = torch.cat(scores, -1).softmax(-1).to(values[0].dtype)
    read = weights.split([part.shape[-1] for part in scores], -1)
    out: Tensor = sum(part @ value for part, value in zip(read, values, strict=True))
    return out


class ChunkedHeadOptions(HeadOptions, total=False):
    """What every multi-head attention by chunks takes: see `ChunkedHeads`."""

    chunk_size: int


class ChunkedHeads(MultiHeadMixer):
    """Multi-head attention by chunks, around an `attend` that a subclass supplies: [B, T, d] -> [B, T, d].

    Args:
        chunk_size: C; the length of the input need not be a multiple of it.
        **options: the options of `MultiHeadMixer`.
    """

    def __init__(self, d_model: int, *, chunk_size: int = 256, **options: Unpack[HeadOptions]) -> None:
        super().__init__(d_model, **options)
        check_positive(chunk_size=chunk_size)
        self.chunk_size = chunk_size

    def empty_chunk(self, batch_size: int) -> Tensor:
        """Keys or values of an open chunk without tokens, [B, H, C, h]."""
        none = self.empty_cache(batch_size, acc_dtype(self.any_parameter))
        return none.new_zeros(batch_size, self.n_heads, self.chunk_size, self.head_dim)
