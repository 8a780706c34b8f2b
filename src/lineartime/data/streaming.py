"""Text that is too much to encode beforehand: documents are encoded as they are read, in lanes that each go their own way.

A corpus is shared out over a fixed number of lanes, and row i of a run is read from lane i % lanes. So the order of the text
does not depend on the number of processes. Documents are not shuffled: the library that reads them cannot bring back the
contents of a shuffle buffer. Lanes, which begin in different files, mix them instead.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lineartime.data.batches import Batch
from lineartime.data.corpora import Corpus
from lineartime.data.hub import guarded
from lineartime.data.loaders import BatchMaker, Loader, Rows
from lineartime.data.readers import Split, pieces
from lineartime.data.tokenizers import Tokenizer, encode_blocks
from lineartime.errors import LineartimeError
from lineartime.models.config import Task

State = dict[str, Any]


def stream_documents(
    corpus: Corpus, split: Split, lane: int, lanes: int, state: State | None
) -> Iterator[tuple[list[str], State]]:
    """One pass over a lane's share of a split.

    With as many files as lanes, or more, a lane has files of its own. With fewer, some lanes read the same file, each another
    document of it in turn.

    Args:
        corpus: the text.
        split: the part of it.
        lane: which share, from 0 to lanes - 1.
        lanes: how many shares.
        state: where to go on, as it came with a group of documents before; None for the beginning.

    Yields:
        Documents that stand together in one example of the corpus, and the state after them, which is plain JSON.

    Raises:
        LineartimeError: for what cannot be read, or cannot be streamed.
    """
    with guarded(corpus.name):
        dataset = _share(corpus.examples(split), lane, lanes)
        if state is not None:
            dataset.load_state_dict(state)
        for example in dataset:
            yield corpus.texts(example), dataset.state_dict()


def _share(dataset: Any, lane: int, lanes: int) -> Any:
    from datasets.distributed import split_dataset_by_node

    files: int = dataset.num_shards
    if files >= lanes:
        return dataset.shard(num_shards=lanes, index=lane)
    sharing = len(range(lane % files, lanes, files))  # the lanes that read the same file
    return split_dataset_by_node(dataset.shard(num_shards=files, index=lane % files), lane // files, sharing)


class _Mark(NamedTuple):
    """An example begins at this place of a lane; reading again from that state gives it again."""

    place: int
    epoch: int
    source: State | None


class _Lane:
    """The tokens of one share of the text, without end; every token is read once an epoch."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, lane: int, lanes: int) -> None:
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._lane = lane
        self._lanes = lanes
        self.restore({"epoch": 0, "source": None, "used": 0})

    def restore(self, state: State) -> None:
        self._place = 0  # of the first token in the buffer, counted from the example that `state` names
        self._used = state["used"]  # tokens to pass over; they are read only when they are needed
        self._marks = deque([_Mark(0, state["epoch"], state["source"])])
        self._buffer: NDArray[np.int64] = np.zeros(0, np.int64)
        self._tokens = self._read(state["epoch"], state["source"])

    def state(self) -> State:
        """What `restore` needs, in words of the oldest example that is not used up."""
        place = self._place + self._used
        while len(self._marks) > 1 and self._marks[1].place <= place:
            self._marks.popleft()
        mark = self._marks[0]
        return {"epoch": mark.epoch, "source": mark.source, "used": place - mark.place}

    def window(self, context_length: int) -> NDArray[np.int64]:
        """The next T + 1 tokens; the last of them is the first of the window after."""
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
            for texts, after in stream_documents(self._corpus, "train", self._lane, self._lanes, source):
                self._marks.append(_Mark(place, epoch, source))
                for text in texts:
                    if not text:
                        continue
                    for ids in encode_blocks(self._tokenizer, pieces(text)):
                        place += len(ids)
                        yield ids
                    place += 1
                    yield np.array([self._tokenizer.end_of_document])
                source = after
            if from_the_beginning and place == before:
                raise LineartimeError(
                    f"The train split of {self._corpus.name} has fewer documents than lanes ({self._lanes}): have it "
                    "encoded beforehand, or give more text with --data."
                )
            epoch, source = epoch + 1, None


class StreamingLoader:
    """Row i is the next window of lane i % lanes; a process reads the lanes of its own rows alone."""

    def __init__(self, corpus: Corpus, make: BatchMaker, context_length: int, rows: Rows, lanes: int) -> None:
        if lanes < 1 or lanes % rows.ranks:
            raise LineartimeError(
                f"--lanes is {lanes}, but {rows.ranks} processes need a multiple of {rows.ranks}: give a new run another "
                "number of lanes, or start a number of processes that divides the lanes."
            )
        self._make = make
        self._context_length = context_length
        self._rows = rows
        self._count = lanes
        self._handed_out = 0
        self._lanes = {lane: _Lane(corpus, make.tokenizer, lane, lanes) for lane in range(rows.rank, lanes, rows.ranks)}

    def next_step(self) -> list[Batch]:
        """The micro-batches of the next step."""
        batches = []
        for numbers in self._rows.of_step(self._handed_out):
            windows = [self._lanes[row % self._count].window(self._context_length) for row in numbers]
            batches.append(self._make(torch.from_numpy(np.stack(windows)), numbers))
        self._handed_out += self._rows.per_step
        return batches

    def state(self) -> State:
        """The number of rows handed out to all processes, and where each lane of this one stands."""
        lanes = {str(number): lane.state() for number, lane in self._lanes.items()}
        return {"rows": self._handed_out, "of": self._count, "lanes": lanes}

    def restore(self, state: State) -> None:
        """Go on from a state of all lanes; those of other processes are left alone."""
        if state.get("of") != self._count or not {str(lane) for lane in self._lanes} <= state["lanes"].keys():
            raise LineartimeError(
                f"The run read its text in {state.get('of', 'no')} lanes and cannot go on in {self._count}: resume it with its "
                "own options."
            )
        self._handed_out = state["rows"]
        for number, lane in self._lanes.items():
            lane.restore(state["lanes"][str(number)])

    def close(self) -> None:
        """Let go of the files."""
        for lane in self._lanes.values():
            lane.close()


def streaming_loader(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    task: Task,
    context_length: int,
    rows: Rows,
    seed: int,
    packed: bool = False,
    lanes: int = 8,
) -> Loader:
    """Read the training split of a corpus as it comes, without encoding it beforehand.

    Args:
        corpus: the text, of the hub, or JSON lines or Parquet.
        tokenizer: what encodes it.
        task: what is to be foretold.
        context_length: T.
        rows: which rows this process gets, and how many at once.
        seed: of the masks.
        packed: whether documents are parted from each other, as in `cached_loader`.
        lanes: shares of the text that are read side by side, a multiple of the processes. A lane that has come to its end
            begins again, whatever the others do.

    Raises:
        LineartimeError: if lanes are not a multiple of the processes; while reading, for what cannot be read.
    """
    corpus.examples("train")  # says so at once where a corpus cannot be streamed
    return StreamingLoader(corpus, BatchMaker(tokenizer, task, seed, packed), context_length, rows, lanes)
