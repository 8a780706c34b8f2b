"""`lineartime eval`: measure a trained model on a text."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from lineartime.choices import Context, Precision, RawIds, Split
from lineartime.cli.options import Checkpoint, Device, Json, Threads
from lineartime.errors import ArgumentError
from lineartime.screen import SCREEN, new_table, output_console
from lineartime.units import NOT_THERE, cell

if TYPE_CHECKING:
    from lineartime.evaluation import Evaluation, Mean


@dataclass(frozen=True)
class EvalOptions:
    """The options of `lineartime eval`."""

    runs: tuple[Path, ...]
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
    raw_ids: RawIds | None = None
    """Type of the token ids in files that do not state it; for the training text, the default is as in training."""
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
    json: Json = False


def run(options: EvalOptions) -> None:
    """Evaluate one checkpoint or several, and print the results."""
    from lineartime.checkpoint import find_checkpoint
    from lineartime.evaluation import evaluate
    from lineartime.machine import choose_device, choose_precision, using_threads

    if not options.runs:
        raise ArgumentError("runs", "is empty: give the folder of a run, or of one checkpoint.")
    device = choose_device(options.device)
    precision = choose_precision(options.precision, device)
    for each in options.runs[1:]:  # a wrong path should not be told after the first run was measured
        find_checkpoint(each, options.checkpoint)
    given = {name: value for name, value in vars(options).items() if name in signature(evaluate).parameters}
    given |= {name: given[name] or None for name in ("data", "include", "exclude")}
    given |= {"packed": None if options.packed == "auto" else options.packed == "on", "precision": precision}
    measured: list[Evaluation] = []
    with using_threads(options.threads):
        try:
            for each in options.runs:
                measured.append(evaluate(each, **given, say=partial(print, file=SCREEN)))
                if options.json:
                    print(json.dumps({**_plain(measured), "precision": precision}), flush=True)
        finally:  # also if a later run fails, or is interrupted: what was measured took long
            if measured and not options.json:
                _print(measured, f"{device.type}, {precision}")


def _plain(measured: Sequence["Evaluation"]) -> dict[str, Any]:
    """The last result as JSON values, with its difference from the first; None if they cannot be compared."""
    last = measured[-1]
    perplexity = last.perplexity if math.isfinite(last.perplexity) else None  # JSON has no infinity
    plain = {**last.to_dict(), "masked_perplexity" if last.masked else "perplexity": perplexity}
    if len(measured) > 1:
        found = _difference(measured[0], last)
        plain["difference_from_first"] = None if isinstance(found, str) else {"loss": found.loss, "loss_error": found.error}
    return plain


def _difference(first: "Evaluation", other: "Evaluation") -> "Mean | str":
    """The difference of two evaluations, or why they cannot be compared."""
    from lineartime.evaluation import difference

    try:
        return difference(first, other)
    except ArgumentError as error:
        return f"{other.checkpoint} {error.predicate}"


def _print(measured: Sequence["Evaluation"], where: str) -> None:
    """Print a table with a column for each run."""
    console, first = output_console(markup=False), measured[0]
    for what in dict.fromkeys(f"{each.text}, {each.tokens:,} tokens; {each.context}; computed on {where}" for each in measured):
        console.print(what, soft_wrap=True)
    for number, each in enumerate(measured, 1):
        console.print(f"run {number}: {each.checkpoint}", soft_wrap=True)
    token = "masked token" if first.masked else "token"
    rows = {
        f"nats per {token}": [_with_error(each.loss, each.loss_error) for each in measured],
        "bits per byte": [cell(each.bits_per_byte, ".4f") for each in measured],
        f"perplexity per {token}": [f"{each.perplexity:.5g}" for each in measured],
        "perplexity per word": [cell(each.word_perplexity, ".5g") for each in measured],
    }
    if len(measured) > 1:
        above = rows["nats above run 1"] = [NOT_THERE]
        for found in (_difference(first, each) for each in measured[1:]):
            if isinstance(found, str):
                console.print(found, soft_wrap=True)
            above.append(NOT_THERE if isinstance(found, str) else _with_error(found.loss, found.error, sign="+"))
    places = [(part.first, part.last) for part in first.by_position]
    if all([(part.first, part.last) for part in each.by_position] == places for each in measured):
        for index, (begin, end) in enumerate(places):
            reach = f"{begin:,}" if begin == end else f"{begin:,} to {end:,}"
            name = f"nats at position {reach}" if first.masked else f"nats, {reach} tokens read"
            parts = [each.by_position[index] for each in measured]
            rows[name] = [_with_error(part.loss, part.error) for part in parts]
    table = new_table(("", *(f"run {number}" for number in range(1, len(measured) + 1))), left=("",))
    for name, cells in rows.items():
        if set(cells) != {NOT_THERE}:
            table.add_row(name, *cells)
    console.print(table)


def _with_error(value: float, error: float | None, sign: str = "") -> str:
    return f"{value:{sign}.4f}" + ("" if error is None else f" ± {error:.4f}")
