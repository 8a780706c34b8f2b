"""A stream: one sequence of documents, too large to encode beforehand, that is encoded while it is read.

The datasets library divides the documents over the processes, reads them in their order, and says where it is.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lineartime.data.batches import Batch
from lineartime.data.corpora import Corpus
from lineartime.data.encode import encoded
from lineartime.data.hub import datasets_library, reporting_read_errors
from lineartime.data.loaders import BatchMaker, Rows, in_order
from lineartime.data.readers import pieces
from lineartime.errors import ArgumentError, LineartimeError

State = dict[str, Any]


class _Mark(NamedTuple):
    """The place in the tokens where an example starts, and the epoch and state from which to read it again."""

    place: int
    epoch: int
    source: State | None


class StreamingLoader:
    """Encodes this process's share of the training documents while reading them: a row is the next window of T + 1 tokens.

    The last token of a window is the first of the next. A share that ends starts again.

    Raises LineartimeError for a text that cannot be streamed, or has fewer documents than there are processes; and during
    reading, for text that cannot be read.
    """

    def __init__(self, corpus: Corpus, make: BatchMaker, context_length: int, rows: Rows) -> None:
        sources = corpus.having("train")
        if len(sources) > 1:
            problem = f"is {corpus.name}, but a stream is a single text: give one, or encode them beforehand, without "
            raise ArgumentError("data", problem, "`streaming`", ".")
        self._source, self._make, self._context_length, self._rows = sources[0], make, context_length, rows
        self._source.examples("train")  # raises at once if it cannot be streamed
        self._begin({"epoch": 0, "source": None, "used": 0})
        self._rows_read = 0
        self._buffer: NDArray[np.int64] = next(self._tokens)  # a text that cannot be read is an error now

    def next_step(self) -> list[Batch]:
        """The micro-batches of the next step."""
        numbers = self._rows.of_step(self._rows_read)
        windows = {row: self._window() for row in in_order(numbers)}
        batches = [self._make(torch.from_numpy(np.stack([windows[row] for row in rows])), rows) for rows in numbers]
        self._rows_read += self._rows.per_step
        return batches

    def state(self) -> State:
        """The rows that all processes have read, and this one's oldest unfinished example, with its tokens that were used."""
        while len(self._marks) > 1 and self._marks[1].place <= self._place:
            self._marks.popleft()
        mark = self._marks[0]
        own = {"epoch": mark.epoch, "source": mark.source, "used": self._place - mark.place}
        return {"rows": self._rows_read, "of": self._rows.ranks, "processes": {str(self._rows.rank): own}}

    def restore(self, state: State) -> None:
        """Continue from the merged state of as many processes."""
        if state.get("of") != self._rows.ranks:
            raise LineartimeError(
                f"The run streamed its text to {state.get('of', 'no')} processes and cannot continue in {self._rows.ranks}: "
                "resume it with as many processes and its own options."
            )
        self._rows_read = state["rows"]
        self._begin(state["processes"][str(self._rows.rank)])

    def close(self) -> None:
        """Close the files."""
        self._tokens.close()

    def _begin(self, state: State) -> None:
        self._place = state["used"]  # of the first unread token, counted from the start of the example in `state`
        self._marks = deque([_Mark(0, state["epoch"], state["source"])])
        self._buffer = np.zeros(0, np.int64)
        self._skip = state["used"]
        self._tokens: Any = self._read(state["epoch"], state["source"])

    def _window(self) -> NDArray[np.int64]:
        stop = self._skip + self._context_length + 1
        parts, length = [self._buffer], len(self._buffer)
        while length < stop:
            parts.append(next(self._tokens))
            length += len(parts[-1])
        buffer = np.concatenate(parts)
        window = buffer[self._skip : stop].copy()
        self._place += self._context_length
        self._buffer, self._skip = buffer[stop - 1 :], 0
        return window

    def _read(self, epoch: int, source: State | None) -> Iterator[NDArray[np.int64]]:
        """The tokens from a state on, endlessly; each example leaves a mark."""
        place, tokenizer = 0, self._make.tokenizer
        while True:
            whole, before = source is None, place
            for texts, after in self._examples(source):
                self._marks.append(_Mark(place, epoch, source))
                for part in encoded(tokenizer, map(pieces, texts), 1):
                    ids = np.array([tokenizer.end_of_document]) if part is None else part.ids
                    place += len(ids)
                    yield ids
                source = after
            if whole and place == before:
                found = f"The train split of {self._source.name} has fewer documents than processes ({self._rows.ranks})"
                raise LineartimeError(f"{found}: use fewer processes, encode it beforehand, or give more text.")
            epoch, source = epoch + 1, None

    def _examples(self, state: State | None) -> Iterator[tuple[list[str], State]]:
        """The documents of each example of this process's share, and the state after it."""
        name = self._source.name
        datasets_library(f"Streaming {name}")
        from datasets.distributed import split_dataset_by_node

        with reporting_read_errors(name):
            dataset = split_dataset_by_node(self._source.examples("train"), self._rows.rank, self._rows.ranks)
            if state is not None:
                try:
                    dataset.load_state_dict(state)
                except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # not a state of this text
                    found = f"The checkpoint's position in {name} does not exist in this text"
                    raise LineartimeError(f"{found}: restore the checkpoint from a copy, or train again.") from None
            for example in dataset:
                yield self._source.texts(example), dataset.state_dict()
