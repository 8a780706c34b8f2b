"""Batches of tokens: windows of a stream, as inputs and targets of a causal or a masked language model.

Shapes: B batch, T tokens of context, D documents. A window holds T + 1 tokens, so that each of the first T has a next token to
predict. `keys` are a seed of random numbers for each window, so that a window does not depend on those beside it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.choices import Task
from lineartime.data.shards import unmarked
from lineartime.data.tokenizers import Tokenizer
from lineartime.data.tokens import TokenStream
from lineartime.errors import ArgumentError
from lineartime.ops.cross_entropy import IGNORED

Keys = Sequence[tuple[int, ...]]


class Batch(NamedTuple):
    """Token ids and the targets to predict from them (`IGNORED` where there is none)."""

    inputs: Tensor  # int64 [B, T]; [1, B * T] if documents are packed
    targets: Tensor  # int64, of the same shape
    cu_seqlens: Tensor | None = None  # int32 [D + 1], the boundaries of packed documents
    prefix_lengths: Tensor | None = None  # int64 [B], or [D] for packed documents: the tokens that are read bidirectionally

    def lengths(self) -> Tensor:
        """The number of tokens in each row, or in each packed document: int64 [B] or [D]."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens.diff().long()
        return torch.full(self.inputs.shape[:1], self.inputs.shape[1], device=self.inputs.device)

    def places(self) -> Tensor:
        """The number of tokens before each token in its row or document: int64 [B * T], in the order of the inputs."""
        lengths = self.lengths()
        starts = lengths.cumsum(0) - lengths
        return torch.arange(self.inputs.numel(), device=lengths.device) - starts.repeat_interleave(lengths)


def row_frame(task: Task, tokenizer: Tokenizer, packed: bool = False) -> tuple[int, int] | None:
    """[CLS] and [SEP], around each row of a masked language model whose tokenizer has them; None for packed and other rows."""
    return tokenizer.frame if task == "mlm" and not packed else None


def text_length(context_length: int, task: Task, tokenizer: Tokenizer, packed: bool = False) -> int:
    """The tokens of text in a row of `context_length`, without its frame. Raises ArgumentError if none is left."""
    if row_frame(task, tokenizer, packed) is None:
        return context_length
    if context_length < 3:
        raise ArgumentError("context_length", f"is {context_length}, but must be at least 3: [CLS], a token and [SEP].")
    return context_length - 2


