"""Streaming: documents of corpora too large to encode beforehand are encoded as they are read, in independent lanes.

A corpus is divided into a fixed number of lanes, and row i of a run comes from lane i % lanes, so that the order of the text
does not depend on the number of processes. Lanes start in different files, which mixes the documents. The documents of a lane
can also be shuffled, in blocks of the next N documents, so that a run can resume anywhere: the shuffle buffer of the datasets
library mixes over longer distances, but gives examples again after a resume.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lineartime.data.batches import Batch
from lineartime.data.corpora import Corpus, Source
from lineartime.data.encode import encoded
from lineartime.data.hub import reporting_read_errors
from lineartime.data.loaders import BatchMaker, Rows, in_order
from lineartime.data.readers import pieces
from lineartime.data.tokenizers import Tokenizer
from lineartime.errors import ArgumentError, LineartimeError

State = dict[str, Any]
Documents = Iterator[tuple[list[str], State]]
"""For each example, its documents and the state after it as plain JSON."""


def stream_documents(corpus: Corpus, lane: int, lanes: int, state: State | None) -> Documents:
    """Make one pass over the share of a lane, from 0 to lanes - 1, of the training split, from a state of an earlier pass.

    In a corpus of several sources, the lanes start with different ones. With at least as many files as lanes, each lane has its
    own files. With fewer files, several lanes read the same file and take turns with its documents.

    Raises LineartimeError for a corpus that cannot be read or streamed, or has no training split.
    """
    sources = corpus.having("train")
    if len(sources) == 1:
        yield from _documents(sources[0], lane, lanes, state)
        return
    done = 0 if state is None else state.get("sources")
    if type(done) is not int or not 0 <= done < len(sources):
        raise _no_position(sources[0].name)
    for number in range(done, len(sources)):
        source = sources[(lane + number) % len(sources)]
        within = None if state is None or number > done else state.get("within")
        for texts, after in _documents(source, lane, lanes, within):
            yield texts, {"sources": number, "within": after}


def _documents(source: Source, lane: int, lanes: int, state: State | None) -> Documents:
    with reporting_read_errors(source.name):
        dataset = _share(source.examples("train"), lane, lanes)
        if state is not None:
            try:
                dataset.load_state_dict(state)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # not a state of this text
                raise _no_position(source.name) from None
        for example in dataset:
            yield source.texts(example), dataset.state_dict()


def _share(dataset: Any, lane: int, lanes: int) -> Any:
    from datasets.distributed import split_dataset_by_node

    files: int = dataset.num_shards
    if files >= lanes:
        return dataset.shard(num_shards=lanes, index=lane)
    sharing = len(range(lane % files, lanes, files))  # the lanes that read the same file
    return split_dataset_by_node(dataset.shard(num_shards=files, index=lane % files), lane // files, sharing)


def shuffled(
    read: Callable[[State | None], Documents], block_size: int, seed: Sequence[int], state: State | None, name: str
) -> Documents:
    """Shuffle the examples that `read` yields from a state, in blocks of `block_size`, and yield them with other states.

    The order depends on the seed and the number of the block. A state is where the block starts and how many of its documents
    have been yielded; `state`, None for the beginning, is one of an earlier pass. `name` is that of the text in messages.

    Raises LineartimeError for a state that does not belong to this stream.
    """
    match {"block": 0, "done": 0, "begin": None} if state is None else state:
        case {"block": int(number), "done": int(done), "begin": None | dict() as begin} if number >= 0 and done >= 0:
            stream = read(begin)
        case _:
            raise _no_position(name)
    while True:
        block = list(islice(stream, block_size))
        if done and done >= len(block):
            raise _no_position(name)
        if not block:
            return
        order = np.random.default_rng([*seed, number]).permutation(len(block))
        for place in range(done, len(block) - 1):
            yield block[order[place]][0], {"block": number, "done": place + 1, "begin": begin}
        number, done, begin = number + 1, 0, block[-1][1]
        yield block[order[-1]][0], {"block": number, "done": done, "begin": begin}


def _no_position(name: str) -> LineartimeError:
    return LineartimeError(
        f"The checkpoint's position in {name} does not exist in this text: restore the checkpoint from a copy, or train again."
    )


class _Mark(NamedTuple):
    """The place in a lane where an example starts, and the epoch and state from which to read it again."""

    place: int
    epoch: int
    source: State | None


class _Lane:
    """An endless stream of one share of the text, with every token once per epoch. `shuffle`: see `StreamingLoader`."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, lane: int, lanes: int, shuffle: int = 0, seed: int = 0) -> None:
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._lane = lane
        self._lanes = lanes
        self._shuffle = shuffle
        self._seed = seed
        self.restore({"epoch": 0, "source": None, "used": 0})

    def restore(self, state: State) -> None:
        self._place = 0  # of the first token in the buffer, counted from the start of the example in `state`
        self._used = state["used"]  # tokens to skip; they are read only when needed
        self._marks = deque([_Mark(0, state["epoch"], state["source"])])
        self._buffer: NDArray[np.int64] = np.zeros(0, np.int64)
        self._tokens = self._read(state["epoch"], state["source"])

    def begin(self) -> None:
        """Read the first tokens. Raises LineartimeError for text that cannot be read, or if there is none in this lane."""
        self._buffer = next(self._tokens)

    def state(self) -> State:
        """The state for `restore`: where the oldest unfinished example starts, and how many of its tokens have been used."""
        place = self._place + self._used
        while len(self._marks) > 1 and self._marks[1].place <= place:
            self._marks.popleft()
        mark = self._marks[0]
        return {"epoch": mark.epoch, "source": mark.source, "used": place - mark.place}

    def window(self, context_length: int) -> NDArray[np.int64]:
        """The next T + 1 tokens; the last of them is the first of the next window."""
        wanted = self._used + context_length + 1
        parts, length = [self._buffer], len(self._buffer)
        while length < wanted:
            parts.append(next(self._tokens))
            length += len(parts[-1])
        buffer = np.concatenate(parts) if len(parts) > 1 else self._buffer
        window = buffer[self._used : wanted].copy()
        self._place += wanted - 1
        self._buffer = buffer[wanted - 1 :]
        self._used = 0
        return window

    def close(self) -> None:
        self._tokens.close()

    def _read(self, epoch: int, source: State | None) -> Any:
        place = 0
        while True:
            from_the_beginning, before = source is None, place
            for texts, after in self._documents(epoch, source):
                self._marks.append(_Mark(place, epoch, source))
                for part in encoded(self._tokenizer, map(pieces, texts), 1):
                    ids = np.array([self._tokenizer.end_of_document]) if part is None else part.ids
                    place += len(ids)
                    yield ids
                source = after
            if from_the_beginning and place == before:
                raise LineartimeError(
                    f"The train split of {self._corpus.name} has fewer documents than lanes ({self._lanes}): use fewer "
                    "lanes, encode it beforehand, or give more text."
                )
            epoch, source = epoch + 1, None

    def _documents(self, epoch: int, state: State | None) -> Documents:
        read = partial(stream_documents, self._corpus, self._lane, self._lanes)
        if not self._shuffle:
            return read(state)
        return shuffled(read, self._shuffle, (self._seed, self._lane, epoch), state, self._corpus.name)


