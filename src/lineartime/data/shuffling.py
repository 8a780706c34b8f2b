"""Shuffle a stream so that a run can resume anywhere: documents are permuted within blocks.

A block is the next N documents, which are read into memory. Their order depends only on the seed and the number of the block.
The state is the start of the block and the number of its documents that have been yielded. A shuffle buffer that is refilled
one document at a time would mix over longer distances, but its state would be all documents in it.
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
    """Shuffle the examples of a stream in blocks.

    Args:
        read: reads the stream from a state; None is the beginning.
        block_size: N, the number of examples in a block.
        seed: numbers that determine the order.
        state: where to continue, from an earlier pass; None for the beginning.
        name: the name of the text in messages.

    Yields:
        The documents of the examples that `read` yields, in another order and with states of this function.

    Raises:
        LineartimeError: for a state that does not belong to this stream; also whatever `read` raises.
    """
    number, done, begin = _position(state, name)
    stream = read(begin)
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


def _position(state: State | None, name: str) -> tuple[int, int, State | None]:
    """The number of a block, the number of its examples that have been yielded, and the state at its start."""
    match state:
        case None:
            return 0, 0, None
        case {"block": int(number), "done": int(done), "begin": None | dict() as begin} if number >= 0 and done >= 0:
            return number, done, begin
    raise _no_position(name)


def _no_position(name: str) -> LineartimeError:
    return LineartimeError(
        f"The checkpoint's position in {name} does not exist in this shuffled text: restore the checkpoint from a copy, or "
        "train again."
    )
