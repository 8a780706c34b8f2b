"""Batches of tokens: windows of a stream, made into what a causal or a masked language model learns from.

Shapes: B batch, T tokens of context. A window holds T + 1 tokens, so that each of the first T has a successor to foretell.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lineartime.data.tokenizers import Tokenizer
from lineartime.data.tokens import TokenStream
from lineartime.errors import LineartimeError
from lineartime.ops.cross_entropy import IGNORED


class Batch(NamedTuple):
    """Token ids and, of the same shape, what is to be foretold at each position (`IGNORED`: nothing).

    Attributes:
        inputs: int64 [B, T]; [1, B * T] if documents are packed.
        targets: int64, of the same shape.
        cu_seqlens: int32 [D + 1], the boundaries of packed documents; None if nothing is packed.
    """

    inputs: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None = None


def check_long_enough(stream: TokenStream, context_length: int) -> None:
    """Raise LineartimeError unless the stream holds one whole window."""
    if len(stream) < context_length + 1:
        raise LineartimeError(
            f"{stream.name[0].upper()}{stream.name[1:]} has {len(stream)} tokens, fewer than one context and its successor "
            f"({context_length + 1}): give more text with --data, or a smaller --context-length."
        )


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


def masked_batch(windows: Tensor, tokenizer: Tokenizer, keys: Sequence[tuple[int, ...]]) -> Batch:
    """BERT's task (arXiv 1810.04805): of 15% of the tokens, 80% are masked, 10% replaced at random and 10% left.

    Ends of documents and masks are never among them. The last token of each window is left out, so that both tasks read
    equally much.

    Args:
        windows: int64 [B, T + 1].
        tokenizer: the one that made the windows.
        keys: what the draws in each row depend on, and on nothing else.
    """
    ids = windows[:, :-1]
    draws = [np.random.default_rng(key) for key in keys]
    chance = torch.from_numpy(np.stack([random.random((2, ids.shape[1])) for random in draws]))
    other = torch.from_numpy(np.stack([random.integers(0, tokenizer.vocab_size, ids.shape[1]) for random in draws]))
    selected = (chance[:, 0] < 0.15) & (ids != tokenizer.end_of_document) & (ids != tokenizer.mask)
    fate = chance[:, 1]
    inputs = torch.where(selected & (fate < 0.8), tokenizer.mask, ids)
    inputs = torch.where(selected & (fate >= 0.8) & (fate < 0.9), other, inputs)
    return Batch(inputs, torch.where(selected, ids, IGNORED))


def packed_batch(batch: Batch, windows: Tensor, end_of_document: int) -> Batch:
    """Part the documents in a batch [B, T] from each other, and put its rows into one, [1, B * T].

    A document begins at the beginning of a row and after each end of document, which therefore foretells nothing.
    """
    ends = windows[:, :-1] == end_of_document
    targets = torch.where(ends, IGNORED, batch.targets)
    last = ends.clone()
    last[:, -1] = True
    boundaries = last.flatten().nonzero().flatten() + 1
    cu_seqlens = torch.cat([boundaries.new_zeros(1), boundaries]).to(torch.int32)
    return Batch(batch.inputs.reshape(1, -1), targets.reshape(1, -1), cu_seqlens)
