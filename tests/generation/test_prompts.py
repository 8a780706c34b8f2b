"""Texts that continue the state of what was read before."""

from typing import Any

import pytest
import torch

import lineartime
from lineartime.errors import ArgumentError
from lineartime.generation import Sampling, generate, generate_batch, prompts, read_prompt
from lineartime.models import CausalLM

from .conftest import Build

GREEDY = Sampling(temperature=0.0)
SYSTEMS = [
    "flash-tiny shifted",
    "flash-quad-tiny",
    "hybrid-attention-tiny",
    "transformer++-tiny",
    "performer-chunked-tiny",
    "combiner-tiny",
    "reformer-tiny",
    "flash-weighted-tiny",
    "flash-tiny prefix-lm",
]


@pytest.mark.parametrize("system", SYSTEMS)
def test_text_read_in_parts_is_continued_like_the_whole(system: str, awake: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prompts.PREFILL, "cpu", 12)
    model, ids = awake(system), torch.randint(0, 40, (50,)).tolist()
    if "prefix-lm" in system:  # the first part is the prefix
        found = read_prompt(model, ids[20:], read_prompt(model, ids[:20]))
        whole = model(torch.tensor([ids]), prefix_lengths=torch.tensor([20]))[0, -1]
        torch.testing.assert_close(found.logits, whole, rtol=1e-9, atol=1e-9)
        return
    expected = list(generate(model, ids, 12, GREEDY))
    for cut in (1, 15, 49):
        state = read_prompt(model, ids[:cut])
        assert state.position == cut
        assert list(generate(model, ids[cut:], 12, GREEDY, state=state)) == expected
        assert list(generate(model, [], 12, GREEDY, state=read_prompt(model, ids[cut:], state))) == expected


@pytest.mark.parametrize("system", ["flash-tiny", "transformer++-tiny"])
def test_state_is_as_it_was_after_it_was_continued(system: str, awake: Build) -> None:
    model = awake(system)
    state = read_prompt(model, [1, 2, 3])
    before = [tensor.clone() for tensor in (*state.state.tensors(), state.logits)]
    first = list(generate(model, [4], 20, GREEDY, state=state))
    list(generate(model, [], 20, Sampling(2.0, seed=0), state=state))
    read_prompt(model, [7, 8, 9], state)
    for tensor, was in zip((*state.state.tensors(), state.logits), before, strict=True):
        torch.testing.assert_close(tensor, was, rtol=0, atol=0)
    assert list(generate(model, [4], 20, GREEDY, state=state)) == first


@pytest.mark.parametrize("system", ["flash-tiny", "reformer-tiny"])
def test_batch_continues_one_state_or_one_for_each_prompt(system: str, awake: Build) -> None:
    model = awake(system)
    states = [read_prompt(model, [1, 2, 3]), None, read_prompt(model, [5] * 40)]
    ends = [[4], [6, 7], []]
    alone = [list(generate(model, ids, 8, GREEDY, state=state)) for ids, state in zip(ends, states, strict=True)]
    assert generate_batch(model, ends, 8, GREEDY, state=states) == alone
    shared = [list(generate(model, ids, 8, GREEDY, state=states[0])) for ids in ends]
    assert generate_batch(model, ends, 8, GREEDY, state=states[0]) == shared


def test_state_says_how_many_and_which_tokens_were_last(model: CausalLM) -> None:
    ids = list(range(30))
    state = read_prompt(model, ids[25:], read_prompt(model, ids[:25]))
    assert (state.position, state.last, tuple(state.logits.shape)) == (30, tuple(ids[-16:]), (40,))
    assert read_prompt(model, ids[:3]).last == (0, 1, 2)


def test_conversation_reads_every_token_once(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    extend = model.backbone.extend
    monkeypatch.setattr(model.backbone, "extend", lambda ids, *state: read.append(ids.shape[1]) or extend(ids, *state))
    state = read_prompt(model, [1, 2, 3, 4])
    answer = list(generate(model, [5, 6], 3, GREEDY, state=state))
    state = read_prompt(model, [5, 6, *answer, 7], state)
    assert read == [4, 2, 1, 1, 6]
    assert state.position == 10


def test_what_cannot_be_continued_is_named(model: CausalLM, awake: Build) -> None:
    other = lineartime.build("flash-tiny", d_model=16, n_blocks=1, vocab_size=40).eval()
    wrong: list[tuple[Any, str]] = [
        ((1, 2), "^state is of type tuple, but must be a PromptState, as read_prompt and load_state return it"),
        (read_prompt(other, [1]), "^state.* belongs to a model with 1 blocks, but this model has 2"),
        (read_prompt(awake("flash-quad-tiny"), [1]), "^state is a KVCache, but FLASH needs a MixedChunkState"),
    ]
    for state, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            read_prompt(model, [1], state)
        with pytest.raises(ArgumentError, match=message):
            generate(model, [1], 3, state=state)
    with pytest.raises(ArgumentError, match=r"^state has 1 states for 2 prompts: give one for each, or one for all"):
        generate_batch(model, [[1], [2]], 3, state=[read_prompt(model, [1])])
    with pytest.raises(ArgumentError, match=r"^prompt is empty"):
        generate(model, [], 3)
    with pytest.raises(ArgumentError, match=r"^prompt is empty"):
        read_prompt(model, [], read_prompt(model, [1]))


def test_tokens_of_a_state_count_for_the_longest_text() -> None:
    model = lineartime.build("transformer-tiny", d_model=16, n_blocks=1, n_heads=2, vocab_size=40, max_positions=10).eval()
    state = read_prompt(model, [1] * 6)
    assert len(list(generate(model, [2], 4, state=state))) == 4
    with pytest.raises(
        ArgumentError, match=r"^max_tokens is 5 after a prompt of 1 tokens after 6 others, which makes 11 tokens"
    ):
        generate(model, [2], 5, state=state)
    with pytest.raises(
        ArgumentError, match=r"^prompt has 5 tokens after 6 others, which makes 11 tokens to read, .*: shorten it"
    ):
        read_prompt(model, [1] * 5, state)
