"""How well a language model predicts text: nats per token, bits per byte, perplexity, and the loss by position in the context.

`evaluate` measures a model, or that of a run, on a split of a text.
Shapes: B batch or rows, T tokens, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.checkpoint import CheckpointChoice, has_training_state, load_with_tokenizer, read_training_state
from lineartime.choices import TEXT_COLUMN, Context, Precision, RawIds, Split
from lineartime.data import Tokenizer, TokenStream, describe_splits, evaluation_batch, load_corpus, no_text, token_stream
from lineartime.data.batches import causal_batch, read_window, row_frame, text_length
from lineartime.data.corpora import load_corpus_of_run
from lineartime.data.shards import unmarked
from lineartime.data.tokenizers import check_vocabulary
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.fields import Between, check_type
from lineartime.host import cache_folder
from lineartime.machine import autocast, choose_precision
from lineartime.models.language_model import CausalLM, LanguageModel, check_finite_logits, check_model
from lineartime.ops.cross_entropy import IGNORED
from lineartime.screen import Progress

__all__ = ["Evaluation", "PositionLoss", "difference", "evaluate", "evaluate_carried", "evaluate_windowed"]

_Size = Annotated[int, Between(1, 2**40)]
_SCANNED = 1 << 20
"""The number of tokens among which ends of documents are looked for at once."""
_LOGITS = 1 << 24
"""The number of logits in memory at once."""

_NO_SAMPLES = partial(torch.zeros, 0, 2, dtype=torch.float64, device="cpu")


@dataclass(frozen=True)
class PositionLoss:
    """The mean loss, in nats, of the `count` tokens that have from `first` to `last` tokens before them.

    `error` is its standard error: see `mean_over_rows`.
    """

    first: int
    last: int
    loss: float
    count: int
    error: float | None = None


class Mean(NamedTuple):
    """A mean of losses, its standard error, and the number of tokens."""

    loss: float
    error: float | None
    tokens: int


def mean_over_rows(samples: Tensor) -> Mean | None:
    """The mean loss of rows of n_i tokens whose losses sum to s_i: float64 [rows, 2] of s_i and n_i. None without any tokens.

    The losses of a row depend on each other, because its tokens share a topic. Therefore rows are the samples, and not tokens:
    the variance of a ratio of sums is sum (s_i - m n_i)^2 / n^2 * rows / (rows - 1), with m = s / n. A single row has none,
    nor have rows that are worth fewer than two of equal length, by n^2 / sum n_i^2 (Kish): one holds nearly all tokens.

    Source: Cochran, "Sampling Techniques" (1977), section 6.3, and 9A for clusters of unequal sizes.
    """
    losses, tokens = samples[samples[:, 1] > 0].unbind(1)
    rows, n = len(tokens), float(tokens.sum())
    if not rows:
        return None
    mean = losses.sum() / n
    squares = (losses - mean * tokens).square().sum()
    several = n * n >= 1.999 * float(tokens.square().sum())
    return Mean(float(mean), float((squares * rows / (rows - 1)).sqrt()) / n if several else None, int(n))


class PositionSums:
    """Sums of losses, row by row, by the number of preceding tokens: 1, 2-3, 4-7, ..."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []  # float64 [B, 2, ranges]: the sum of the losses in each range, and its tokens
        self._longest = 0

    def add(self, losses: Tensor, counted: Tensor, before: Tensor) -> None:
        """Add losses [B, T] of tokens with so many preceding tokens, [B, T]; `counted` marks those with a target."""
        self._longest = max(self._longest, int(before.max()))
        place = before.double().log2().floor().long()
        numbers = torch.stack([losses.double() * counted, counted.double()], 1)
        empty = torch.zeros(len(losses), 2, int(place.max()) + 1, dtype=torch.float64, device=losses.device)
        self._sums.append(empty.scatter_add(2, place[:, None].expand_as(numbers), numbers))

    def samples(self) -> Tensor:
        """The sum of the losses and the number of tokens of each row, in the order of `add`: float64 [rows, 2]."""
        return torch.cat([sums.sum(2) for sums in self._sums])

    def by_position(self) -> Iterator[PositionLoss]:
        """The mean loss from each power of two to the next.

        If the largest number of preceding tokens is a power of two, it belongs to the range before it: alone, its few tokens
        would be noise.
        """
        widest = max(sums.shape[2] for sums in self._sums)
        sums = torch.cat([F.pad(each, (0, widest - each.shape[2])) for each in self._sums])
        last = max(0, (self._longest - 1).bit_length() - 1)
        for place in range(last + 1):
            columns = slice(place, None if place == last else place + 1)
            if mean := mean_over_rows(sums[:, :, columns].sum(2)):
                end = self._longest if place == last else (2 << place) - 1
                yield PositionLoss(1 << place, end, mean.loss, mean.tokens, mean.error)


