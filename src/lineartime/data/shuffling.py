"""A shuffle of a stream that a run can resume anywhere: documents change places within blocks.

A block is the next N documents, which are read into memory. They come out in an order that depends on the seed and the number
of the block alone. The state is where the block begins and how many of its documents have come out. A shuffle buffer that
refills one by one mixes further, but its state would be all documents in it.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from lineartime.errors import LineartimeError

State = dict[str, Any]
Documents = Iterator[tuple[list[str], State]]
"""The documents of one example after the other, each with the state after it as plain JSON."""


def shuffled(
    read: Callable[[State | None], Documents], block_size: int, seed: Sequence[int], state: State | None, name: str
) -> Documents:
    """The examples of a stream, shuffled in blocks.

    Args:
        read: the stream from a state on; None is its beginning.
        block_size: N, the examples of a block.
        seed: numbers from which the order follows.
        state: where to continue, from an earlier pass; None for the beginning.
        name: of the text, for messages.

    Yields:
        What `read` yields, in another order, with states of its own.

    Raises:
        LineartimeError: for a state that is none of this stream, and what `read` raises.
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
    """The number of a block, how many of its examples have come out, and where it begins."""
    match state:
        case None:
            return 0, 0, None
        case {"block": int(number), "done": int(done), "begin": None | dict() as begin} if number >= 0 and done >= 0:
            return number, done, begin
    raise _no_position(name)


def _no_position(name: str) -> LineartimeError:
    return LineartimeError(
        f"The position in {name} that the checkpoint tells is none in this text, shuffled as it is: restore the checkpoint "
        "from a copy, or train again."
    )
