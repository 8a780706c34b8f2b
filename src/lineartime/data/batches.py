"""Batches of tokens, and loaders, which yield those of one step after another, for any number of processes, from any step on.

Shapes: B batch, T tokens of context, D documents. A window, or row, holds T + 1 tokens, so that each of the first T has a next
token to predict. `keys` are a seed of random numbers for each window, so that a window does not depend on those beside it.

Rows are numbered from the first row of the run. The text of a row of encoded text depends only on its number, not on the number
of processes or the size of micro-batches.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lineartime.choices import Task
from lineartime.data.corpora import Corpus
from lineartime.data.hub import HubCorpus, datasets_library, reporting_read_errors
from lineartime.data.shards import unmarked
from lineartime.data.tokenizers import Tokenizer
from lineartime.data.tokens import TokenStream
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.ops.cross_entropy import IGNORED

Keys = Sequence[tuple[int, ...]]


class Batch(NamedTuple):
    """Token ids and the targets to predict from them (`IGNORED` where there is none)."""

    inputs: Tensor  # int64 [B, T]; [1, B * T] if documents are packed
    targets: Tensor  # int64, of the same shape
    cu_seqlens: Tensor | None = None  # int32 [D + 1], the boundaries of packed documents
    prefix_lengths: Tensor | None = None  # int64 [B], or [D] for packed documents: the tokens that are read bidirectionally

    def lengths(self) -> Tensor:
        """The number of tokens in each row, or in each packed document: int64 [B] or [D]."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens.diff().long()
        return torch.full(self.inputs.shape[:1], self.inputs.shape[1], device=self.inputs.device)

    def places(self) -> Tensor:
        """The number of tokens before each token in its row or document: int64 [B * T], in the order of the inputs."""
        lengths = self.lengths()
        starts = lengths.cumsum(0) - lengths
        return torch.arange(self.inputs.numel(), device=lengths.device) - starts.repeat_interleave(lengths)


def row_frame(task: Task, tokenizer: Tokenizer, packed: bool = False) -> tuple[int, int] | None:
    """[CLS] and [SEP], around each row of a masked language model whose tokenizer has them; None for packed and other rows."""
    return tokenizer.frame if task == "mlm" and not packed else None


def text_length(context_length: int, task: Task, tokenizer: Tokenizer, packed: bool = False) -> int:
    """The tokens of text in a row of `context_length`, without its frame. Raises ArgumentError if none is left."""
    if row_frame(task, tokenizer, packed) is None:
        return context_length
    if context_length < 3:
        raise ArgumentError("context_length", f"is {context_length}, but must be at least 3: [CLS], a token and [SEP].")
    return context_length - 2


