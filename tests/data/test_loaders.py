import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lineartime.data import BatchMaker, ByteTokenizer, CachedLoader, Loader, Rows, TokenStream, merge_states
from lineartime.data.batches import Batch
from lineartime.errors import ArgumentError, LineartimeError

END = ByteTokenizer.end_of_document


def stream(length: int) -> TokenStream:
    """Tokens that equal their position modulo 251, with some ends of documents."""
    tokens = (np.arange(length) % 251).astype(np.uint16)
    tokens[np.random.default_rng(0).integers(0, length, length // 20)] = END
    return TokenStream("the train split of numbers", tokens, length)


def loader(length: int = 400, context: int = 8, **options: Any) -> Loader:
    usual = {"per_step": 4, "at_once": 2, "rank": 0, "ranks": 1, "groups": 0}
    rows = Rows(*(options.pop(name, default) for name, default in usual.items()))
    return CachedLoader(stream(length), BatchMaker(ByteTokenizer(), **{"task": "clm", "seed": 3, **options}), context, rows)


def rows_of(batch: Batch, context: int) -> list[list[int]]:
    """The inputs and targets of a batch, row by row."""
    both = torch.stack([batch.inputs.view(-1, context), batch.targets.view(-1, context)], dim=1)
    return both.flatten(1).tolist()


def step_rows(loaders: list[Loader], context: int) -> list[list[int]]:
    """All rows of the next step, in order, from the loaders of all ranks."""
    parts = [[row for batch in one.next_step() for row in rows_of(batch, context)] for one in loaders]
    return [parts[i % len(parts)][i // len(parts)] for i in range(sum(map(len, parts)))]


def numbers(length: int) -> TokenStream:
    return TokenStream("the train split of numbers", np.arange(length, dtype=np.uint16), length)


def test_an_epoch_reads_every_window_once_and_the_next_one_at_other_places() -> None:
    one = CachedLoader(numbers(401), BatchMaker(ByteTokenizer(), "clm"), 8, Rows(1, 1))
    starts = [int(one.next_step()[0].inputs[0, 0]) for _ in range(150)]
    offsets = []
    while starts:
        offset = starts[0] % 8
        windows = (400 - offset) // 8
        epoch, starts = starts[:windows], starts[windows:]
        offsets.append(offset)
        assert len(set(epoch)) == len(epoch)
        assert {start % 8 for start in epoch} == {offset}
        assert epoch != sorted(epoch)
    assert len(offsets) == 4
    assert len(set(offsets)) > 1


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.sampled_from([1, 2, 4]),
    at_once=st.sampled_from([1, 2]),
    done=st.integers(0, 12),
    task=st.sampled_from(["clm", "mlm", "prefix-lm"]),
    packed=st.booleans(),
)
def test_any_number_of_processes_resumes_at_any_step_with_the_same_rows(
    ranks: int, at_once: int, done: int, task: str, packed: bool
) -> None:
    options: dict[str, Any] = {"per_step": 8, "task": task, "packed": packed}
    whole = loader(at_once=8, **options)
    expected = [step_rows([whole], 8) for _ in range(done + 4)]
    before = [loader(at_once=4, rank=rank, ranks=2, **options) for rank in range(2)]
    for step in range(done):
        assert step_rows(before, 8) == expected[step]
    state = json.loads(json.dumps(merge_states([one.state() for one in before])))
    after = [loader(at_once=at_once, rank=rank, ranks=ranks, **options) for rank in range(ranks)]
    for one in after:
        one.restore(state)
    for step in range(done, done + 4):
        assert step_rows(after, 8) == expected[step]


def test_each_seed_gives_another_order() -> None:
    first, same, other = loader(), loader(), loader(seed=4)
    rows = step_rows([first], 8)
    assert rows == step_rows([same], 8)
    assert rows != step_rows([other], 8)


def test_what_cannot_be_read_in_steps_is_an_error() -> None:
    problem = "6 sequences cannot be distributed over 2 processes in batches of 2: use a multiple of 4"
    with pytest.raises(LineartimeError, match=problem):
        Rows(6, 2, 0, 2)
    with pytest.raises(LineartimeError, match=r"There are 8 tokens in .*, fewer than a context .* \(9\): give more text"):
        loader(length=8, context=8)
    assert loader(length=9, context=8).next_step()[0].inputs.shape == (2, 8)
    first, second = loader(rank=0, ranks=2), loader(rank=1, ranks=2)
    second.next_step()
    with pytest.raises(ArgumentError, match="states are from different steps"):
        merge_states([first.state(), second.state()])


class Counting(Loader):
    """A loader of numbered steps that fails at one of them."""

    def __init__(self, fails_at: int = 10**9) -> None:
        super().__init__(BatchMaker(ByteTokenizer(), "clm"), 1, Rows(1, 1))
        self.fails_at = fails_at
        self.read = 0

    def _window(self, row: int) -> torch.Tensor:
        if row == self.fails_at:
            raise LineartimeError("The file is gone.")
        self.read = row + 1
        return torch.tensor([row + 1, 0])

    def _seek(self, state: dict[str, Any]) -> None:
        self.read = state["rows"]


def number(one: Loader) -> int:
    return int(one.next_step()[0].inputs)


def test_preparing_the_next_step_changes_nothing() -> None:
    one = Counting()
    for step in range(1, 30):
        assert number(one) == step
        assert one.state() == {"rows": step}
        assert one.read <= step + 1
    one.restore({"rows": 5})
    assert one.state() == {"rows": 5}
    assert number(one) == 6
    one.close()
    with pytest.raises(RuntimeError):
        one.next_step()


def test_an_error_in_the_thread_is_raised_by_next_step() -> None:
    one = Counting(fails_at=2)
    assert [number(one), number(one)] == [1, 2]
    for _ in range(2):
        with pytest.raises(LineartimeError, match="The file is gone"):
            one.next_step()
    one.restore({"rows": 0})
    assert number(one) == 1
    one.close()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_groups_hold_the_same_rows_whatever_the_number_of_processes(ranks: int) -> None:
    """Three steps, so that an epoch ends in one of them."""
    plain = loader(per_step=16)
    loaders = [loader(per_step=16, at_once=2, rank=rank, ranks=ranks, groups=8) for rank in range(ranks)]
    for _ in range(4):
        rows = step_rows([plain], 8)
        for rank, one in enumerate(loaders):
            batches = [rows_of(batch, 8) for batch in one.next_step()]
            assert batches == [[rows[group], rows[group + 8]] for group in range(rank, 8, ranks)]
