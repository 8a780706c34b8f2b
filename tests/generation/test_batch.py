"""Texts that are continued together, and that begin and end at any step."""

import dataclasses

import pytest
import torch

import lineartime
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.generation import Sampling, TextBatch, generate, read_prompt
from lineartime.models import CausalLM
from lineartime.ops.state import State

from .conftest import Build

GREEDY = Sampling(temperature=0.0)


@pytest.mark.parametrize("system", ["flash shifted", "flash-quad", "hybrid-attention", "combiner", "flash prefix-lm"])
def test_texts_that_come_and_go_are_continued_as_each_alone(system: str, awake: Build) -> None:
    model = awake(system)
    prompts = [torch.randint(0, 40, (length,)).tolist() for length in (3, 40, 1, 20, 5)]
    wanted = [12, 3, 9, 1, 7]  # tokens of each text
    begins = [0, 0, 2, 5, 2]  # the step before which each text is added
    batch, numbers, texts = TextBatch(model, GREEDY), dict[int, int](), [list[int]() for _ in prompts]
    for step in range(20):
        for place, prompt in enumerate(prompts):
            if begins[place] == step:
                numbers[batch.add(prompt)] = place
        for number, token in batch.step().items():
            place = numbers[number]
            texts[place].append(token)
            if len(texts[place]) == wanted[place]:
                batch.remove(number)
    assert len(batch) == 0
    assert texts == [list(generate(model, prompt, count, GREEDY)) for prompt, count in zip(prompts, wanted, strict=True)]


def test_text_may_begin_with_a_state(model: CausalLM) -> None:
    state, batch = read_prompt(model, [1, 2, 3]), TextBatch(model, GREEDY)
    numbers = [batch.add([4], state), batch.add([], state), batch.add([1, 2, 3, 4])]
    steps = [batch.step() for _ in range(8)]
    texts = [[tokens[number] for tokens in steps] for number in numbers]
    assert texts[0] == texts[2] == list(generate(model, [1, 2, 3, 4], 8, GREEDY))
    assert texts[1] == list(generate(model, [1, 2, 3], 8, GREEDY))


def test_unchanged_batch_copies_no_state(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    joined, join, batch = [], State.concatenate, TextBatch(model)
    monkeypatch.setattr(State, "concatenate", lambda states: joined.append(len(states)) or join(states))
    first = batch.add([1])
    batch.add([2])
    for _ in range(5):
        batch.step()
    assert joined == [2]
    batch.remove(first)
    batch.add([3])
    for _ in range(5):
        batch.step()
    assert joined == [2, 1, 2]  # the new text joins when its first token is to be read


def test_text_with_a_sampling_of_its_own_is_that_of_generate_whatever_else_is_drawn(model: CausalLM) -> None:
    own = [Sampling(1.0, seed=5), Sampling(1.3, top_k=7, seed=6, repetition_penalty=1.4), GREEDY, Sampling(1.0, seed=8)]
    batch = TextBatch(model, Sampling(0.9, seed=1))
    shared = batch.add([9, 9])
    numbers = [batch.add([place, 4], sampling=sampling) for place, sampling in enumerate(own)]
    steps = [batch.step()]
    batch.remove(shared)
    steps += [batch.step() for _ in range(9)]
    for place, (number, sampling) in enumerate(zip(numbers, own, strict=True)):
        assert [tokens[number] for tokens in steps] == list(generate(model, [place, 4], 10, sampling))
    with pytest.raises(ArgumentError, match=r"^sampling is 0.8"):
        batch.add([1], sampling=0.8)  # type: ignore[arg-type]


def test_mistakes_are_named() -> None:
    model = lineartime.build("transformer-tiny", d_model=16, n_blocks=1, n_heads=2, vocab_size=40, max_positions=4).eval()
    batch = TextBatch(model)
    number = batch.add([1, 2, 3])
    batch.step(), batch.step()
    with pytest.raises(ArgumentError, match=r"^number 0 is a text of 4 tokens, the most this model reads: remove it"):
        batch.step()
    batch.remove(number)
    with pytest.raises(ArgumentError, match=r"^number is 0, but must be that of a text in this batch, as `add` returned it"):
        batch.remove(number)
    assert batch.step() == {}
    with pytest.raises(ArgumentError, match=r"^prompt is empty"):
        batch.add([])
    assert batch.add([1]) == 1


@pytest.mark.parametrize("system", ["flash", "transformer++"])
def test_text_that_fails_does_not_change_the_others(system: str, awake: Build) -> None:
    model = awake(system)
    batch, texts = TextBatch(model, GREEDY), list[int]()
    good = batch.add([1, 2, 3])
    state = read_prompt(model, [5, 6])
    for step in range(12):
        if step == 4:  # its first token can be drawn; what comes after is not finite
            damaged = state.state.map(lambda x: torch.full_like(x, torch.nan) if x.is_floating_point() else x)
            bad = batch.add([], dataclasses.replace(state, state=damaged))
        if step == 5:
            for _ in range(3):
                with pytest.raises(
                    LineartimeError, match=rf"^The logits of text {bad} are not finite: remove it from the batch"
                ):
                    batch.step()
            batch.remove(bad)
        texts.append(batch.step()[good])
    assert texts == list(generate(model, [1, 2, 3], 12, GREEDY))
