"""How well a language model foretells text: nats, bits per byte, perplexity of tokens and words, and where in the context.

Shapes: B batch, T tokens, V vocabulary.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime.data.batches import Batch, causal_batch, masked_batch, read_window
from lineartime.data.tokenizers import Tokenizer
from lineartime.data.tokens import TokenStream
from lineartime.errors import LineartimeError
from lineartime.models.heads import CausalLM, LanguageModel
from lineartime.ops.cross_entropy import IGNORED


@dataclass(frozen=True)
class Position:
    """The mean loss, in nats, of the `count` tokens that stand behind `first` to `last` tokens of a sequence."""

    first: int
    last: int
    loss: float
    count: int


@dataclass(frozen=True)
class Evaluation:
    """The result of evaluating a model on a stream of tokens.

    Attributes:
        context: how much context the tokens had, in words.
        loss: mean, in nats per token.
        tokens: how many tokens the mean is over.
        masked: whether only masked tokens were foretold.
        bits_per_byte: the whole loss in bits, over the bytes of the text; None for masked tokens.
        word_perplexity: exp of the whole loss over the words of the text, as white space parts them, so that it does not
            depend on the tokenizer; None for masked tokens, and for text with too few spaces in it.
        by_position: the loss by the number of tokens that stood before, in powers of two. The first of them is the token
            before the window, or an end of document. (A masked model reads both ways: there it is a place in the window.)
    """

    context: str
    loss: float
    tokens: int
    masked: bool
    bits_per_byte: float | None
    word_perplexity: float | None
    by_position: list[Position]

    @property
    def perplexity(self) -> float:
        """exp(loss): of one token, or of one masked token."""
        return math.exp(self.loss)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of each target in nats: logits [B, T, V], targets [B, T] -> float32 [B, T], zero where there is no target."""
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
    return losses.view(targets.shape)


