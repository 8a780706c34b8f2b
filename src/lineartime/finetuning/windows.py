"""Windows of a text, or of a question and a part of its text: [CLS] question [SEP] text [SEP]; and how a model reads them.

Shapes: B batch, T tokens.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast
from transformers.modeling_outputs import ModelOutput

from lineartime.errors import LineartimeError
from lineartime.finetuning.data import Question
from lineartime.hf.tokenizer import framing
from lineartime.machine import autocast

WINDOWS = "windows"
"""The folder for the windows of a fine-tuning, which may be large."""


@dataclass(frozen=True)
class Window:
    """A question and a part of its text."""

    ids: list[int]
    first: int  # the place of the first token of the text
    starts: NDArray[np.int64]  # where each token of the text begins in it, in characters
    ends: NDArray[np.int64]

    def tokens_of(self, spans: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
        """The places of the first and the last token of the first span that lies in the window; None if none does."""
        if len(self.ends):
            for begin, end in spans:
                if self.starts[0] <= begin and end <= self.ends[-1]:
                    first = np.searchsorted(self.ends, begin, side="right")
                    last = np.searchsorted(self.starts, end) - 1
                    return self.first + int(first), self.first + int(max(first, last))
        return None


@dataclass(frozen=True)
class WindowEncoder:
    """Divides questions and their texts into windows."""

    definition: str  # the JSON of a tokenizer of the tokenizers library
    cls: str  # the first token of a window
    sep: str  # the token after the question, and after the text
    context_length: int  # the maximum number of tokens in a window
    stride: int  # the tokens of a text that a window has in common with the one before

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast, context_length: int, stride: int) -> "WindowEncoder":
        """One with the tokenizer, [CLS] and [SEP] of a tokenizer of transformers."""
        definition = tokenizer.backend_tokenizer.to_str()
        return cls(definition, tokenizer.cls_token, tokenizer.sep_token, context_length, stride)

    @cached_property
    def backend(self) -> Any:
        """The tokenizer, with [CLS] and [SEP]; their names in a text are text."""
        backend: Any = tokenizers.Tokenizer.from_str(self.definition)
        backend.post_processor = framing(backend, self.cls, self.sep)
        backend.encode_special_tokens = True
        return backend

    def encodings(self, first: str, second: str | None = None, where: str = "") -> list[Any]:
        """The windows of a text, or of a first text, whole in each, and a second one. Windows of a longer text overlap.

        Raises LineartimeError if there is too little room for the text.
        """
        before = 0 if second is None else 1 + len(self.backend.encode(first, add_special_tokens=False))
        room = self.context_length - before - 2
        if room <= self.stride:
            raise LineartimeError(
                f"{where} leaves {max(room, 0):,} tokens of the {self.context_length:,} of a window for its text, of which the "
                f"next window repeats {self.stride:,}: raise `context_length` above {before + 2 + self.stride:,}."
            )
        strategy = "only_first" if second is None else "only_second"
        self.backend.enable_truncation(self.context_length, stride=self.stride, strategy=strategy)
        found = self.backend.encode(first, second)
        self.backend.no_truncation()
        return [found, *found.overflowing]

    def windows(self, question: Question) -> list[Window]:
        """The windows of a question. Raises LineartimeError if it leaves too little room for a text."""
        where = f"The question {question.id}" + f" ({question.key})" * (question.id != question.key)
        found = []
        for each in self.encodings(question.question, question.text, where):
            first = each.type_ids.index(1)
            offsets = np.array(each.offsets[first:-1], dtype=np.int64).reshape(-1, 2)
            found.append(Window(each.ids, first, offsets[:, 0], offsets[:, 1]))
        return found

    def for_training(self, questions: Sequence[Question], seed: int) -> Iterator[dict[str, Any]]:
        """Windows with the tokens of an answer, and at most as many without, of which [CLS] is the answer.

        A question whose answer no window holds whole is left out. One without an answer has a single window.
        Raises LineartimeError if there is no window.
        """
        found = False
        for number, question in enumerate(questions):
            if question.answers and not question.spans:
                continue
            windows = [(window, window.tokens_of(question.spans)) for window in self.windows(question)]
            with_answer, without = ([each for each in windows if (each[1] is None) == empty] for empty in (False, True))
            count = min(len(without), len(with_answer) if question.spans else 1)
            chosen = random.Random(f"{seed} {question.id}").sample(without, count)
            for window, place in (*with_answer, *chosen):
                start, end = place or (0, 0)
                ends = {"start_positions": start, "end_positions": end}
                yield {"input_ids": window.ids, "first": window.first, "question": number, **ends}
                found = True
        if not found:
            size = f"{self.context_length:,} tokens"
            raise LineartimeError(f"No window of {size} holds an answer to train with whole: raise `context_length`.")

    def for_answering(self, questions: Sequence[Question]) -> Iterator[dict[str, Any]]:
        """All windows, with the number of their question and the places of their tokens in its text."""
        for number, question in enumerate(questions):
            for each in self.windows(question):
                places = {"starts": each.starts, "ends": each.ends}
                yield {"input_ids": each.ids, "first": each.first, "question": number, **places}


def dataset_of(generate: Any, options: dict[str, Any], features: datasets.Features, cache: Path) -> datasets.Dataset:
    """Windows on the disk."""
    datasets.disable_progress_bars()
    try:
        return datasets.Dataset.from_generator(generate, features=features, gen_kwargs=options, cache_dir=str(cache))
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
