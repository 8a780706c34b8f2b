"""Tasks for a long memory hold their definitions: a few lines of Python find every answer in the ids."""

import re
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lineartime.choices import MemoryTask
from lineartime.data import Batch, TokenStream
from lineartime.experiments.memory_tasks import DIGITS, TASKS, needle, recall, recall_training

ROWS, LENGTH, PAIRS = 200, 96, 8
TEXT = TokenStream("a text", np.frombuffer(bytes(97 + i * i % 23 for i in range(5000)), dtype=np.uint8), 5000)


def draw(task: MemoryTask, length: int = LENGTH, depth: float | None = None) -> Batch:
    generator, make = torch.Generator().manual_seed(1), TASKS[task].draw
    return needle(ROWS, length, generator, TEXT, depth) if make is None else make(ROWS, length, PAIRS, generator)


def recalled(ids: list[int]) -> dict[int, int]:
    values = dict(zip(ids[0 : 2 * PAIRS : 2], ids[1 : 2 * PAIRS : 2], strict=True))
    return {place: values[key] for place, key in enumerate(ids) if place >= 2 * PAIRS and key in values}


def copied(ids: list[int]) -> dict[int, int]:
    half = len(ids) // 2
    assert len({ids[half], *ids[:half]}) == len(set(ids[:half])) + 1  # the separator is no symbol
    return {half + place: symbol for place, symbol in enumerate(ids[:half])}


def induced(ids: list[int]) -> dict[int, int]:
    first, last = (place for place, symbol in enumerate(ids) if symbol == ids[-1])
    return {last: ids[first + 1]}


def selected(ids: list[int]) -> dict[int, int]:
    [(noise, _)] = Counter(ids).most_common(1)
    symbols = [symbol for symbol in ids if symbol not in (noise, ids[-1])]
    return dict(enumerate(symbols, len(ids) - len(symbols)))


def found(ids: list[int]) -> dict[int, int]:
    text = bytes(ids).decode()
    number = re.findall(rf"The magic number is (\d{{{DIGITS}}})\. ", text)[0]
    assert text.endswith(f" The magic number is {number[:-1]}")
    return dict(enumerate(number.encode(), len(ids) - DIGITS))


SOLVERS: dict[MemoryTask, Callable[[list[int]], dict[int, int]]] = {
    "recall": recalled,
    "copying": copied,
    "induction": induced,
    "selective-copying": selected,
    "needle": found,
}


@pytest.mark.parametrize("task", TASKS)
def test_a_few_lines_of_python_find_every_answer(task: MemoryTask) -> None:
    batch = draw(task)
    assert batch.inputs.shape == batch.targets.shape == (ROWS, LENGTH)
    assert 0 <= int(batch.inputs.min()) <= int(batch.inputs.max()) < TASKS[task].vocab_size(PAIRS)
    for ids, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        assert {place: target for place, target in enumerate(targets) if target != -100} == SOLVERS[task](ids)


@pytest.mark.parametrize(
    ("task", "kinds"), {"recall": 64, "copying": 64, "induction": 16, "selective-copying": 16, "needle": 10}.items()
)
def test_a_constant_answer_is_right_by_chance_alone(task: MemoryTask, kinds: int) -> None:
    targets = draw(task).targets
    answers = Counter(targets[targets >= 0].tolist())
    assert len(answers) == kinds
    assert answers.most_common(1)[0][1] / answers.total() < 2.5 / kinds


def test_texts_follow_from_their_seed() -> None:
    for task in TASKS:
        assert torch.equal(draw(task).inputs, draw(task).inputs)
        assert len(set(map(tuple, draw(task).inputs.tolist()))) == ROWS


def test_keys_return_once_at_even_places_mostly_soon() -> None:
    batch = recall(2000, 64, 4, torch.Generator().manual_seed(0))
    asked = batch.targets >= 0
    assert asked.sum(1).unique().tolist() == [4]
    places = asked.nonzero()[:, 1]
    assert set((places % 2).tolist()) == {0}
    # Of 28 places with weights 1 / n, the first is drawn first in 1 / (1 + 1/2 + ... + 1/28) of the rows.
    first = (batch.inputs[:, 8] == batch.inputs[:, 0]).float().mean()
    assert float(first) == pytest.approx(1 / sum(n**-0.99 for n in range(1, 29)), abs=0.03)


def test_recall_is_practised_with_fewer_pairs_and_more_questions() -> None:
    seen = set()
    for seed in range(40):
        batch = recall_training(2, LENGTH, PAIRS, torch.Generator().manual_seed(seed))
        ids, targets = batch.inputs[0].tolist(), batch.targets[0].tolist()
        pairs = sum(64 <= each < 128 for each in ids)  # the values
        values = dict(zip(ids[0 : 2 * pairs : 2], ids[1 : 2 * pairs : 2], strict=True))
        asked = {place: target for place, target in enumerate(targets) if target >= 0}
        assert asked == {place: values[key] for place, key in enumerate(ids) if place >= 2 * pairs and key in values}
        seen.add((pairs, len(asked)))
    assert {pairs for pairs, _ in seen} == {1, 2, 4, 8}
    assert all(asked in (pairs, LENGTH - 2 * pairs) for pairs, asked in seen)
    assert len(seen) == 8


def test_a_needle_is_as_deep_as_asked() -> None:
    for depth, low, high in ((0.0, 0, 0), (0.5, 19, 25), (1.0, 40, 50)):
        places = [bytes(ids).decode().index(" The magic") for ids in draw("needle", depth=depth).inputs.tolist()]
        assert low <= min(places) <= max(places) <= high
    anywhere = [bytes(ids).decode().index(" The magic") for ids in draw("needle").inputs.tolist()]
    assert len(set(anywhere)) > 20
