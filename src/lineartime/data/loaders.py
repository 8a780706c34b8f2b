"""Loaders yield the batches of one training step after another, for any number of processes, starting at any step.

Rows (windows of T + 1 tokens) are numbered from the first row of the run. The text of a row of encoded text depends only on its
number, not on the number of processes or the size of micro-batches.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lineartime.choices import Task
from lineartime.data.batches import Batch, draw_prefix_lengths, make_batch, read_window
from lineartime.data.corpora import Corpus
from lineartime.data.folders import pieces
from lineartime.data.hub import datasets_library, reporting_read_errors
from lineartime.data.tokenizers import Tokenizer
from lineartime.data.tokens import TokenStream, encoded
from lineartime.errors import ArgumentError, LineartimeError

_OFFSET, _ORDER, _MASKS, _PREFIXES = range(4)  # purposes of random numbers: one seed gives other numbers for each


@dataclass(frozen=True)
class Rows:
    """How the rows of a step are distributed over processes and micro-batches.

    Raises LineartimeError unless every process gets the same number of micro-batches of the same size.

    Attributes:
        per_step: rows in an optimiser step, over all processes.
        at_once: rows in a micro-batch of one process.
        rank: this process; it gets every row i with i % ranks == rank.
        ranks: the number of processes that read different rows.
        groups: the number of groups in a step; rows i with equal i % groups form a group. A multiple of `ranks`; 0 means
            `ranks`. A process computes the micro-batches of one group after those of another.
    """

    per_step: int
    at_once: int
    rank: int = 0
    ranks: int = 1
    groups: int = 0

    def __post_init__(self) -> None:
        if self.per_step < 1 or self.at_once < 1 or self.per_step % (self.at_once * self.ranks):
            raise LineartimeError(
                f"A step of {self.per_step} sequences cannot be distributed over {self.ranks} processes in batches of "
                f"{self.at_once}: use a multiple of {self.at_once * self.ranks} sequences."
            )

    def of_step(self, first: int) -> list[list[int]]:
        """The numbers of this process's rows, by micro-batch, in the step that starts with row `first`."""
        groups = self.groups or self.ranks
        batches = []
        for group in range(self.rank, groups, self.ranks):
            rows = range(first + group, first + self.per_step, groups)
            batches += [list(rows[start : start + self.at_once]) for start in range(0, len(rows), self.at_once)]
        return batches


