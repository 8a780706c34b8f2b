"""Shuffle a stream so that a run can resume anywhere: documents are permuted within blocks.

A block is the next N documents, which are read into memory. Their order depends only on the seed and the number of the block.
The state is the start of the block and the number of its documents that have been yielded. The shuffle buffer of the datasets
library mixes over longer distances, but gives examples again after a resume.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from lineartime.errors import LineartimeError

State = dict[str, Any]
Documents = Iterator[tuple[list[str], State]]
"""For each example, its documents and the state after it as plain JSON."""


def shuffled(
    read: Callable[[State | None], Documents], block_size: int, seed: Sequence[int], state: State | None, name: str
) -> Documents:
    """Shuffle the examples that `read` yields from a state, in blocks of `block_size`, and yield them with other states.

    The seed determines the order, and `state`, None for the beginning, is one of an earlier pass. `name` is that of the text in
    messages. Raises LineartimeError for a state that does not belong to this stream.
    """
    match {"block": 0, "done": 0, "begin": None} if state is None else state:
        case {"block": int(number), "done": int(done), "begin": None | dict() as begin} if number >= 0 and done >= 0:
            stream = read(begin)
        case _:
            raise no_position(name)
    while True:
        block = list(islice(stream, block_size))
        if done and done >= len(block):
            raise no_position(name)
        if not block:
            return
        order = np.random.default_rng([*seed, number]).permutation(len(block))
        for place in range(done, len(block) - 1):
            yield block[order[place]][0], {"block": number, "done": place + 1, "begin": begin}
        number, done, begin = number + 1, 0, block[-1][1]
        yield block[order[-1]][0], {"block": number, "done": done, "begin": begin}


def no_position(name: str) -> LineartimeError:
    """The error for a state that does not belong to a stream."""
    return LineartimeError(
        f"The checkpoint's position in {name} does not exist in this text: restore the checkpoint from a copy, or train again."
    )
