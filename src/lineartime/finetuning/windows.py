"""Windows of a text, or of a question and a part of its text: [CLS] question [SEP] text [SEP]; and how a model reads them.

Shapes: B batch, T tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast
from transformers.modeling_outputs import ModelOutput

from lineartime.errors import LineartimeError
from lineartime.machine import autocast

WINDOWS = "windows"
"""The folder for the windows of a fine-tuning, which may be large."""
NUMBER, NUMBERS = datasets.Value("int32"), datasets.Sequence(datasets.Value("int32"))


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
            raise LineartimeError(
                f"{where} leaves {max(room, 0):,} tokens of the {self.context_length:,} of a window for its text, of which the "
                f"next window repeats {self.stride:,}: raise `context_length` above {before + 2 + self.stride:,}."
            )
        strategy = "only_first" if second is None else "only_second"
        backend.enable_truncation(self.context_length, stride=self.stride, strategy=strategy)
        found = backend.encode(first, second)
        backend.no_truncation()
        return [found, *found.overflowing]


def dataset_of(generate: Any, options: dict[str, Any], features: Mapping[str, Any], cache: Path) -> datasets.Dataset:
    """Windows on the disk."""
    datasets.disable_progress_bars()
    try:
        columns = datasets.Features(features)
        return datasets.Dataset.from_generator(generate, features=columns, gen_kwargs=options, cache_dir=str(cache))
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