class StreamingLoader:
    """Encodes the training split of a corpus while reading it: row i is the next window of lane i % lanes.

    A process reads only the lanes of its rows. A lane that ends starts again, independently of the others. `shuffle` documents
    of a lane are shuffled together, in an order that depends on the seed of `make`; 0 is for no shuffling.

    Raises LineartimeError if `lanes` is not a multiple of the number of processes; for a corpus that cannot be streamed, or has
    fewer documents than lanes; and during reading, for text that cannot be read.
    """

    def __init__(self, corpus: Corpus, make: BatchMaker, context_length: int, rows: Rows, lanes: int, shuffle: int = 0) -> None:
        if lanes < 1 or lanes % rows.ranks:
            found = f"is {lanes}, but {rows.ranks} processes need a multiple of {rows.ranks}"
            advice = "use another number of lanes in a new run, or a number of processes that divides the lanes"
            raise ArgumentError("lanes", f"{found}: {advice}.")
        for source in corpus.having("train"):
            source.examples("train")  # raises at once if it cannot be streamed
        self._make = make
        self._context_length = context_length
        self._rows = rows
        self._count = lanes
        self._rows_read = 0
        self._lanes = {
            lane: _Lane(corpus, make.tokenizer, lane, lanes, shuffle, make.seed) for lane in range(rows.rank, lanes, rows.ranks)
        }
        for each in self._lanes.values():  # a lane may be read for the first time after many steps
            each.begin()

    def next_step(self) -> list[Batch]:
        """The micro-batches of the next step."""
        numbers = self._rows.of_step(self._rows_read)
        windows = {row: self._lanes[row % self._count].window(self._context_length) for row in in_order(numbers)}
        batches = [self._make(torch.from_numpy(np.stack([windows[row] for row in rows])), rows) for rows in numbers]
        self._rows_read += self._rows.per_step
        return batches

    def state(self) -> State:
        """The number of rows that all processes have read, and the state of each lane of this process."""
        lanes = {str(number): lane.state() for number, lane in self._lanes.items()}
        return {"rows": self._rows_read, "of": self._count, "lanes": lanes}

    def restore(self, state: State) -> None:
        """Continue from a state of all lanes; the lanes of other processes are ignored."""
        if state.get("of") != self._count or not {str(lane) for lane in self._lanes} <= state["lanes"].keys():
            raise LineartimeError(
                f"The run read its text in {state.get('of', 'no')} lanes and cannot continue in {self._count}: resume it with "
                "its own options."
            )
        self._rows_read = state["rows"]
        for number, lane in self._lanes.items():
            lane.restore(state["lanes"][str(number)])

    def close(self) -> None:
        """Close the files."""
        for lane in self._lanes.values():
            lane.close()
