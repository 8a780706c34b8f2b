"""`lineartime eval`: measure a trained model on a text."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro
from rich.console import Console
from rich.table import Column, Table

from lineartime.checkpoint import Which
from lineartime.choices import TEXT_COLUMN, Device, Precision, Split
from lineartime.errors import Argument, ArgumentError

if TYPE_CHECKING:
    from lineartime.evaluation import Evaluation


@dataclass(frozen=True)
class Options:
    """Measure a trained model on a whole split: nats, bits per byte, perplexity per token and word, and loss by position."""

    run: tyro.conf.Positional[Path]
    """Folder of a run, or of one checkpoint."""
    checkpoint: Which | None = None
    """Checkpoint of the run: best, last, or the step of one; the default is the best, by validation loss."""
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
    """Precision of matrix products; auto takes bf16 where the device has units for it."""
    threads: int | None = None
    """Threads of the CPU; the default is PyTorch's. Where other programs run too, 1 is often fastest."""
    cache: Path | None = None
    """Folder for encoded text; the default is lineartime in the user's cache folder."""
    json: bool = False
    """Print the result as one line of JSON."""


def run(options: Options) -> None:
    """Evaluate the checkpoint and print the result."""
    from lineartime.machine import using_threads

    with using_threads(options.threads):
        _evaluate(options)


def _evaluate(options: Options) -> None:
    from lineartime.checkpoint import find_checkpoint, load, load_tokenizer
    from lineartime.data import default_cache, describe_splits, load_corpus, token_stream
    from lineartime.evaluation import carried, windowed
    from lineartime.layers.checks import check_positive
    from lineartime.machine import choose_device, choose_precision
    from lineartime.models import CausalLM

    names = ("context_length", "max_tokens", "batch_size")
    check_positive(**{name: size for name in names if (size := getattr(options, name)) is not None})
    device = choose_device(options.device)
    checkpoint = find_checkpoint(options.run, options.checkpoint)
    data, column, length = _text_and_context(options, checkpoint)
    model = load(checkpoint, device)
    tokenizer = load_tokenizer(checkpoint)
    corpus = load_corpus(data, column)
    # With max_tokens, only that much is encoded, so that a split of any size can be measured.
    stream = token_stream(corpus, options.split, tokenizer, options.cache or default_cache(), options.max_tokens)
    for line in describe_splits(corpus, {options.split: stream}):
        print(line, file=sys.stderr)
    precision = choose_precision(options.precision, device)
    bf16 = precision == "bf16"
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
        facts = {"checkpoint": str(checkpoint), "text": stream.name, "precision": precision, perplexity: evaluation.perplexity}
        print(json.dumps({**facts, **dataclasses.asdict(evaluation)}))
    else:
        _print(evaluation, f"{checkpoint} on {stream.name}", f"{device.type}, {precision}")


def _text_and_context(options: Options, checkpoint: Path) -> tuple[tuple[str, ...], str, int]:
    """The text, its column and the context length that were asked for, or else those of training.

    Raises:
        LineartimeError: if nothing tells them.
    """
    from lineartime.checkpoint import has_training_state
    from lineartime.training.resuming import saved_config

    if options.data and options.context_length is not None:
        return options.data, options.text_column or TEXT_COLUMN, options.context_length
    if not has_training_state(checkpoint):
        missing = [name for name in ("data", "context_length") if not getattr(options, name)]
        others = (" and ", Argument(missing[1])) if len(missing) > 1 else ()
        raise ArgumentError(
            missing[0],
            f"is missing, but {checkpoint} has no training.json, which tells what the model was trained on: give ",
            Argument(missing[0]),
            *others,
            ".",
        )
    trained = saved_config(checkpoint)
    column = options.text_column or (TEXT_COLUMN if options.data else trained.text_column)
    return options.data or trained.data, column, options.context_length or trained.context_length


def _print(evaluation: "Evaluation", what: str, where: str) -> None:
    console = Console(highlight=False, markup=False)
    console.print(f"{what}, {evaluation.tokens:,} tokens; computed on {where}", soft_wrap=True)
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