def spread_windows(stream: TokenStream, count: int, context_length: int) -> list[int]:
    """The starts of `count` evenly spaced windows, or of all non-overlapping windows if there are fewer."""
    available = max(1, (len(stream) - 1) // context_length)
    count = min(count, available)
    return [index * available // count * context_length for index in range(count)]


def read_window(stream: TokenStream, start: int, length: int) -> Tensor:
    """Read at most `length` tokens from `start`, as int64; ~x is x, and the end of a document by the file of shards."""
    return torch.from_numpy(stream.tokens[start : start + length].astype(np.int64))


def causal_batch(windows: Tensor) -> Batch:
    """Make a batch in which the target of every token is the next one: windows [B, T + 1] -> [B, T]."""
    return Batch(windows[:, :-1], windows[:, 1:])


def masked_batch(windows: Tensor, tokenizer: Tokenizer, keys: Keys, frame: tuple[int, int] | None = None) -> Batch:
    """Make a batch for BERT's task (arXiv 1810.04805), with 15% of the tokens as targets: windows [B, T + 1] -> [B, T].

    Of the selected tokens, 80% are masked, 10% are replaced by random tokens and 10% are unchanged. Ends of documents and
    masks are never selected. The last token of each window is left out, so that both tasks read the same number of tokens.
    With a frame, its tokens are before and after these: [B, T + 2].
    """
    ids = windows[:, :-1]
    if frame is not None:
        ids = F.pad(F.pad(ids, (1, 0), value=frame[0]), (0, 1), value=frame[1])
    draws = [np.random.default_rng(key) for key in keys]
    chance = torch.from_numpy(np.stack([random.random((2, ids.shape[1])) for random in draws]))
    other = torch.from_numpy(np.stack([random.integers(0, tokenizer.vocab_size, ids.shape[1]) for random in draws]))
    special = torch.tensor([tokenizer.end_of_document, tokenizer.mask, *(frame or ())], device=ids.device)
    selected = (chance[:, 0] < 0.15) & ~torch.isin(ids, special)
    fate = chance[:, 1]
    inputs = torch.where(selected & (fate < 0.8), tokenizer.mask, ids)
    inputs = torch.where(selected & (fate >= 0.8) & (fate < 0.9), other, inputs)
    return Batch(inputs, torch.where(selected, ids, IGNORED))


def packed_batch(batch: Batch, ends: Tensor) -> Batch:
    """Join the rows of a batch [B, T] into one, [1, B * T], and mark the boundaries of its documents.

    A document starts at the beginning of a row and after each token that is marked as the end of one, bool [B, T], which
    therefore has no target.
    """
    targets = torch.where(ends, IGNORED, batch.targets)
    last = ends.clone()
    last[:, -1] = True
    boundaries = last.flatten().nonzero().flatten() + 1
    cu_seqlens = torch.cat([boundaries.new_zeros(1), boundaries]).to(torch.int32)
    return Batch(batch.inputs.reshape(1, -1), targets.reshape(1, -1), cu_seqlens)


def prefix_batch(batch: Batch, prefix_lengths: Tensor) -> Batch:
    """Add a prefix of the given length, int64 [B] or [D], to each row or packed document of a batch.

    The last token of a prefix and all tokens after it keep their targets. Earlier tokens lose theirs, because they have
    already read the next token.
    """
    hidden = (batch.places() < (prefix_lengths - 1).repeat_interleave(batch.lengths())).view(batch.inputs.shape)
    return batch._replace(targets=batch.targets.masked_fill(hidden, IGNORED), prefix_lengths=prefix_lengths)


def draw_prefix_lengths(batch: Batch, keys: Keys) -> Tensor:
    """Draw a prefix length for each row or packed document of n tokens, uniform over 0 to n - 1, so that a target is left."""
    lengths = batch.lengths()
    starts = lengths.cumsum(0) - lengths
    # Draw a number for every token, so that the length of a document depends only on its window.
    tokens = batch.inputs.numel() // len(keys)
    chance = torch.from_numpy(np.stack([np.random.default_rng(key).random(tokens) for key in keys])).flatten()
    return (chance[starts] * lengths).long()


def make_batch(
    task: Task, windows: Tensor, tokenizer: Tokenizer, masks: Keys, prefixes: Keys | None = None, packed: bool = False
) -> Batch:
    """Make the batch of a task from windows, int64 [B, T + 1], that a tokenizer encoded.

    "mlm" draws its masks by the keys `masks`, and has rows with a frame; "prefix-lm" draws prefixes by the keys `prefixes`, and
    without them, half of each row is its prefix. If `packed`, documents are kept apart.
    """
    ends = (windows[:, :-1] < 0) | (windows[:, :-1] == tokenizer.end_of_document)
    frame, windows = row_frame(task, tokenizer, packed), unmarked(windows)
    batch = masked_batch(windows, tokenizer, masks, frame) if task == "mlm" else causal_batch(windows)
    if packed:
        batch = packed_batch(batch, ends)
    if task == "prefix-lm":
        return prefix_batch(batch, batch.lengths() // 2 if prefixes is None else draw_prefix_lengths(batch, prefixes))
    return batch


def evaluation_batch(
    task: Task, windows: Tensor, tokenizer: Tokenizer, numbers: Sequence[int], *, packed: bool = False
) -> Batch:
    """Make a batch for evaluation: half of each row is its prefix, and masks depend only on the number of a window."""
    return make_batch(task, windows, tokenizer, [(0, number) for number in numbers], packed=packed)
