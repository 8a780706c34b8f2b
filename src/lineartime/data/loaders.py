"""What a training loop reads: the batches of one step after another, by any number of processes, from any step on.

Rows (windows of T + 1 tokens) are numbered from the first one of the run. Which text stands in a row depends on its number
alone, never on the number of processes or on how many rows are computed at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lineartime.data.batches import Batch, causal_batch, check_long_enough, masked_batch, packed_batch, read_window
from lineartime.data.tokenizers import Tokenizer
from lineartime.data.tokens import TokenStream
from lineartime.errors import LineartimeError
from lineartime.models.config import Task

_OFFSET, _ORDER, _MASKS = range(3)  # what random numbers are drawn for: a seed must not give the same ones to all


@dataclass(frozen=True)
class Rows:
    """How the rows of a step are dealt out.

    Attributes:
        per_step: rows in one optimiser step, over all processes.
        at_once: rows in each micro-batch of one process.
        rank: this process; it gets every row i with i % ranks == rank.
        ranks: the number of processes that learn from different rows.

    Raises:
        LineartimeError: unless every process gets the same number of micro-batches, all of the same size.
    """

    per_step: int
    at_once: int
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.per_step < 1 or self.at_once < 1 or self.per_step % (self.at_once * self.ranks):
            raise LineartimeError(
                f"A step of {self.per_step} sequences cannot be dealt out to {self.ranks} processes in batches of "
                f"{self.at_once}: the sequences of a step must be a multiple of {self.at_once * self.ranks}."
            )

    def of_step(self, first: int) -> list[list[int]]:
        """The numbers of this process's rows in each micro-batch of the step that begins with row `first`."""
        mine = range(first + self.rank, first + self.per_step, self.ranks)
        return [list(mine[start : start + self.at_once]) for start in range(0, len(mine), self.at_once)]


class Loader(Protocol):
    """Hands out this process's share of one step after another, without end."""

    def next_step(self) -> list[Batch]:
        """The micro-batches of the next step."""

    def state(self) -> dict[str, Any]:
        """Plain JSON from which `restore` goes on after the last step handed out; see `merge_states` for several processes."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where a run, of any number of processes, stood; LineartimeError if that run read something else."""

    def close(self) -> None:
        """Let go of files and threads; nothing is handed out any more."""


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of a run from those of all its processes after the same step."""
    merged = dict(states[0])
    for state in states[1:]:
        if state["rows"] != merged["rows"]:
            raise ValueError(f"The states are of different steps: after {merged['rows']} rows and after {state['rows']}.")
        if "lanes" in state:
            merged["lanes"] = {**merged["lanes"], **state["lanes"]}
    return merged


@dataclass(frozen=True)
class BatchMaker:
    """Makes batches for a task from windows [B, T + 1] and the numbers of their rows."""

    tokenizer: Tokenizer
    task: Task
    seed: int
    packed: bool

    def __call__(self, windows: Tensor, rows: Sequence[int]) -> Batch:
        """The batch of these windows."""
        if self.task == "clm":
            batch = causal_batch(windows)
        else:
            batch = masked_batch(windows, self.tokenizer, [(self.seed, _MASKS, row) for row in rows])
        return packed_batch(batch, windows, self.tokenizer.end_of_document) if self.packed else batch


class CachedLoader:
    """Reads a token stream in windows that lie side by side, each once an epoch, in an order of the epoch's own."""

    def __init__(self, stream: TokenStream, make: BatchMaker, context_length: int, rows: Rows) -> None:
        check_long_enough(stream, context_length)
        self._stream = stream
        self._make = make
        self._context_length = context_length
        self._rows = rows
        self._handed_out = 0
        self._epoch = self._first_epoch = self._make_epoch(0, 0)

    def next_step(self) -> list[Batch]:
        """The micro-batches of the next step."""
        length = self._context_length + 1
        numbers = self._rows.of_step(self._handed_out)
        starts = [[self._start(row) for row in rows] for rows in numbers]
        self._stream.announce([(start, start + length) for batch in starts for start in batch])
        batches = []
        for rows, places in zip(numbers, starts, strict=True):
            windows = torch.stack([read_window(self._stream, start, length) for start in places])
            batches.append(self._make(windows, rows))
        self._handed_out += self._rows.per_step
        return batches

    def state(self) -> dict[str, Any]:
        """How many rows were handed out to all processes: all that matters."""
        return {"rows": self._handed_out}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on after that many rows."""
        if "lanes" in state:
            raise LineartimeError(
                "The run streamed its text and cannot go on with encoded text: resume it with its own options."
            )
        self._handed_out = state["rows"]
        self._epoch = self._first_epoch

    def close(self) -> None:
        """Nothing is to be let go of."""

    def _start(self, row: int) -> int:
        """Where in the stream a row begins; rows are asked for in rising order."""
        while row >= self._epoch.first_row + self._epoch.windows:
            self._epoch = self._make_epoch(self._epoch.number + 1, self._epoch.first_row + self._epoch.windows)
        place: int = self._epoch.order[row - self._epoch.first_row]
        return self._epoch.offset + int(place) * self._context_length

    def _make_epoch(self, number: int, first_row: int) -> "_Epoch":
        length, context = len(self._stream), self._context_length
        # The shift leaves at least one window, and lets windows end at other tokens in each epoch.
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

    @cached_property  # a run that goes on passes by many epochs whose order it needs no more
    def order(self) -> NDArray[np.int64]:
        return np.random.default_rng((self.seed, _ORDER, self.number)).permutation(self.windows)


def cached_loader(
    stream: TokenStream,
    tokenizer: Tokenizer,
    *,
    task: Task,
    context_length: int,
    rows: Rows,
    seed: int,
    packed: bool = False,
) -> Loader:
    """Read encoded text: windows at multiples of T, shifted by an offset of the epoch, each once an epoch.

    Args:
        stream: what to read.
        tokenizer: the one that encoded it.
        task: what is to be foretold.
        context_length: T.
        rows: which rows this process gets, and how many at once.
        seed: of the order, the offsets and the masks.
        packed: whether documents are parted from each other. A document is then cut where a window begins, and only there:
            no token is padding, nothing is read across the end of a document, and its end foretells nothing.

    Raises:
        LineartimeError: if the stream is shorter than one window.
    """
    return CachedLoader(stream, BatchMaker(tokenizer, task, seed, packed), context_length, rows)
