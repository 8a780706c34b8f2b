"""Evaluate a model, or the model of a run, on a split of a text."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch

from lineartime.checkpoint import (
    CheckpointChoice,
    has_training_state,
    load_with_tokenizer,
    read_training_state,
)
from lineartime.choices import TEXT_COLUMN, Context, Precision, RawIds, Split
from lineartime.data import Tokenizer, describe_splits, load_corpus, token_stream
from lineartime.data.corpora import load_corpus_of_run
from lineartime.data.tokenizers import check_vocabulary
from lineartime.errors import ArgumentError
from lineartime.evaluation.perplexity import Evaluation, evaluate_carried, evaluate_windowed
from lineartime.fields import Between, check_type
from lineartime.host import cache_folder
from lineartime.machine import choose_device, choose_precision
from lineartime.models.language_model import CausalLM, LanguageModel, check_model

_Size = Annotated[int, Between(1, 2**40)]


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
        measured, model, own = load_with_tokenizer(model, choose_device(device), checkpoint=checkpoint)
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
