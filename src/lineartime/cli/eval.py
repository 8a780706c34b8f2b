"""`lineartime eval`: measure a trained model on a text."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.table import Column, Table

from lineartime.checkpoint import find_checkpoint, load, load_tokenizer
from lineartime.data import default_cache, describe_splits, load_corpus, token_stream
from lineartime.data.readers import Split
from lineartime.data.records import TEXT_COLUMN
from lineartime.errors import ArgumentError
from lineartime.evaluation import Evaluation, carried, windowed
from lineartime.layers.checks import check_positive
from lineartime.machine import Device, Precision, choose_device, choose_precision
from lineartime.models import CausalLM
from lineartime.training.resuming import saved_config


@dataclass(frozen=True)
class Options:
    """Measure a trained model on a whole split: nats, bits per byte, perplexity per token and word, and loss by position."""

    checkpoint: tyro.conf.Positional[Path]
    """Folder of a run (its best checkpoint is used), or of one checkpoint."""
    split: Split = "test"
    """Part of the text to measure on; all is the whole of it."""
    data: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Name of a corpus, or a file or folder, which is split as for training; the default is what the model was trained on."""
    text_column: str | None = None
    """Column of JSON, Parquet and data sets of the hub that holds the text; the default is as in training, for its own text."""
    context: Literal["windowed", "carried"] = "windowed"
    """windowed: independent windows; carried: the split as one sequence, every token having all earlier ones as context."""
    context_length: int | None = None
    """Tokens in a window, or read at a time if carried; the default is the context the model was trained with."""
    stride: int | None = None
    """Tokens from one window to the next; the default is a whole window. A smaller one gives more context and takes longer."""
    max_tokens: int | None = None
    """Measure only on this many tokens from the beginning of the split."""
    batch_size: int = 8
    """Windows computed at once."""
    device: Device = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    precision: Precision = "auto"
    """Precision of matrix products; auto takes bf16 where this machine is faster with it."""
    cache: Path | None = None
    """Folder for encoded text; the default is lineartime in the user's cache folder."""
    json: bool = False
    """Print the result as one line of JSON."""


def run(options: Options) -> None:
    """Evaluate the checkpoint and print the result."""
    names = ("context_length", "max_tokens", "batch_size")
    check_positive(**{name: size for name in names if (size := getattr(options, name)) is not None})
    device = choose_device(options.device)
    checkpoint = find_checkpoint(options.checkpoint)
    model = load(checkpoint, device)
    trained = saved_config(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    column = options.text_column or (TEXT_COLUMN if options.data else trained.text_column)
    corpus = load_corpus(options.data or trained.data, column)
    # With max_tokens, only that much is encoded, so that a split of any size can be measured.
    stream = token_stream(corpus, options.split, tokenizer, options.cache or default_cache(), options.max_tokens)
    for line in describe_splits(corpus, {options.split: stream}):
        print(line, file=sys.stderr)
    bf16 = choose_precision(options.precision, device) == "bf16"
    length = options.context_length or trained.context_length
    if options.context == "carried":
        if not isinstance(model, CausalLM):
            raise ArgumentError("context", f"is carried, which needs a causal model, but {checkpoint} is masked: use windowed.")
        if options.stride is not None:
            raise ArgumentError("stride", "is for windows, but carried context has none: leave it out.")
        evaluation = carried(model, stream, tokenizer, segment=length, bf16=bf16, max_tokens=options.max_tokens)
    else:
        evaluation = windowed(
            model,
            stream,
            tokenizer,
            context_length=length,
            stride=length if options.stride is None else options.stride,
            batch_size=options.batch_size,
            bf16=bf16,
            max_tokens=options.max_tokens,
        )
    if options.json:
        perplexity = "masked_perplexity" if evaluation.masked else "perplexity"
        facts = {"checkpoint": str(checkpoint), "text": stream.name, perplexity: evaluation.perplexity}
        print(json.dumps({**facts, **dataclasses.asdict(evaluation)}))
    else:
        _print(evaluation, str(checkpoint), stream.name)


def _print(evaluation: Evaluation, checkpoint: str, stream: str) -> None:
    console = Console(highlight=False, markup=False)
    console.print(f"{checkpoint} on {stream}, {evaluation.tokens:,} tokens", soft_wrap=True)
    console.print(f"context         {evaluation.context}", soft_wrap=True)
    console.print(f"loss            {evaluation.loss:.4f} nats per token")
    console.print(f"perplexity      {evaluation.perplexity:.3f} per {'masked token' if evaluation.masked else 'token'}")
    if evaluation.word_perplexity is not None:
        console.print(f"                {evaluation.word_perplexity:.3f} per word")
    if evaluation.bits_per_byte is not None:
        console.print(f"bits per byte   {evaluation.bits_per_byte:.4f}")
    headers = ("position" if evaluation.masked else "tokens read", "loss (nats)", "tokens")
    columns = (Column(header, justify="right") for header in headers)
    table = Table(*columns, title="loss by position in the context", title_justify="left")
    for position in evaluation.by_position:
        reach = f"{position.first:,}" if position.first == position.last else f"{position.first:,} to {position.last:,}"
        table.add_row(reach, f"{position.loss:.4f}", f"{position.count:,}")
    console.print(table)
