"""`lineartime eval`: measure a trained model on a text."""

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro
from rich.console import Console

from lineartime.choices import Context, Precision, Split
from lineartime.cli.options import Checkpoint, Device, Threads
from lineartime.errors import ArgumentError
from lineartime.plots import check_picture
from lineartime.runs.curve import draw_report
from lineartime.screen import SCREEN, new_table, output_console

if TYPE_CHECKING:
    from lineartime.evaluation import Difference, Evaluation


@dataclass(frozen=True)
class EvalOptions:
    """The options of `lineartime eval`."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folder of a run, or of one checkpoint; several are compared with the first one, window by window."""
    checkpoint: Checkpoint = None
    split: Split = "test"
    """Split of the text to measure on; all is the whole text."""
    data: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Corpus name, file or folder, split as for training; the default is what the model was trained on."""
    text_column: str | None = None
    """Column of JSON, CSV, Parquet and data sets of the hub that holds the text; for the training text, its own by default."""
    include: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Read only files of folders that match a pattern, such as '*.md'; for the training text, the default is as in training."""
    exclude: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Leave out what matches a pattern, such as '*.log' or 'drafts'; for the training text, the default is as in training."""
    context: Context = "windowed"
    """windowed: independent windows; carried: the split as one sequence, in which every token sees all earlier ones;
    documents: each document as such a sequence, for instance a whole book."""
    context_length: int | None = None
    """Tokens in a window, or read at a time in other contexts; the default is the context length of training."""
    stride: int | None = None
    """Tokens from one window to the next; the default is a whole window. Smaller strides give more context and take longer."""
    max_tokens: int | None = None
    """Measure only this many tokens from the beginning of the split."""
    batch_size: int = 8
    """Number of windows computed at once."""
    packed: Literal["auto", "on", "off"] = "auto"
    """Whether tokens attend to their own document alone; auto does as in training."""
    device: Device = "auto"
    precision: Precision = "auto"
    """Precision of matrix products; auto takes bf16 where the device has units for it."""
    threads: Threads = None
    cache: Path | None = None
    """Cache folder for encoded text; the default is lineartime in the user's cache folder."""
    plot: Path | None = None
    """Plot to write: the losses of the run beside the loss by position."""
    json: bool = False
    """Print the result as one line of JSON."""


def run(options: EvalOptions) -> None:
    """Evaluate one checkpoint or several, and print the results."""
    from lineartime.checkpoint import find_checkpoint
    from lineartime.evaluation import evaluate
    from lineartime.machine import choose_device, choose_precision, using_threads

    if not options.runs:
        raise ArgumentError("runs", "is empty: give the folder of a run, or of one checkpoint.")
    device = choose_device(options.device)
    precision = choose_precision(options.precision, device)
    if options.plot is not None:
        if len(options.runs) > 1:
            raise ArgumentError("plot", "shows one run: give one, or draw the curves of several by `lineartime runs`.")
        check_picture(options.plot)  # before the slow part
    for each in options.runs[1:]:  # a wrong path should not be told after the first run was measured
        find_checkpoint(each, options.checkpoint)
    given = {name: value for name, value in vars(options).items() if name in signature(evaluate).parameters}
    given |= {name: given[name] or None for name in ("data", "include", "exclude")}
    given |= {"packed": None if options.packed == "auto" else options.packed == "on", "precision": precision}
    evaluations: list[Evaluation] = []
    with using_threads(options.threads):
        try:
            for each in options.runs:
                evaluations.append(evaluate(each, **given, say=partial(print, file=SCREEN)))
                if options.json:
                    before = evaluations[0] if len(evaluations) > 1 else None
                    print(json.dumps(_plain(evaluations[-1], precision, before)), flush=True)
        finally:  # also if a later run fails, or is interrupted: what was measured took long
            if evaluations and len(options.runs) > 1 and not options.json:
                _print_comparison(evaluations, f"{device.type}, {precision}")
    first = evaluations[0]
    if len(options.runs) == 1 and not options.json:
        _print(first, f"{device.type}, {precision}")
    if options.plot is not None:
        assert first.checkpoint is not None
        picture = draw_report(first.checkpoint.parent, first, options.plot)
        print(f"picture: {picture}", file=SCREEN if options.json else sys.stdout)