def spread_windows(stream: TokenStream, count: int, context_length: int) -> list[int]:
    """The starts of `count` evenly spaced windows, or of all non-overlapping windows if there are fewer."""
    available = max(1, (len(stream) - 1) // context_length)
    count = min(count, available)
    return [index * available // count * context_length for index in range(count)]


def read_window(stream: TokenStream, start: int, length: int) -> Tensor:
    """Read at most `length` tokens from `start`, as int64; ~x is x, and the end of a document by the file of shards."""
    return torch.from_numpy(stream.tokens[start : start + length].astype(np.int64))


def causal_batch(windows: Tensor) -> Batch:
    """Make a batch in which the target of every token is the next one: windows [B, T + 1] -> [B, T]."""
    return Batch(windows[:, :-1], windows[:, 1:])


def masked_batch(windows: Tensor, tokenizer: Tokenizer, keys: Keys, frame: tuple[int, int] | None = None) -> Batch:
    """Make a batch for BERT's task (arXiv 1810.04805), with 15% of the tokens as targets: windows [B, T + 1] -> [B, T].

    Of the selected tokens, 80% are masked, 10% are replaced by random tokens and 10% are unchanged. Ends of documents and
    masks are never selected. The last token of each window is left out, so that both tasks read the same number of tokens.
    With a frame, its tokens are before and after these: [B, T + 2].
    """
    ids = windows[:, :-1]
    if frame is not None:
        ids = F.pad(F.pad(ids, (1, 0), value=frame[0]), (0, 1), value=frame[1])
    draws = [np.random.default_rng(key) for key in keys]
    chance = torch.from_numpy(np.stack([random.random((2, ids.shape[1])) for random in draws]))
    other = torch.from_numpy(np.stack([random.integers(0, tokenizer.vocab_size, ids.shape[1]) for random in draws]))
    special = torch.tensor([tokenizer.end_of_document, tokenizer.mask, *(frame or ())], device=ids.device)
    selected = (chance[:, 0] < 0.15) & ~torch.isin(ids, special)
    fate = chance[:, 1]
    inputs = torch.where(selected & (fate < 0.8), tokenizer.mask, ids)
    inputs = torch.where(selected & (fate >= 0.8) & (fate < 0.9), other, inputs)
    return Batch(inputs, torch.where(selected, ids, IGNORED))


def packed_batch(batch: Batch, ends: Tensor) -> Batch:
    """Join the rows of a batch [B, T] into one, [1, B * T], and mark the boundaries of its documents.

    A document starts at the beginning of a row and after each token that is marked as the end of one, bool [B, T], which
    therefore has no target.
    """
    targets = torch.where(ends, IGNORED, batch.targets)
    last = ends.clone()
    last[:, -1] = True
    boundaries = last.flatten().nonzero().flatten() + 1
    cu_seqlens = torch.cat([boundaries.new_zeros(1), boundaries]).to(torch.int32)
    return Batch(batch.inputs.reshape(1, -1), targets.reshape(1, -1), cu_seqlens)


def prefix_batch(batch: Batch, prefix_lengths: Tensor) -> Batch:
    """Add a prefix of the given length, int64 [B] or [D], to each row or packed document of a batch.

    The last token of a prefix and all tokens after it keep their targets. Earlier tokens lose theirs, because they have
    already read the next token.
    """
    hidden = (batch.places() < (prefix_lengths - 1).repeat_interleave(batch.lengths())).view(batch.inputs.shape)
    return batch._replace(targets=batch.targets.masked_fill(hidden, IGNORED), prefix_lengths=prefix_lengths)


def draw_prefix_lengths(batch: Batch, keys: Keys) -> Tensor:
    """Draw a prefix length for each row or packed document of n tokens, uniform over 0 to n - 1, so that a target is left."""
    lengths = batch.lengths()
    starts = lengths.cumsum(0) - lengths
    # Draw a number for every token, so that the length of a document depends only on its window.
    tokens = batch.inputs.numel() // len(keys)
    chance = torch.from_numpy(np.stack([np.random.default_rng(key).random(tokens) for key in keys])).flatten()
    return (chance[starts] * lengths).long()


def make_batch(
    task: Task, windows: Tensor, tokenizer: Tokenizer, masks: Keys, prefixes: Keys | None = None, packed: bool = False
) -> Batch:
    """Make the batch of a task from windows, int64 [B, T + 1], that a tokenizer encoded.

    "mlm" draws its masks by the keys `masks`, and has rows with a frame; "prefix-lm" draws prefixes by the keys `prefixes`, and
    without them, half of each row is its prefix. If `packed`, documents are kept apart.
    """
    ends = (windows[:, :-1] < 0) | (windows[:, :-1] == tokenizer.end_of_document)
    frame, windows = row_frame(task, tokenizer, packed), unmarked(windows)
    batch = masked_batch(windows, tokenizer, masks, frame) if task == "mlm" else causal_batch(windows)
    if packed:
        batch = packed_batch(batch, ends)
    if task == "prefix-lm":
        return prefix_batch(batch, batch.lengths() // 2 if prefixes is None else draw_prefix_lengths(batch, prefixes))
    return batch


def evaluation_batch(
    task: Task, windows: Tensor, tokenizer: Tokenizer, numbers: Sequence[int], *, packed: bool = False
) -> Batch:
    """Make a batch for evaluation: half of each row is its prefix, and masks depend only on the number of a window."""
    return make_batch(task, windows, tokenizer, [(0, number) for number in numbers], packed=packed)


# Loaders -----------------------------------------------------------------------------------------------------------------

_OFFSET, _ORDER, _MASKS, _PREFIXES = range(4)  # purposes of random numbers: one seed gives other numbers for each


@dataclass(frozen=True)
class Rows:
    """How the rows of a step are distributed over processes and micro-batches.

    Rows i with equal i % groups form a group. A process computes the micro-batches of one group after those of another.

    Raises LineartimeError unless every process gets the same number of micro-batches of the same size.
    """

    per_step: int  # rows in an optimiser step, over all processes
    at_once: int  # rows in a micro-batch of one process
    rank: int = 0  # this process; it gets every row i with i % ranks == rank
    ranks: int = 1  # the number of processes that read different rows
    groups: int = 0  # the number of groups in a step, a multiple of `ranks`; 0 means `ranks`

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


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the states of all processes after the same step into the state of the run."""
    if len({state["rows"] for state in states}) > 1:
        raise ArgumentError("states", "are from different steps: merge those of one step.")
    processes = {rank: own for state in states for rank, own in state.get("processes", {}).items()}
    return {**states[0], "processes": processes} if processes else states[0]


@dataclass(frozen=True)
class BatchMaker:
    """Makes batches for a task from windows [B, T + 1] and the numbers of their rows.

    If `packed`, no token attends across the end of a document, and the end-of-document token has no target. Windows are cut as
    without packing, so there is no padding.
    """

    tokenizer: Tokenizer  # that encoded the text
    task: Task
    seed: int = 0  # of the masks or prefix lengths, and of the order in which encoded text is read
    packed: bool = False

    def __call__(self, windows: Tensor, rows: Sequence[int]) -> Batch:
        """Make the batch of these windows."""
        masks, prefixes = ([(self.seed, purpose, row) for row in rows] for purpose in (_MASKS, _PREFIXES))
        return make_batch(self.task, windows, self.tokenizer, masks, prefixes, self.packed)


State = dict[str, Any]


class Loader(ABC):
    """Yields this process's share of one step after another, endlessly; the next step is prepared in a thread."""

    def __init__(self, make: BatchMaker, context_length: int, rows: Rows) -> None:
        self._make, self._context_length, self._rows = make, context_length, rows
        self._rows_read = 0
        self._state: State | None = None
        self._thread = ThreadPoolExecutor(1, "lineartime-data")
        self._ahead: Future[tuple[list[Batch], State]] | None = None

    def next_step(self) -> list[Batch]:
        """The micro-batches of the next step. Raises any error that occurred while preparing them, also when called again."""
        self._ahead = self._ahead or self._thread.submit(self._prepare)
        batches, self._state = self._ahead.result()
        self._ahead = self._thread.submit(self._prepare)
        return batches

    def state(self) -> State:
        """The position after the last step, as plain JSON for `restore`; `merge_states` joins those of all processes."""
        return self._position() if self._state is None else self._state

    def restore(self, state: State) -> None:
        """Continue from the merged state of a run.

        Raises LineartimeError if that run read its text in a different way.
        """
        if self._ahead is not None:
            self._ahead.exception()  # waits for the step that is being prepared
        self._ahead = None
        self._seek(state)
        self._rows_read, self._state = state["rows"], None

    def close(self) -> None:
        """Stop the thread, when it has prepared its step; no step may follow."""
        self._thread.shutdown()

    def _prepare(self) -> tuple[list[Batch], State]:
        numbers = self._rows.of_step(self._rows_read)
        windows = {row: self._window(row) for row in sorted(chain(*numbers))}
        batches = [self._make(torch.stack([windows[row] for row in rows]), rows) for rows in numbers]
        self._rows_read += self._rows.per_step
        return batches, self._position()

    @abstractmethod
    def _window(self, row: int) -> Tensor:
        """The tokens of a row, int64 [T + 1]; rows are asked for in ascending order."""

    def _position(self) -> State:
        return {"rows": self._rows_read}  # of all processes

    @abstractmethod
    def _seek(self, state: State) -> None: ...


class CachedLoader(Loader):
    """Reads encoded text in adjacent windows, each once per epoch. The order and the offset depend on the epoch.

    A run may continue with any number of processes.

    Raises LineartimeError if the stream is shorter than one window, of `context_length` + 1 tokens.
    """

    def __init__(self, stream: TokenStream, make: BatchMaker, context_length: int, rows: Rows) -> None:
        super().__init__(make, context_length, rows)
        if len(stream) < context_length + 1:
            found = f"There are {len(stream)} tokens in {stream.name}, fewer than a context and the token after it"
            raise LineartimeError(f"{found} ({context_length + 1}): give more text, or a smaller `context_length`.")
        self._stream = stream
        self._begin_epoch(0, 0)

    def _begin_epoch(self, number: int, first_row: int) -> None:
        length, context = len(self._stream), self._context_length
        self._epoch, self._first_row = number, first_row
        # The offset leaves at least one window, and shifts the boundaries of windows from epoch to epoch.
        random = np.random.default_rng((self._make.seed, _OFFSET, number))
        self._offset = int(random.integers(0, min(context, length - context)))
        self._windows = (length - 1 - self._offset) // context
        self._order: NDArray[np.uint32] | None = None  # not needed for the epochs that a resumed run skips

    def _window(self, row: int) -> Tensor:
        while row >= self._first_row + self._windows:
            self._begin_epoch(self._epoch + 1, self._first_row + self._windows)
        if self._order is None:
            self._order = np.arange(self._windows, dtype=np.uint32)  # half the memory of a permutation, and the same order
            np.random.default_rng((self._make.seed, _ORDER, self._epoch)).shuffle(self._order)
        start = self._offset + int(self._order[row - self._first_row]) * self._context_length
        return read_window(self._stream, start, self._context_length + 1)

    def _seek(self, state: State) -> None:
        if "processes" in state:
            streamed = "The run streamed its text, and cannot continue with encoded text"
            raise LineartimeError(f"{streamed}: resume it with its options.")
        self._begin_epoch(0, 0)


class StreamingLoader(Loader):
    """Encodes this process's share of a data set of the hub while reading it: a row is the next window of T + 1 tokens.

    The last token of a window is the first of the next. A share that ends starts again. A run continues with as many processes.

    Raises LineartimeError for a text that cannot be streamed, or has fewer documents than there are processes; and during
    reading, for text that cannot be read.
    """

    def __init__(self, corpus: Corpus, make: BatchMaker, context_length: int, rows: Rows) -> None:
        super().__init__(make, context_length, rows)
        source, *others = corpus.having("train")
        if others or not isinstance(source, HubCorpus) or source.lines:
            problem = f"is {corpus.name}, but a stream is one data set of the hub whose rows are documents"
            raise ArgumentError("data", f"{problem}: give one, or encode the text beforehand, without `streaming`.")
        self._source = source
        self._begin(0, None, 0)  # a text that cannot be read is an error now

    def _begin(self, epoch: int, source: State | None, used: int) -> None:
        self._examples = self._read(epoch, source)
        self._held = deque([next(self._examples)])
        self._used = used  # tokens of the first example that is held

    def _window(self, row: int) -> Tensor:
        stop = self._used + self._context_length + 1
        length = sum(len(ids) for _, ids in self._held)
        while length < stop:
            self._held.append(next(self._examples))
            length += len(self._held[-1][1])
        window = torch.from_numpy(np.concatenate([ids for _, ids in self._held])[self._used : stop])
        self._used += self._context_length
        while self._used >= len(self._held[0][1]):
            self._used -= len(self._held.popleft()[1])
        return window

    def _position(self) -> State:
        own = {**self._held[0][0], "used": self._used}
        return {**super()._position(), "of": self._rows.ranks, "processes": {str(self._rows.rank): own}}

    def _seek(self, state: State) -> None:
        if state.get("of") != self._rows.ranks:
            raise LineartimeError(
                f"The run streamed its text to {state.get('of', 'no')} processes and cannot continue in {self._rows.ranks}: "
                "resume it with as many processes and its own options."
            )
        self._begin(**state["processes"][str(self._rows.rank)])

    def _read(self, epoch: int, source: State | None) -> Iterator[tuple[State, NDArray[np.int64]]]:
        """Where to read each example of this process's share again, and its tokens, endlessly, without empty ones."""
        name, tokenizer = self._source.name, self._make.tokenizer
        datasets_library(f"Streaming {name}")
        from datasets.distributed import split_dataset_by_node

        while True:
            is_empty = source is None
            with reporting_read_errors(name):
                dataset = split_dataset_by_node(self._source.examples("train"), self._rows.rank, self._rows.ranks)
                if source is not None:
                    try:
                        dataset.load_state_dict(source)
                    except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # not a state of this text
                        found = f"The checkpoint's position in {name} does not exist in this text"
                        raise LineartimeError(f"{found}: restore the checkpoint from a copy, or train again.") from None
                for example in dataset:
                    ids = tokenizer.encode_batch([text for text in self._source.texts(example) if text])
                    if ids:
                        tokens = np.concatenate([np.append(x, tokenizer.end_of_document) for x in ids])
                        yield {"epoch": epoch, "source": source}, tokens
                        is_empty = False
                    source = dataset.state_dict()
            if is_empty:
                found = f"The train split of {name} has fewer documents than processes ({self._rows.ranks})"
                raise LineartimeError(f"{found}: use fewer processes, encode it beforehand, or give more text.")
            epoch, source = epoch + 1, None
