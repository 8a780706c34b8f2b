"""Batches of tokens: random windows to learn from, consecutive ones to measure on.

Shapes: B batch, T tokens of context. A window holds T + 1 tokens, so that each of the first T has a successor to foretell.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lineartime.data.tokenizers import Tokenizer
from lineartime.data.tokens import TokenStream
from lineartime.errors import LineartimeError
from lineartime.ops.cross_entropy import IGNORED


class Batch(NamedTuple):
    """Token ids [B, T] and, of the same shape, what is to be foretold at each position (`IGNORED`: nothing)."""

    inputs: Tensor
    targets: Tensor


def check_long_enough(stream: TokenStream, context_length: int) -> None:
    """Raise LineartimeError unless the stream holds one whole window."""
    if len(stream) < context_length + 1:
        raise LineartimeError(
            f"{stream.name[0].upper()}{stream.name[1:]} has {len(stream)} tokens, fewer than one context and its successor "
            f"({context_length + 1}): give more text with --data, or a smaller --context-length."
        )


def random_windows(stream: TokenStream, batch_size: int, context_length: int, key: tuple[int, ...]) -> Tensor:
    """Windows [B, T + 1] at random places, int64, which depend on nothing but the stream and the key (seed, step, ...)."""
    random = np.random.default_rng(key)
    starts = random.integers(0, len(stream) - context_length, batch_size)
    return torch.stack([read_window(stream, int(start), context_length + 1) for start in starts])


def spread_windows(stream: TokenStream, count: int, context_length: int) -> list[int]:
    """The starts of `count` windows at equal distances, or of all that do not overlap, if those are fewer."""
    available = max(1, (len(stream) - 1) // context_length)
    count = min(count, available)
    return [index * available // count * context_length for index in range(count)]


def read_window(stream: TokenStream, start: int, length: int) -> Tensor:
    """The tokens from `start` on, int64, at most `length` of them."""
    return torch.from_numpy(stream.tokens[start : start + length].astype(np.int64))


def causal_batch(windows: Tensor) -> Batch:
    """Every token foretells its successor: windows [B, T + 1] -> [B, T]."""
    return Batch(windows[:, :-1], windows[:, 1:])


def masked_batch(windows: Tensor, tokenizer: Tokenizer, key: tuple[int, ...]) -> Batch:
    """BERT's task (arXiv 1810.04805): of 15% of the tokens, 80% are masked, 10% replaced at random and 10% left.

    The last token of each window is left out, so that both tasks read equally much.
    """
    random = np.random.default_rng(key)
    ids = windows[:, :-1]
    selected = torch.from_numpy(random.random(ids.shape) < 0.15)
    fate = torch.from_numpy(random.random(ids.shape))
    other = torch.from_numpy(random.integers(0, tokenizer.vocab_size, ids.shape))
    inputs = torch.where(selected & (fate < 0.8), tokenizer.mask, ids)
    inputs = torch.where(selected & (fate >= 0.8) & (fate < 0.9), other, inputs)
    return Batch(inputs, torch.where(selected, ids, IGNORED))