def _plain(evaluation: "Evaluation", precision: str, first: "Evaluation | None") -> dict[str, Any]:
    """A result as JSON values, with its difference from that of the first run; None if they cannot be compared."""
    perplexity = "masked_perplexity" if evaluation.masked else "perplexity"
    finite = evaluation.perplexity if math.isfinite(evaluation.perplexity) else None  # JSON has no infinity
    plain = {**evaluation.to_dict(), "precision": precision, perplexity: finite}
    if first is not None:
        found, _ = _difference(first, evaluation)
        plain["difference_from_first"] = None if found is None else dataclasses.asdict(found)
    return plain


def _difference(first: "Evaluation", other: "Evaluation") -> tuple["Difference | None", str]:
    """The difference of two evaluations, or why they cannot be compared."""
    from lineartime.evaluation import difference

    try:
        return difference(first, other), ""
    except ArgumentError as error:
        return None, error.predicate


def _print_comparison(evaluations: Sequence["Evaluation"], where: str) -> None:
    """Print the losses of several runs, and how far each is above that of the first one, on the same tokens."""
    console, first = output_console(markup=False), evaluations[0]
    for what in dict.fromkeys(f"{each.text}, {each.tokens:,} tokens; {each.context}" for each in evaluations):
        console.print(f"{what}; computed on {where}", soft_wrap=True)
    table = new_table(("run", "loss (nats)", "bits per byte", "difference"), left=("run",), folded=("run",))
    notes = {}
    for evaluation in evaluations:
        found, problem = (None, "") if evaluation is first else _difference(first, evaluation)
        if problem:
            notes[str(evaluation.checkpoint)] = problem
        table.add_row(str(evaluation.checkpoint), *_cells(evaluation, found))
    console.print(table)
    unit = "nats per masked token" if first.masked else "bits per byte"
    console.print(f"difference: {unit} above the first run, window by window", soft_wrap=True)
    _print_positions(console, evaluations)
    for run, problem in notes.items():
        console.print(f"{run} {problem}", soft_wrap=True)


def _print_positions(console: Console, evaluations: Sequence["Evaluation"]) -> None:
    """Print the losses of several runs by position, if they have the same positions."""
    first, *others = [{(part.first, part.last): part.loss for part in each.by_position} for each in evaluations]
    if all(other.keys() == first.keys() for other in others):
        headers = ("position" if evaluations[0].masked else "tokens read", *(f"run {i + 1}" for i in range(len(evaluations))))
        table = new_table(headers, title="loss by position (nats)")
        for part in first:
            table.add_row(_reach(*part), *(f"{losses[part]:.4f}" for losses in (first, *others)))
        console.print(table)


def _reach(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _cells(evaluation: "Evaluation", found: "Difference | None") -> tuple[str, str, str]:
    """The loss in nats, the bits per byte, and the difference from the first run; the first and the last with their errors."""
    apart, error = None, None
    if found is not None:
        masked = evaluation.masked
        apart, error = (found.loss, found.loss_error) if masked else (found.bits_per_byte, found.bits_per_byte_error)
    bits = "-" if evaluation.bits_per_byte is None else f"{evaluation.bits_per_byte:.4f}"
    loss = f"{evaluation.loss:.4f}{_plus_minus(evaluation.loss_error)}"
    return loss, bits, "-" if apart is None else f"{apart:+.4f}{_plus_minus(error)}"


def _plus_minus(error: float | None) -> str:
    return "" if error is None else f" ± {error:.4f}"


def _print(evaluation: "Evaluation", where: str) -> None:
    console = output_console(markup=False)
    what = f"{evaluation.checkpoint} on {evaluation.text}, {evaluation.tokens:,} tokens"
    console.print(f"{what}; computed on {where}", soft_wrap=True)
    token = "masked token" if evaluation.masked else "token"
    console.print(f"context         {evaluation.context}", soft_wrap=True)
    console.print(f"loss            {evaluation.loss:.4f}{_plus_minus(evaluation.loss_error)} nats per {token}")
    console.print(f"perplexity      {evaluation.perplexity:.3f} per {token}")
    if evaluation.word_perplexity is not None:
        per_word = f"{evaluation.word_perplexity:{'.3f' if evaluation.word_perplexity < 1e6 else '.3g'}}"
        console.print(f"                {per_word} per word")
    if evaluation.bits_per_byte is not None:
        console.print(f"bits per byte   {evaluation.bits_per_byte:.4f}")
    headers = ("position" if evaluation.masked else "tokens read", "loss (nats)", "± error", "tokens")
    table = new_table(headers, title="loss by position in the context")
    for position in evaluation.by_position:
        reach = _reach(position.first, position.last)
        error = "-" if position.error is None else f"{position.error:.4f}"
        table.add_row(reach, f"{position.loss:.4f}", error, f"{position.count:,}")
    console.print(table)