class Loader(Protocol):
    """Yields this process's share of one step after another, endlessly."""

    def next_step(self) -> list[Batch]:
        """The micro-batches of the next step."""

    def state(self) -> dict[str, Any]:
        """The position after the last step, as plain JSON for `restore`; `merge_states` joins those of all processes."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the merged state of a run with any number of processes.

        Raises LineartimeError if that run read its text in a different way.
        """

    def close(self) -> None:
        """Release files and threads; no step may follow."""


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the states of all processes after the same step into the state of the run."""
    merged = dict(states[0])
    for state in states[1:]:
        if state["rows"] != merged["rows"]:
            after = f"after {merged['rows']} rows and after {state['rows']}"
            raise ArgumentError("states", f"are from different steps, {after}: merge those of one step.")
        if "processes" in state:
            merged["processes"] = {**merged["processes"], **state["processes"]}
    return merged


@dataclass(frozen=True)
class BatchMaker:
    """Makes batches for a task from windows [B, T + 1] and the numbers of their rows.

    Attributes:
        tokenizer: the tokenizer that encoded the text.
        task: "clm", "mlm" or "prefix-lm".
        seed: the seed of the masks or prefix lengths, and of the order in which encoded text is read.
        packed: whether documents are kept apart: no token attends across the end of a document, and the end-of-document token
            has no target. Windows are cut as without packing, so there is no padding.
    """

    tokenizer: Tokenizer
    task: Task
    seed: int = 0
    packed: bool = False

    def __call__(self, windows: Tensor, rows: Sequence[int]) -> Batch:
        """Make the batch of these windows."""
        masks, prefixes = ([(self.seed, purpose, row) for row in rows] for purpose in (_MASKS, _PREFIXES))
        lengths = partial(draw_prefix_lengths, keys=prefixes)
        return make_batch(self.task, windows, self.tokenizer, masks, lengths, self.packed)


class CachedLoader:
    """Reads encoded text in adjacent windows, each once per epoch. The order and the offset depend on the epoch.

    Raises LineartimeError if the stream is shorter than one window, of `context_length` + 1 tokens.
    """

    def __init__(self, stream: TokenStream, make: BatchMaker, context_length: int, rows: Rows) -> None:
        if len(stream) < context_length + 1:
            found = f"There are {len(stream)} tokens in {stream.name}, fewer than a context and the token after it"
            advice = f" ({context_length + 1}): give more text, or a smaller "
            raise LineartimeError(found + advice, "`context_length`.")
        self._stream = stream
        self._make = make
        self._context_length = context_length
        self._rows = rows
        self._rows_read = 0
        self._epoch = self._first_epoch = self._make_epoch(0, 0)

    def next_step(self) -> list[Batch]:
        """The micro-batches of the next step."""
        length = self._context_length + 1
        numbers = self._rows.of_step(self._rows_read)
        starts = {row: self._start(row) for row in sorted(chain(*numbers))}

        def windows(rows: list[int]) -> Tensor:
            return torch.stack([read_window(self._stream, starts[row], length) for row in rows])

        batches = [self._make(windows(rows), rows) for rows in numbers]
        self._rows_read += self._rows.per_step
        return batches

    def state(self) -> dict[str, Any]:
        """The number of rows that all processes have read; nothing else is needed."""
        return {"rows": self._rows_read}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the recorded number of rows. Raises LineartimeError if the run streamed its text."""
        if "processes" in state:
            raise LineartimeError(
                "The run streamed its text, and cannot continue with encoded text: resume it with its options."
            )
        self._rows_read = state["rows"]
        self._epoch = self._first_epoch

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _start(self, row: int) -> int:
        """The start of a row in the stream. Rows must be requested in ascending order."""
        while row >= self._epoch.first_row + self._epoch.windows:
            self._epoch = self._make_epoch(self._epoch.number + 1, self._epoch.first_row + self._epoch.windows)
        return self._epoch.offset + int(self._epoch.order[row - self._epoch.first_row]) * self._context_length

    def _make_epoch(self, number: int, first_row: int) -> "_Epoch":
        length, context = len(self._stream), self._context_length
        # The offset leaves at least one window, and shifts the boundaries of windows from epoch to epoch.
        random = np.random.default_rng((self._make.seed, _OFFSET, number))
        offset = int(random.integers(0, min(context, length - context)))
        return _Epoch(self._make.seed, number, first_row, offset, (length - 1 - offset) // context)


@dataclass(frozen=True)
class _Epoch:
    seed: int
    number: int
    first_row: int
    offset: int
    windows: int

    @cached_property  # not needed for the epochs that a resumed run skips
    def order(self) -> NDArray[np.int64]:
        return np.random.default_rng((self.seed, _ORDER, self.number)).permutation(self.windows)


class PrefetchedLoader:
    """A loader that prepares the next step in a thread; its state is that after the last step it returned."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._state = loader.state()
        self._thread = ThreadPoolExecutor(1, "lineartime-data")
        self._ahead: Future[tuple[list[Batch], dict[str, Any]]] | None = None

    def next_step(self) -> list[Batch]:
        """The micro-batches of the next step. Raises any error that occurred while preparing them, also when called again."""
        self._ahead = self._ahead or self._thread.submit(self._prepare)
        batches, self._state = self._ahead.result()
        self._ahead = self._thread.submit(self._prepare)
        return batches

    def state(self) -> dict[str, Any]:
        """The state of the loader after the last step returned."""
        return self._state

    def restore(self, state: dict[str, Any]) -> None:
        """Discard the prepared step and continue from another state."""
        self._discard()
        self._loader.restore(state)
        self._state = state

    def close(self) -> None:
        """Stop the thread and close the loader."""
        self._discard()
        self._thread.shutdown()
        self._loader.close()

    def _prepare(self) -> tuple[list[Batch], dict[str, Any]]:
        return self._loader.next_step(), self._loader.state()

    def _discard(self) -> None:
        if self._ahead is not None:
            self._ahead.exception()  # waits for the step that is being prepared
        self._ahead = None


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
        windows = {row: self._window() for row in sorted(chain(*numbers))}
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
                    ids = part.ids if part.right.text else np.append(part.ids, tokenizer.end_of_document)
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