@dataclass(frozen=True)
class Evaluation:
    """The result of evaluating a model on a stream of tokens.

    Attributes:
        text: a description of the text.
        context: a description of the context that the tokens had.
        loss: the mean over the tokens, in nats.
        tokens: the number of tokens in the mean.
        masked: whether the model predicted masked tokens only.
        bits_per_byte: the total loss in bits, divided by the bytes of the predicted text; None for masked tokens and ids alone.
        word_perplexity: exp of the total loss divided by the number of words (separated by white space), which does not depend
            on the tokenizer; None for masked tokens, and for text with too few words.
        by_position: the loss by the number of preceding tokens, from each power of two to the next, the first of which precedes
            the window. For a masked model, which reads in both directions, the loss by position in the window.
        loss_error: the standard error of the loss, with windows, documents, or pieces of the carried context, as samples; None
            for one. `lineartime.evaluation.difference` tells far more precisely how two models differ.
        samples: float64 [samples, 2], the sum of the losses of each of these samples, and its tokens.
        digest: a string that differs between streams of different tokens; empty for a stream in memory.
        checkpoint: the checkpoint of the model; None for a model in memory. It is ignored when results are compared.
    """

    text: str
    context: str
    loss: float
    tokens: int
    masked: bool
    bits_per_byte: float | None
    word_perplexity: float | None
    by_position: list[PositionLoss]
    loss_error: float | None = None
    samples: Tensor = field(default_factory=_NO_SAMPLES, repr=False, compare=False)
    digest: str = field(default="", repr=False, compare=False)
    checkpoint: Path | None = field(default=None, compare=False)

    @property
    def perplexity(self) -> float:
        """exp(loss): the perplexity per token, or per masked token; infinite if it is too large for a float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values, without `samples`."""
        plain = asdict(replace(self, samples=_NO_SAMPLES()))
        del plain["samples"]
        return {**plain, "checkpoint": None if self.checkpoint is None else str(self.checkpoint)}


def difference(first: Evaluation, second: Evaluation) -> Mean:
    """How far the mean loss of a second evaluation is above that of a first one, in nats, with its standard error.

    They are compared window by window, or piece by piece of the carried context: what makes a window hard for both models does
    not count. That the tokens of streams in memory are the same is for the caller to know.

    Raises:
        ArgumentError: if they are not of the same tokens in the same windows, because the text, the tokenizer, the context or
            the task differs.
    """
    for what, attribute in {"text or tokenizer": "digest", "task": "masked", "context": "context"}.items():
        if getattr(first, attribute) != getattr(second, attribute):
            raise ArgumentError("second", f"is an evaluation with another {what}: the two must read the same tokens.")
    if not torch.equal(first.samples[:, 1], second.samples[:, 1]):
        raise ArgumentError("second", "predicts other tokens than the first: the two must read the same tokens.")
    mean = mean_over_rows(torch.stack([second.samples[:, 0] - first.samples[:, 0], first.samples[:, 1]], 1))
    assert mean is not None  # an evaluation has predicted tokens
    return mean


