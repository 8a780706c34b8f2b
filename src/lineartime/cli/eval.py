"""`lineartime eval`: measure a trained model on a text."""

import dataclasses
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro
from rich.table import Column, Table

from lineartime.choices import Context, Device, Precision, Split
from lineartime.cli.checkpoint import CheckpointOption, checkpoint_choice
from lineartime.runs.curve import REPORT, draw_report
from lineartime.runs.figures import check_picture
from lineartime.screen import SCREEN, output_console

if TYPE_CHECKING:
    from lineartime.evaluation import Evaluation


@dataclass(frozen=True)
class Options:
    """Measure a trained model on a whole split: nats, bits per byte, perplexity per token and word, and loss by position."""

    run: tyro.conf.Positional[Path]
    """Folder of a run, or of one checkpoint."""
    checkpoint: CheckpointOption = None
    """Checkpoint of the run: best, last, or a step number; the default is the best by validation loss."""
    split: Split = "test"
    """Split of the text to measure on; all is the whole text."""
    data: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Corpus name, file or folder, split as for training; the default is what the model was trained on."""
    text_column: str | None = None
    """Column of JSON, Parquet and data sets of the hub that holds the text; for the training text, the default is its own."""
    max_expansion: int | None = None
    """Maximum bytes of text per byte of a compressed file; the default is as in training."""
    include: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Read only files of folders that match a pattern, such as '*.md'; for the training text, the default is as in training."""
    exclude: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Leave out what matches a pattern, such as '*.log' or 'drafts'; for the training text, the default is as in training."""
    context: Context = "windowed"
    """windowed: independent windows; carried: the split as one sequence, in which every token sees all earlier ones."""
    context_length: int | None = None
    """Tokens in a window, or read at a time if carried; the default is the context length of training."""
    stride: int | None = None
    """Tokens from one window to the next; the default is a whole window. Smaller strides give more context and take longer."""
    max_tokens: int | None = None
    """Measure only this many tokens from the beginning of the split."""
    batch_size: int = 8
    """Number of windows computed at once."""
    packed: Literal["auto", "on", "off"] = "auto"
    """Whether tokens attend to their own document alone; auto does as in training."""
    device: Device = "auto"
    """Device to compute on; auto takes a GPU if there is one."""
    precision: Precision = "auto"
    """Precision of matrix products; auto takes bf16 where the device has units for it."""
    threads: int | None = None
    """Number of CPU threads; the default is PyTorch's. While other programs run, 1 is often fastest."""
    cache: Path | None = None
    """Cache folder for encoded text; the default is lineartime in the user's cache folder."""
    words: Literal["auto", "on", "off"] = "auto"
    """Show the perplexity per word; auto shows it only for prose, because it says little about source code."""
    plot: Path | None = None
    """Plot to write: the losses of the run beside the loss by position."""
    json: bool = False
    """Print the result as one line of JSON."""


def run(options: Options) -> None:
    """Evaluate the checkpoint and print the result."""
    from lineartime.evaluation import evaluate
    from lineartime.machine import choose_device, choose_precision, using_threads

    device = choose_device(options.device)
    precision = choose_precision(options.precision, device)
    if options.plot is not None:
        check_picture(REPORT, options.plot)  # before the slow part
    with using_threads(options.threads):
        evaluation = evaluate(
            options.run,
            options.data or None,
            checkpoint=checkpoint_choice(options.checkpoint),
            text_column=options.text_column,
            max_expansion=options.max_expansion,
            include=options.include or None,
            exclude=options.exclude or None,
            split=options.split,
            context=options.context,
            context_length=options.context_length,
            stride=options.stride,
            max_tokens=options.max_tokens,
            batch_size=options.batch_size,
            packed=None if options.packed == "auto" else options.packed == "on",
            device=options.device,
            precision=precision,
            cache=options.cache,
            say=lambda line: print(line, file=SCREEN),
        )
    assert evaluation.checkpoint is not None
    if options.json:
        perplexity = "masked_perplexity" if evaluation.masked else "perplexity"
        finite = evaluation.perplexity if math.isfinite(evaluation.perplexity) else None  # JSON has no infinity
        facts = {"checkpoint": str(evaluation.checkpoint), "precision": precision, perplexity: finite}
        print(json.dumps({**dataclasses.asdict(evaluation), **facts}))
    else:
        words = evaluation.prose if options.words == "auto" else options.words == "on"
        _print(evaluation, f"{device.type}, {precision}", words)
    if options.plot is not None:
        picture = draw_report(evaluation.checkpoint.parent, evaluation, options.plot)
        print(f"picture: {picture}", file=SCREEN if options.json else sys.stdout)


def _print(evaluation: "Evaluation", where: str, words: bool) -> None:
    console = output_console(markup=False)
    what = f"{evaluation.checkpoint} on {evaluation.text}, {evaluation.tokens:,} tokens"
    console.print(f"{what}; computed on {where}", soft_wrap=True)
    console.print(f"context         {evaluation.context}", soft_wrap=True)
    error = "" if evaluation.loss_error is None else f" ± {evaluation.loss_error:.4f}"
    console.print(f"loss            {evaluation.loss:.4f}{error} nats per token")
    console.print(f"perplexity      {evaluation.perplexity:.3f} per {'masked token' if evaluation.masked else 'token'}")
    if words and evaluation.word_perplexity is not None:
        per_word = f"{evaluation.word_perplexity:{'.3f' if evaluation.word_perplexity < 1e6 else '.3g'}}"
        console.print(f"                {per_word} per word")
    if evaluation.bits_per_byte is not None:
        console.print(f"bits per byte   {evaluation.bits_per_byte:.4f}")
    headers = ("position" if evaluation.masked else "tokens read", "loss (nats)", "± error", "tokens")
    columns = (Column(header, justify="right") for header in headers)
    table = Table(*columns, title="loss by position in the context", title_justify="left")
    for position in evaluation.by_position:
        reach = f"{position.first:,}" if position.first == position.last else f"{position.first:,} to {position.last:,}"
        error = "-" if position.error is None else f"{position.error:.4f}"
        table.add_row(reach, f"{position.loss:.4f}", error, f"{position.count:,}")
    console.print(table)
