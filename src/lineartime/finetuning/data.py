"""What both tasks of fine-tuning share: records, those that are held out, and windows of their texts, as a model reads them.

A window is [CLS] text [SEP], or, of a question and a part of its text or of a pair, [CLS] first [SEP] second [SEP].

Shapes: B batch, T tokens.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import datasets
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast
from transformers.modeling_outputs import ModelOutput

from lineartime.data.folders import named_split
from lineartime.data.readers import SourceFile
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.machine import autocast

Record = TypeVar("Record")
WINDOWS = "windows"
"""The folder for the windows of a fine-tuning, which may be large."""


class Records(partial[Iterator[Record]]):
    """Records that a function reads from their file anew each time: `Records(read, file, ...)`."""

    def __iter__(self) -> Iterator[Record]:
        return self()


def id_of(record: Mapping[str, Any], otherwise: object) -> str:
    """The id of a record, which is only written with its prediction; without one, its place."""
    return str(otherwise if record.get("id") is None else record["id"])


def held_out(contents: Iterable[str], classes: Iterable[Iterable[str]]) -> frozenset[int]:
    """The places of the records to validate with: a fifth of each class, at least one of two, by a hash of their contents."""
    digests = [hashlib.sha256(each.encode(errors="replace")).digest() for each in contents]
    of_record = [set(each) or {""} for each in classes]
    left = Counter(name for each in of_record for name in each)
    wanted = {name: max(1, count // 5) for name, count in left.items()}
    chosen = []
    for place in sorted(range(len(digests)), key=digests.__getitem__):
        names = of_record[place]
        if any(wanted[name] > 0 for name in names) and all(left[name] > 1 for name in names):
            chosen.append(place)
            for name in names:
                left[name], wanted[name] = left[name] - 1, wanted[name] - 1
    return frozenset(chosen)


def names_of(ids: Iterable[str]) -> list[str]:
    """The names of records in an object: their ids; if some have the same, their numbers."""
    names = list(ids)
    return names if len(set(names)) == len(names) else [str(place) for place in range(1, len(names) + 1)]


def split_files(data: Path, suffixes: Sequence[str], example: str) -> tuple[Path, Path | None]:
    """The files to train and to validate with, by their names; None for a share of the first. Raises ArgumentError."""
    if data.is_file() and named_split(data.name) in (None, "train"):
        return data, None
    if not data.is_dir():
        what = f"is {data}, which does not exist, or is held out by its name"
        raise ArgumentError("data", f"{what}: give a file, or a folder with {example}.")
    named = [(named_split(each.name), each) for each in sorted(data.iterdir()) if SourceFile(each).format_suffix in suffixes]
    train, validation, others = ([file for split, file in named if split == name] for name in ("train", "validation", None))
    if len(train) != 1 or len(validation) > 1 or (others and not validation):
        what = f"is {data}, which must have one {' or '.join(suffixes)} file named for training, and one for validation"
        raise ArgumentError("data", f"{what}: give a folder with both, such as {example}, or one file.")
    return train[0], validation[0] if validation else None


@dataclass(frozen=True)
class Windows:
    """Divides texts, and questions with their texts, into windows."""

    tokenizer: PreTrainedTokenizerFast  # which puts [CLS] and [SEP] around a text, and after the second of a pair
    context_length: int  # the maximum number of tokens in a window
    stride: int  # the tokens of a text that a window has in common with the one before

    def of(self, first: str, second: str | None = None, where: str = "") -> list[Any]:
        """The windows, as the tokenizers library encodes them, of a text, or of a first text, whole in each, and a second one.

        Names of special tokens in a text are text. Raises LineartimeError if there is too little room for the text.
        """
        backend = self.tokenizer.backend_tokenizer
        backend.encode_special_tokens = True
        before = 0 if second is None else 1 + len(backend.encode(first, add_special_tokens=False))
        room = self.context_length - before - 2
        if room <= self.stride:
            what = f"leaves {max(room, 0):,} tokens of the {self.context_length:,} for its text, and the next window repeats"
            raise LineartimeError(f"{where} {what} {self.stride:,}: raise `context_length` above {before + 2 + self.stride:,}.")
        strategy = "only_first" if second is None else "only_second"
        backend.enable_truncation(self.context_length, stride=self.stride, strategy=strategy)
        found = backend.encode(first, second)
        backend.no_truncation()
        return [found, *found.overflowing]


def on_disk(generate: Any, options: dict[str, Any], numbers: Sequence[str], lists: dict[str, str], out: Path) -> Any:
    """Windows as a `Dataset` on the disk, below the folder of the fine-tuning, with these columns and types of lists."""
    columns = {name: datasets.Value("int32") for name in numbers}
    columns |= {name: datasets.Sequence(datasets.Value(kind)) for name, kind in {"input_ids": "int32", **lists}.items()}
    datasets.disable_progress_bars()
    try:
        return datasets.Dataset.from_generator(
            generate, features=datasets.Features(columns), gen_kwargs=options, cache_dir=str(out / WINDOWS)
        )
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, LineartimeError):
            raise error.__cause__ from None
        raise


def padded(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Tokens [B, T] of windows, padded on the right; their mask; and their types, 1 for those of the text."""
    tokens = [torch.tensor(row["input_ids"]) for row in rows]
    lengths, first = torch.tensor([len(row) for row in tokens]), torch.tensor([row["first"] for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    place = torch.arange(ids.shape[1])
    mask, types = place < lengths[:, None], place >= first[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "token_type_ids": types.long()}


@torch.no_grad()
def read_windows(
    model: nn.Module, windows: Any, batch_size: int, bf16: bool
) -> Iterator[tuple[list[Mapping[str, Any]], ModelOutput]]:
    """The windows in batches of about one length, so that little is padding, with what a model says about them."""
    model.eval()
    device = next(model.parameters()).device
    lengths = [len(window["input_ids"]) for window in windows]
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for first in range(0, len(order), batch_size):
        rows = [windows[place] for place in order[first : first + batch_size]]
        batch = {name: tensor.to(device) for name, tensor in padded(rows).items()}
        with autocast(device, bf16):
            outputs = model(**batch)
        yield rows, outputs