def autocast(device: torch.device, bf16: bool) -> AbstractContextManager[None]:
    """The context in which a model computes matrix products in bf16, or the one in which it does not."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16)


def bits_per_byte(loss: float, tokens: int, n_bytes: int) -> float:
    """Nats per token, as bits over the bytes that the tokens encode."""
    return loss * tokens / max(1, n_bytes) / math.log(2)


def word_perplexity(loss: float, tokens: int, n_words: int) -> float | None:
    """The perplexity of a word of the text, from nats per token; None without words, or where no number is as large."""
    try:
        return math.exp(loss * tokens / n_words)
    except (OverflowError, ZeroDivisionError):
        return None


@torch.no_grad()
def windowed(
    model: LanguageModel,
    stream: TokenStream,
    tokenizer: Tokenizer,
    *,
    context_length: int,
    stride: int,
    batch_size: int,
    bf16: bool,
    max_tokens: int | None = None,
) -> Evaluation:
    """Evaluate on windows of `context_length` tokens, each of which starts anew, `stride` tokens after the one before.

    Every token is foretold once (by masked models, every one that is selected): of each window but the first, only the last
    `stride` tokens are counted.

    Raises:
        LineartimeError: for a stride outside 1 to context_length, or an empty stream.
    """
    if not 1 <= stride <= context_length:
        raise LineartimeError(f"--stride is {stride}, but must be from 1 to --context-length = {context_length}.")
    tokens = _length(stream, max_tokens)
    positions = _Positions()
    device = next(model.parameters()).device
    for windows, skip, starts in _windows(stream, tokenizer, tokens, context_length, stride, batch_size):
        batch = _batch(windows, tokenizer, model.config.task, starts)
        logits = _forward(model, batch.inputs.to(device), bf16)
        losses = token_losses(logits, batch.targets.to(device)).cpu()
        positions.add(losses[:, skip:], batch.targets[:, skip:] != IGNORED, skip)
    overlap = "not overlapping" if stride == context_length else f"one every {stride}, the last {stride} tokens of each counted"
    return positions.evaluation(
        f"windows of {context_length} tokens, {overlap}", stream, tokens, masked=model.config.task == "mlm"
    )


@torch.no_grad()
def carried(
    model: CausalLM, stream: TokenStream, tokenizer: Tokenizer, *, segment: int, bf16: bool, max_tokens: int | None = None
) -> Evaluation:
    """Evaluate on the stream as one sequence, read in segments, every token having all tokens before it as context.

    FLASH needs constant memory for this; models with quadratic attention keep all tokens.

    Raises:
        LineartimeError: for an empty stream, or one that is longer than the model can read.
    """
    tokens = _length(stream, max_tokens)
    positions = _Positions()
    device = next(model.parameters()).device
    state = model.init_state(1)
    for start in range(0, tokens, segment):
        batch = causal_batch(_read(stream, tokenizer, start, min(segment, tokens - start))[None])
        try:
            with autocast(device, bf16):
                logits, state = model.extend(batch.inputs.to(device), state)
        except ValueError as error:
            raise LineartimeError(f"{error} Or evaluate in windows: --context windowed.") from None
        losses = token_losses(logits, batch.targets.to(device)).cpu()
        positions.add(losses, torch.ones_like(losses, dtype=torch.bool), start)
    return positions.evaluation("carried from the first token of the split to the last", stream, tokens, masked=False)


def _forward(model: nn.Module, inputs: Tensor, bf16: bool) -> Tensor:
    try:
        with autocast(inputs.device, bf16):
            logits: Tensor = model(inputs)
    except ValueError as error:  # more tokens than the model has positions for
        raise LineartimeError(f"--context-length is {inputs.shape[1]}. {error}") from None
    return logits


def _length(stream: TokenStream, max_tokens: int | None) -> int:
    if len(stream) == 0:
        raise LineartimeError(f"{stream.name[0].upper()}{stream.name[1:]} is empty: give more text with --data.")
    return min(len(stream), max_tokens or len(stream))


def _batch(windows: Tensor, tokenizer: Tokenizer, task: str, starts: list[int]) -> Batch:
    """What is masked depends on where a window starts alone, so that results do not depend on the batch size."""
    return causal_batch(windows) if task == "clm" else masked_batch(windows, tokenizer, [(0, start) for start in starts])


def _read(stream: TokenStream, tokenizer: Tokenizer, start: int, length: int) -> Tensor:
    """`length` + 1 tokens, of which the last `length` begin at `start`: an end of document stands before the first of all."""
    if start > 0:
        return read_window(stream, start - 1, length + 1)
    return torch.cat([torch.tensor([tokenizer.end_of_document]), read_window(stream, 0, length)])


def _windows(
    stream: TokenStream, tokenizer: Tokenizer, tokens: int, context_length: int, stride: int, batch_size: int
) -> Iterator[tuple[Tensor, int, list[int]]]:
    """Batches of equally long windows, how many tokens at the beginning of each have been counted already, and their starts."""
    rows: list[Tensor] = []
    starts: list[int] = []
    counted = 0
    start = 0
    while counted < tokens:
        length = min(context_length, tokens - start)
        row, skip = _read(stream, tokenizer, start, length), counted - start
        if skip != context_length - stride or length < context_length:  # the first and the last window stand alone
            if rows:
                yield torch.stack(rows), context_length - stride, starts
            yield row[None], skip, [start]
            rows, starts = [], []
        else:
            rows.append(row)
            starts.append(start)
            if len(rows) == batch_size:
                yield torch.stack(rows), skip, starts
                rows, starts = [], []
        counted = start + length
        start += stride
    if rows:
        yield torch.stack(rows), context_length - stride, starts


class _Positions:
    """Sums of losses by the number of tokens before: 1, 2-3, 4-7, ..."""

    def __init__(self) -> None:
        self._sums = torch.zeros(64, dtype=torch.float64)
        self._counts = torch.zeros(64, dtype=torch.float64)
        self._longest = 0

    def add(self, losses: Tensor, counted: Tensor, first: int) -> None:
        """Add losses [B, T] of tokens behind first + 1, first + 2, ... others; `counted` says which have a target."""
        before = torch.arange(first + 1, first + 1 + losses.shape[1])
        bucket = before.double().log2().floor().long()
        self._longest = max(self._longest, first + losses.shape[1])
        self._sums.index_add_(0, bucket, losses.double().sum(0))
        self._counts.index_add_(0, bucket, counted.double().sum(0))

    def evaluation(self, context: str, stream: TokenStream, tokens: int, masked: bool) -> Evaluation:
        count = int(self._counts.sum())
        loss = float(self._sums.sum()) / max(1, count)
        by_position = []
        for power, n in enumerate(self._counts.tolist()):
            if n:
                last = min((2 << power) - 1, self._longest)
                by_position.append(Position(1 << power, last, float(self._sums[power] / n), int(n)))
        # Of a part of the stream, bytes and words are taken to be the same part of its bytes and words.
        n_bytes, n_words = (round(number * tokens / len(stream)) for number in (stream.n_bytes, stream.n_words))
        bits = per_word = None
        if not masked:
            bits = bits_per_byte(loss, count, n_bytes)
            per_word = word_perplexity(loss, count, n_words)
        return Evaluation(context, loss, count, masked, bits, per_word, by_position)
