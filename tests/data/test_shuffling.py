"""Shuffled streams: each document once, in an order that follows from the seed, and resumed after any of them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from lineartime.data.shuffling import shuffled
from lineartime.errors import LineartimeError

State = dict[str, Any]


def numbers(count: int, state: State | None) -> Iterator[tuple[list[str], State]]:
    for number in range(0 if state is None else state["at"], count):
        yield [str(number)], {"at": number + 1}


def read(count: int, block_size: int, seed: tuple[int, ...] = (1, 2), state: State | None = None) -> list[tuple[int, State]]:
    stream = shuffled(lambda begin: numbers(count, begin), block_size, seed, state, "numbers")
    return [(int(text), after) for [text], after in stream]


def order(*arguments: Any) -> list[int]:
    return [number for number, _ in read(*arguments)]


@pytest.mark.parametrize(("count", "block_size"), [(0, 3), (1, 3), (9, 3), (10, 3), (10, 100), (10, 1)])
def test_every_document_comes_once_and_stays_in_its_block(count: int, block_size: int) -> None:
    found = order(count, block_size)
    assert sorted(found) == list(range(count))
    assert all(number // block_size == place // block_size for place, number in enumerate(found))


def test_documents_change_places_by_the_seed_and_otherwise_in_each_block() -> None:
    first = order(40, 20)
    assert first[:20] != sorted(first[:20])
    assert [number - 20 for number in first[20:]] != first[:20]
    assert order(40, 20) == first
    assert order(40, 20, (1, 3)) != first


@pytest.mark.parametrize("block_size", [1, 3, 4, 100])
def test_a_stream_resumes_after_any_document(block_size: int) -> None:
    whole = read(10, block_size)
    for index, (_, state) in enumerate(whole):
        assert read(10, block_size, (1, 2), json.loads(json.dumps(state))) == whole[index + 1 :]


@pytest.mark.parametrize(
    "state",
    [
        {"at": 3},
        {"block": 0, "done": -1, "begin": None},
        {"block": "0", "done": 0, "begin": None},
        {"block": 0, "done": 1, "begin": [3]},
        {"block": 0, "done": 4, "begin": None},  # more than the block has
        {"block": 3, "done": 1, "begin": {"at": 10}},  # beyond the end
    ],
)
def test_a_position_that_is_none_is_named(state: State) -> None:
    with pytest.raises(LineartimeError, match="The checkpoint's position in numbers does not exist in this shuffled text"):
        read(10, 4, (1, 2), state)