def token_losses(model: LanguageModel, hidden: Tensor, targets: Tensor) -> Tensor:
    """The loss of each target in nats: hidden vectors [B, T, d], targets [B, T] -> float32 [B, T], zero without a target.

    The logits of all tokens, which can take far more memory than the rest of a model, are never held at once.
    """
    at_once = max(1, _LOGITS // model.config.vocab_size)
    pieces = zip(hidden.flatten(0, 1).split(at_once), targets.flatten().split(at_once), strict=True)
    losses = [
        F.cross_entropy(model.logits(piece).float(), expected, reduction="none", ignore_index=IGNORED)
        for piece, expected in pieces
    ]
    return torch.cat(losses).view(targets.shape)


def bits_per_byte(loss: float, tokens: int, n_bytes: int) -> float | None:
    """Convert a loss in nats per token to bits per byte of the text that the tokens encode; None if only ids are known."""
    return None if not n_bytes else loss * tokens / n_bytes / math.log(2)


@torch.no_grad()
def evaluate_windowed(
    model: LanguageModel,
    stream: TokenStream,
    tokenizer: Tokenizer,
    *,
    context_length: int,
    stride: int,
    batch_size: int,
    bf16: bool,
    packed: bool = False,
    max_tokens: int | None = None,
) -> Evaluation:
    """Evaluate on independent windows of `context_length` tokens, each `stride` tokens after the previous one.

    The model predicts every token once (a masked model: every selected token). In each window but the first, only the last
    `stride` tokens count. A model of task "prefix-lm" reads the first half of each window as its prefix, and only predictions
    after the prefix count. If the stride is at most half a window, these are all tokens after the first half window.
    With `packed`, no token reads another document, and the first token of a document is not predicted.

    Raises:
        LineartimeError: for a stride outside 1 to context_length, a context that the model cannot read, an empty stream, or
            logits that are not finite.
    """
    if not 1 <= stride <= context_length:
        raise ArgumentError("stride", f"is {stride}, but must be from 1 to `context_length={context_length!r}`.")
    if len(stream) == 0:
        raise no_text(stream.name)
    tokens = min(len(stream), max_tokens or len(stream))
    sums, task, longest = PositionSums(), model.config.task, model.config.longest_sequence
    length = text_length(context_length, task, tokenizer, packed)
    beside = int(row_frame(task, tokenizer, packed) is not None)  # tokens of a frame before the text, and after it
    if longest is not None and min(context_length, tokens + 2 * beside) > longest:
        raise ArgumentError("context_length", f"is {context_length}, but this model reads at most {longest} tokens.")
    device = next(model.parameters()).device
    with Progress(f"measuring {stream.name}", total=tokens) as progress:
        for windows, skip, starts in _batches(stream, tokenizer, tokens, length, min(stride, length), batch_size):
            batch = evaluation_batch(task, windows, tokenizer, starts, packed=packed)
            cu_seqlens, prefix = batch.cu_seqlens, None if batch.prefix_lengths is None else batch.prefix_lengths.to(device)
            with autocast(device, bf16):
                hidden = model.backbone(batch.inputs.to(device), cu_seqlens=cu_seqlens, prefix_lengths=prefix)
                losses = token_losses(model, hidden, batch.targets.to(device)).view(len(windows), -1).cpu()
            counted = batch.targets.view(len(windows), -1) != IGNORED
            before = 1 + batch.places().view(len(windows), -1)
            text = slice(beside + skip, losses.shape[1] - beside)
            sums.add(losses[:, text], counted[:, text], before[:, text])
            progress.advance(losses[:, text].numel())
    overlap = "not overlapping" if stride == context_length else f"one every {stride}, the last {stride} tokens of each counted"
    context = f"windows of {context_length} tokens, {overlap}"
    if task == "prefix-lm":
        part = "document" if packed else "window"
        context += f"; the first half of each {part} is its prefix, read in both directions, and not counted"
    if packed:
        context += "; no document reads another"
    return _evaluation(sums, context, stream, masked=task == "mlm")


@torch.no_grad()
def evaluate_carried(
    model: CausalLM,
    stream: TokenStream,
    tokenizer: Tokenizer,
    *,
    segment: int,
    bf16: bool,
    documents: bool = False,
    max_tokens: int | None = None,
) -> Evaluation:
    """Evaluate on the stream as one sequence, `segment` tokens at a time: every token has all tokens before it as context.

    With `documents`, each document is a sequence of its own, and a sample of the standard errors. FLASH needs constant memory
    for this; models with quadratic attention keep all tokens.

    Raises:
        LineartimeError: for an empty stream, or one that is longer than the model can read, or logits that are not finite.
    """
    if len(stream) == 0:
        raise no_text(stream.name)
    tokens = min(len(stream), max_tokens or len(stream))
    spans = list(_documents(stream, tokenizer, tokens)) if documents else [(0, tokens)]
    longest, most = model.config.longest_sequence, max(end - begin for begin, end in spans)
    if longest is not None and most > longest:
        raise LineartimeError(
            f"There are {most} tokens in {'a document of ' if documents else ''}{stream.name}, but this model reads at most "
            f"{longest} in one sequence: evaluate in windows."
        )
    sums = PositionSums()
    device = next(model.parameters()).device
    with Progress(f"measuring {stream.name}", total=tokens) as progress:
        for begin, end in spans:
            state, pieces = model.init_state(1), []
            for start in range(begin, end, segment):
                batch = causal_batch(unmarked(_read(stream, tokenizer, start, min(segment, end - start))[None]))
                with autocast(device, bf16):
                    hidden, state = model.backbone.extend(batch.inputs.to(device), state)
                    pieces.append(token_losses(model, hidden, batch.targets.to(device)).cpu())
                progress.advance(pieces[-1].numel())
                if not documents or start + segment >= end:
                    losses, last = torch.cat(pieces, 1), min(start + segment, end) - begin
                    before = torch.arange(last + 1 - losses.shape[1], last + 1, device=losses.device)[None]
                    sums.add(losses, torch.ones_like(losses, dtype=torch.bool), before)
                    pieces = []
    what = "documents, each from its first token" if documents else "carried from the first token of the split"
    context = f"{what} to the last, {segment} tokens read at a time"
    return _evaluation(sums, context, stream)


def _read(stream: TokenStream, tokenizer: Tokenizer, start: int, length: int) -> Tensor:
    """The `length` tokens from `start`, preceded by the token before them, or by an end of document at the very start."""
    if start > 0:
        return read_window(stream, start - 1, length + 1)
    return torch.cat([torch.tensor([tokenizer.end_of_document], device="cpu"), read_window(stream, 0, length)])


def _documents(stream: TokenStream, tokenizer: Tokenizer, tokens: int) -> Iterator[tuple[int, int]]:
    """The first place and the place after the last of each document of the first `tokens`, with its end-of-document token."""
    begin = 0
    for start in range(0, tokens, _SCANNED):
        read = read_window(stream, start, min(_SCANNED, tokens - start))
        ends = (read < 0) | (read == tokenizer.end_of_document)
        for end in (ends.nonzero()[:, 0] + start + 1).tolist():
            yield begin, end
            begin = end
    if begin < tokens:
        yield begin, tokens


def _batches(
    stream: TokenStream, tokenizer: Tokenizer, tokens: int, context_length: int, stride: int, batch_size: int
) -> Iterator[tuple[Tensor, int, list[int]]]:
    """Yield batches of equally long windows, the number of their first tokens that were counted before, and their starts."""
    overlap = context_length - stride

    def shape(start: int) -> tuple[int, int]:
        return overlap if start else 0, min(context_length, tokens - start)

    # The first window has no overlap and the last one may be short: they have their own batches.
    for (skip, length), group in groupby(range(0, max(1, tokens - overlap), stride), shape):
        while starts := list(islice(group, batch_size)):
            yield torch.stack([_read(stream, tokenizer, start, length) for start in starts]), skip, starts


def _evaluation(sums: PositionSums, context: str, stream: TokenStream, masked: bool = False) -> Evaluation:
    """The result, from the sums of the losses. Raises LineartimeError if no token was predicted, or a loss is not finite."""
    samples = sums.samples()
    mean = mean_over_rows(samples)
    if mean is None:
        found = f"The model predicts no token of {stream.name}, so there is no loss"
        raise LineartimeError(f"{found}: give more text, or more `max_tokens`.")
    loss, error, count = mean
    check_finite_logits(math.isfinite(loss))
    # The measured part of the stream is assumed to have a proportional share of its bytes and words.
    n_bytes, n_words = (round(number * count / len(stream)) for number in (stream.n_bytes, stream.n_words))
    per_word = None
    if not masked:
        with suppress(OverflowError, ZeroDivisionError):  # too large for a float, or no words
            per_word = math.exp(loss * count / n_words)
    return Evaluation(
        stream.name,
        context,
        loss,
        count,
        masked,
        bits_per_byte=None if masked else bits_per_byte(loss, count, n_bytes),
        word_perplexity=per_word,
        by_position=list(sums.by_position()),
        loss_error=error,
        samples=samples,
        digest=stream.digest,
    )


def evaluate(
    model: LanguageModel | str | Path,
    data: str | Path | Sequence[str | Path] | None = None,
    *,
    checkpoint: CheckpointChoice | None = None,
    text_column: str | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    raw_ids: RawIds | None = None,
    tokenizer: Tokenizer | None = None,
    split: Split = "test",
    context: Context = "windowed",
    context_length: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    batch_size: int = 8,
    packed: bool | None = None,
    device: str | torch.device = "auto",
    precision: Precision = "auto",
    cache: str | Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Evaluation:
    """Measure a model on a split of a text: `evaluate("runs/books")`, or `evaluate(model, "books/", tokenizer=...)`.

    Args:
        model: the folder of a run, of a checkpoint or of a saved model; or a model in memory.
        data: a text as `lineartime.data.load_corpus` takes it, split as for training; the default is that of a run's training.
        checkpoint: which checkpoint of a run: "best" (the default), with the lowest validation loss; "last"; or a step.
        text_column: as for `load_corpus`; for the text of a run, the default is as in training.
        include: as for `load_corpus`; for the text of a run, the default is as in training.
        exclude: as `include`.
        raw_ids: as `include`.
        tokenizer: the model's tokenizer; the default is the one in the folder of a run.
        split: the part of the text to measure on.
        context: "windowed" for independent windows, or "carried" for the split as one sequence, in which every token has all
            earlier tokens as context, or "documents" for each document as such a sequence.
        context_length: tokens in a window, or read at a time with other contexts; the default is that of a run's training.
        stride: tokens from one window to the next; the default is a whole window.
        max_tokens: measure only on this many tokens from the beginning of the split.
        batch_size: windows computed at once.
        packed: whether tokens attend to their own document alone; the default is as a run was trained, and otherwise False.
        device: where to load the model of a run: "auto" takes a GPU if there is one, and other names are PyTorch's; a model in
            memory stays where it is.
        precision: of matrix products.
        cache: folder for encoded text; the default is lineartime in the user's cache folder.
        say: called with lines that describe the splits of the text, before the measurement.

    Raises:
        LineartimeError: for errors that the user can fix, such as a text that is missing or too short.
    """
    if data is not None and not data:
        raise ArgumentError("data", "is empty: give a text, or leave it out.")
    check_type("batch_size", batch_size, _Size)
    for name, size in {"context_length": context_length, "stride": stride, "max_tokens": max_tokens}.items():
        check_type(name, size, _Size | None)
    check_type("split", split, Split)
    check_type("context", context, Context)
    check_type("precision", precision, Precision)
    check_type("packed", packed, bool | None)
    check_type("cache", cache, str | Path | None)

    measured, trained, held_out = None, dict[str, Any](), ""
    unknown = "a model in memory does not record"
    if isinstance(model, (str, Path)):
        unknown = f"{model} has no training.json, which records"
        measured, model, own = load_with_tokenizer(model, device, checkpoint=checkpoint)
        tokenizer = tokenizer or own
        if has_training_state(measured):
            state = read_training_state(measured)
            trained, held_out = state.config, state.held_out
    elif checkpoint is not None:
        raise ArgumentError("checkpoint", f"is {checkpoint}, but a model in memory has none: leave it out.")
    elif device != "auto":
        raise ArgumentError("device", f"is {device}, but a model in memory is measured where it is: move it by model.to().")
    model = check_model(model, LanguageModel, "be measured")
    needed = {"data": data, "context_length": context_length, "tokenizer": tokenizer}
    if missing := [name for name, value in needed.items() if value is None and name not in trained]:
        give = " and ".join(f"`{name}`" for name in missing)
        raise ArgumentError(missing[0], f"is missing, but {unknown} what the model was trained on: give {give}.")
    check_vocabulary(tokenizer, model.config.vocab_size)
    assert tokenizer is not None
    if context != "windowed":
        _check_carried(model, context, stride, packed)

    # The text of a run is read as in training, where nothing else is given.
    reading = {"text_column": TEXT_COLUMN, "include": (), "exclude": (), "raw_ids": None, **(trained if data is None else {})}
    given = {"text_column": text_column, "include": include, "exclude": exclude, "raw_ids": raw_ids}
    read: dict[str, Any] = {name: reading[name] if value is None else value for name, value in given.items()}
    corpus = load_corpus_of_run(trained["data"], *read.values()) if data is None else load_corpus(data, **read)
    # With max_tokens, only that much is encoded, so that a split of any size can be measured.
    cache = cache_folder() if cache is None else Path(cache)
    stream = token_stream(corpus, split, tokenizer, cache, max_tokens)
    if say is not None:
        for line in describe_splits(corpus, {split: stream}):
            say(line)
        is_of_run = data is None and not trained.get("streaming") and corpus.describe("validation")
        is_known = is_of_run and held_out and max_tokens is None
        if is_known and held_out != token_stream(corpus, "validation", tokenizer, cache).digest:
            say(
                "The held-out text has changed since the model was trained. If the text is split by file, or was split by the "
                "numbers of records, as earlier versions did, it may have been trained on what is measured here."
            )
    length: int = trained["context_length"] if context_length is None else context_length
    bf16 = choose_precision(precision, next(model.parameters()).device) == "bf16"
    common: dict[str, Any] = {"bf16": bf16, "max_tokens": max_tokens}
    if context != "windowed":
        assert isinstance(model, CausalLM)
        documents = context == "documents"
        evaluation = evaluate_carried(model, stream, tokenizer, segment=length, documents=documents, **common)
    else:
        stride = length if stride is None else stride
        packed = trained.get("packed", False) if packed is None else packed
        evaluation = evaluate_windowed(
            model, stream, tokenizer, context_length=length, stride=stride, batch_size=batch_size, packed=packed, **common
        )
    return replace(evaluation, checkpoint=measured)


def _check_carried(model: LanguageModel, context: Context, stride: int | None, packed: bool | None) -> None:
    """Check that the model can read a split or a document as one sequence, and that no option asks for windows."""
    if not isinstance(model, CausalLM):
        raise ArgumentError("context", f"is {context}, which needs a causal model, but this one is masked: use windowed.")
    if model.config.task == "prefix-lm":
        found = f"is {context}, but this model was trained to read a prefix, which one long sequence does not have"
        raise ArgumentError("context", f"{found}: use windowed.")
    if stride is not None:
        raise ArgumentError("stride", f"is for windows, but {context} context has none: leave it out.")
    if packed:
        reads = "reads all documents as one sequence" if context == "carried" else "never reads another document"
        raise ArgumentError("packed", f"is for windows, but {context} context {reads}: leave it out, or use windowed.")
