"""Texts alone, together, and that begin and end at any step; what is drawn, and steps that are recorded."""

import dataclasses
import gc
import weakref
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from tests.definitions import SizesWritten

import lineartime
from lineartime import generation
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.generation import Sampling, TextBatch, decoding, generate, generate_batch, prompts, read_prompt
from lineartime.generation.decoding import draw, pick
from lineartime.models import CausalLM
from lineartime.native import why_not_native
from lineartime.ops.state import State

GREEDY = Sampling(temperature=0.0)
systems = partial(pytest.mark.parametrize, "model", indirect=True)


@torch.no_grad()
def by_forward_passes(model: CausalLM, prompt: list[int], count: int, penalty: float = 1.0) -> list[int]:
    """The likeliest tokens, one after another, each from a whole forward pass."""
    ids, prefix = list(prompt), torch.tensor([len(prompt)]) if model.config.task == "prefix-lm" else None
    for _ in range(count):
        logits = model(torch.tensor([ids]), prefix_lengths=prefix)[0, -1]
        for token in set(ids):
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def texts_of(batch: TextBatch, numbers: list[int], count: int) -> list[list[int]]:
    """The tokens that so many steps draw for each of the texts with these numbers."""
    steps = [batch.step() for _ in range(count)]
    return [[tokens[number] for tokens in steps] for number in numbers]


@systems(
    ["flash shifted", "flash-quad", "transformer++ shifted"]
    + [f"{name} prefix-lm" for name in ("flash", "hybrid-gau", "transformer++")]
)
def test_greedy_texts_are_those_of_the_forward_pass_alone_and_together(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(prompts.PREFILL, "cpu", 4)  # a prompt in several pieces
    # Some fill their chunk on the way, and some are equally long.
    given = [torch.randint(0, 40, (length,)).tolist() for length in (1, 14, 16, 37, 16)]
    expected = [by_forward_passes(model, prompt, 12) for prompt in given]
    assert [list(generate(model, prompt, 12, GREEDY)) for prompt in given] == expected
    assert generate_batch(model, given, 12, GREEDY) == expected
    assert generate_batch(model, [], 12, GREEDY) == []


@systems(["flash shifted"])
def test_no_tensor_grows_with_a_prompt_beyond_a_piece(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prompts.PREFILL, "cpu", 64)
    sizes = []
    for length in (128, 512):
        with SizesWritten() as written, torch.no_grad():
            prompts.prefill_batch(model, torch.randint(0, 40, (1, length)))
        sizes.append(max(size for size in written.sizes if size != length))  # but for the ids
    assert sizes[0] == sizes[1]


def test_text_that_stops_does_not_stop_the_others(model: CausalLM) -> None:
    prompts = [[1, 2, 3], [4], [5, 6]]
    alone = [list(generate(model, prompt, 15, GREEDY)) for prompt in prompts]
    stop = alone[0][2]
    cut = [text[: text.index(stop)] if stop in text else text for text in alone]
    assert generate_batch(model, prompts, 15, GREEDY, stop_token=stop) == cut
    assert list(generate(model, prompts[0], 15, GREEDY, stop_token=stop)) == cut[0]
    assert len({len(text) for text in cut}) > 1
    ended = generate_batch(model, prompts, 15, GREEDY, ended=lambda text, token: text == 1)
    assert ended == [alone[0], alone[1][:1], alone[2]]


def test_tokens_come_one_by_one_and_a_seed_repeats_them(model: CausalLM) -> None:
    texts = [tuple(generate(model, [1], 30, Sampling(temperature=1.0, top_p=1.0, seed=seed))) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert next(generate(model, [1], 10**9, Sampling(temperature=1.0, top_p=1.0, seed=2))) == texts[2][0]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_p=1.0), Sampling(top_k=2), GREEDY])
def test_picking_from_logits_that_are_not_finite_says_so_in_the_token(sampling: Sampling) -> None:
    """A wrong index in a CUDA graph would end everything that the process does on the GPU."""
    logits = torch.zeros(4, 5)
    logits[0], logits[1, 2], logits[2, 3], logits[3, :4] = torch.nan, torch.nan, torch.inf, -torch.inf
    assert pick(logits, sampling, torch.tensor([0.0, 0.9, 0.5, 0.5])).tolist() == [-1, -1, -1, 4]


PROBABILITIES: list[tuple[Sampling, list[float]]] = [
    (Sampling(1.0, 0, 1.0), [0.1, 0.6, 0.3]),
    (Sampling(0.5, 0, 1.0), [0.01 / 0.46, 0.36 / 0.46, 0.09 / 0.46]),
    (Sampling(1.0, 2, 1.0), [0.0, 2 / 3, 1 / 3]),
    (Sampling(1.0, 1, 1.0), [0.0, 1.0, 0.0]),
    (Sampling(1.0, 0, 0.7), [0.0, 2 / 3, 1 / 3]),
    (Sampling(1.0, 0, 0.5), [0.0, 1.0, 0.0]),
    (Sampling(0.0, 0, 1.0), [0.0, 1.0, 0.0]),
    (Sampling(1e-45, 0, 1.0), [0.0, 1.0, 0.0]),
    (Sampling(1.0, 0, 1.0, min_p=0.1), [0.1, 0.6, 0.3]),
    (Sampling(1.0, 0, 1.0, min_p=0.4), [0.0, 2 / 3, 1 / 3]),
    (Sampling(1.0, 0, 1.0, min_p=1.0), [0.0, 1.0, 0.0]),
    (Sampling(1.0, 0, 0.95, min_p=0.2), [0.0, 2 / 3, 1 / 3]),
    (Sampling(1.0, 0, 0.5, min_p=0.2), [0.0, 1.0, 0.0]),
    (Sampling(1.0, 2, 1.0, min_p=0.6), [0.0, 1.0, 0.0]),
    (Sampling(0.5, 0, 1.0, min_p=0.1), [0.0, 0.36 / 0.45, 0.09 / 0.45]),  # of the probabilities at this temperature
]


def test_tokens_are_drawn_with_the_stated_probabilities() -> None:
    count, logits = 4000, torch.tensor([0.1, 0.6, 0.3]).log()
    evenly = torch.cat([torch.arange(count - 1) / count, torch.tensor([1 - 2**-24])])  # and both ends
    for sampling, expected in PROBABILITIES:
        drawn = draw(logits.expand(count, -1), sampling, torch.Generator().manual_seed(0))
        picked = pick(logits.expand(count, -1), sampling, evenly)
        for tokens, error in ((drawn, 0.025), (picked, 0.001)):
            found = (torch.bincount(tokens, minlength=3) / count).tolist()
            assert found == pytest.approx(expected, abs=error), sampling


@pytest.mark.parametrize("in_cpp", [True, False])
@pytest.mark.parametrize(("scale", "top_p"), [(0.0, 0.95), (0.1, 0.95), (0.1, 0.9999), (1.0, 0.3), (1.0, 0.95), (6.0, 0.9999)])
def test_picking_from_a_large_vocabulary_is_by_the_sums_of_ranked_probabilities(
    scale: float, top_p: float, in_cpp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_cpp:
        monkeypatch.setattr(decoding, "native_functions", lambda source, dtype: None)
    elif why_not_native() is not None:
        pytest.skip("there is no compiler")
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(40, 5000, generator=generator)
    uniform = torch.cat([torch.tensor([0.0, 1 - 2**-53]).double(), torch.rand(38, dtype=torch.float64, generator=generator)])
    logits = (50 * logits).round() / 50  # many are equal, and rank by id
    ranks = logits.argsort(descending=True, stable=True)
    probabilities = logits.softmax(-1).gather(-1, ranks).double()  # rounded as in `pick`, or processors keep other tokens
    expected = []
    for row, number in enumerate(uniform.tolist()):
        kept = int((probabilities[row].cumsum(-1) < top_p).sum()) + 1
        sums = probabilities[row, :kept].cumsum(-1)
        expected.append(int(ranks[row, min(int((sums <= number * sums[-1]).sum()), kept - 1)]))
    assert pick(logits, Sampling(1.0, 0, top_p), uniform).tolist() == expected


@pytest.mark.parametrize("logits", [[3.0, 2.0], [-1.0, -1.5]])
def test_penalty_makes_seen_tokens_less_likely_whatever_the_sign_of_their_logits(logits: list[float]) -> None:
    seen, sampling = torch.tensor([[True, False]]), Sampling(0.0, repetition_penalty=2.0)
    assert pick(torch.tensor([logits]), GREEDY, torch.zeros(1)).tolist() == [0]
    assert pick(torch.tensor([logits]), sampling, torch.zeros(1), seen).tolist() == [1]
    assert seen.tolist() == [[True, True]]


@pytest.mark.parametrize(("model", "penalty"), [("flash", 1.3), ("transformer++", 0.5)], indirect=["model"])
def test_tokens_of_the_prompt_and_of_the_text_are_penalised(model: CausalLM, penalty: float) -> None:
    sampling, given = Sampling(0.0, repetition_penalty=penalty), [[1, 2, 3, 2], [5], list(range(4, 30))]
    expected = [by_forward_passes(model, prompt, 12, penalty) for prompt in given]
    assert [list(generate(model, prompt, 12, sampling)) for prompt in given] == expected
    assert generate_batch(model, given, 12, sampling) == expected
    batch = TextBatch(model, sampling)
    assert texts_of(batch, [batch.add(prompt) for prompt in given], 12) == expected
    assert expected != [list(generate(model, prompt, 12, GREEDY)) for prompt in given]


@pytest.mark.parametrize(("model", "is_compiled"), [("flash", True), ("flash shifted", False)], indirect=["model"])
def test_recorded_step_continues_texts_as_the_plain_one(
    model: CausalLM, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def compiled(model: CausalLM, ids: torch.Tensor, state: Any) -> Any:
        calls.append(ids)
        return model.extend(ids, state)

    def recorded(function: Any, inputs: Any, changed: Any) -> Any:
        """As a CUDA graph: arguments are read from, and results written to, memory that stays."""
        out = torch.zeros_like(inputs[0])
        assert len(changed) == len(list(model.init_state(1).tensors()))

        def replayed(*given: torch.Tensor) -> torch.Tensor:
            for tensor, value in zip(inputs, given, strict=True):
                tensor.copy_(value)
            return out.copy_(function(*inputs))

        return replayed

    prompts, seeded = [[1, 2, 3], [5], [1, 2, 3]], Sampling(1.0, seed=3)
    plain, drawn = (generate_batch(model, prompts, 20, sampling) for sampling in (GREEDY, seeded))
    if is_compiled:
        monkeypatch.setattr(model, "compiled_step", compiled)
    monkeypatch.setattr(decoding, "_can_record", lambda _model: True)
    monkeypatch.setattr(decoding, "recorded", recorded)
    assert generate_batch(model, prompts, 20, GREEDY) == plain
    texts = generate_batch(model, prompts, 20, seeded)
    assert texts == drawn, "a seed draws other numbers for a recorded step"
    monkeypatch.setattr(decoding, "recorded", None)  # a single token needs no step, for which there may be no position left
    assert generate_batch(model, prompts, 1, GREEDY) == [text[:1] for text in plain]
    assert texts[0] != texts[2], "two texts share a random number"
    assert bool(calls) == is_compiled, "a graph records the step that the model was told to use"


def test_recorded_step_keeps_the_memory_of_its_graph(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph writes to addresses: if the streams were freed, it would read and write what others put there."""
    cuda = {name: MagicMock() for name in ("device", "Stream", "stream", "current_stream", "graph", "CUDAGraph")}
    for name, stub in cuda.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(decoding, "_can_record", lambda _model: True)
    for continue_texts in (
        lambda state: decoding.continuing(model, state),
        lambda state: decoding.drawing(model, state, Sampling(1.0), torch.Generator()),
    ):
        state = prompts.read(model, [1, 2, 3]).state
        memory = [weakref.ref(tensor) for tensor in state.tensors()]
        step = continue_texts(state)
        del state
        gc.collect()
        assert memory
        assert all(reference() is not None for reference in memory)
        del step
        gc.collect()
        assert all(reference() is None for reference in memory), "a step that is gone must free its memory"


def test_prompt_may_be_what_an_encoder_returns(model: CausalLM) -> None:
    prompt, count = [3, 1, 4], np.int64(8)
    expected = list(generate(model, prompt, int(count), GREEDY))
    arrays = [np.array(prompt), np.array(prompt, dtype=np.uint16), torch.tensor(prompt), tuple(prompt), list(np.array(prompt))]
    arrays += [np.array(prompt[::-1])[::-1], np.frombuffer(bytes(prompt), np.uint8)]
    for given in arrays:
        assert list(generate(model, given, count, GREEDY)) == expected  # type: ignore[arg-type]
    assert generate_batch(model, arrays, 8, GREEDY) == [list(text) for text in [expected] * len(arrays)]


def test_dropout_cannot_disturb_a_text_unnoticed() -> None:
    model = lineartime.build("flash-tiny", d_model=16, n_blocks=1, d_qk=8, dropout=0.5)
    with pytest.raises(ArgumentError, match="model is in training mode, in which dropout changes its logits: call"):
        generate(model, [1], 1)
    assert len(list(generate(model.eval(), [1], 1))) == 1


def test_equal_prompts_are_read_once(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    read_once = prompts.read
    monkeypatch.setattr(generation, "read", lambda model, ids, state: read.append(ids) or read_once(model, ids, state))
    generate_batch(model, [[1, 2], [3], [1, 2]], 2, Sampling(seed=0))
    assert read == [(1, 2), (3,)]


@systems(["flash", "transformer++"])
def test_logits_that_are_not_finite_are_an_error_and_not_a_text(model: CausalLM) -> None:
    with torch.no_grad():
        model.backbone.embedding.weight.fill_(torch.nan)
    with pytest.raises(LineartimeError, match="The logits of the model are not finite"):
        list(generate(model, [1, 2], 3))


# Texts that begin and end at any step ---------------------------------------------------------------------------------


@systems(["flash shifted", "flash-quad", "hybrid-attention", "combiner", "flash prefix-lm"])
def test_texts_that_come_and_go_are_continued_as_each_alone(model: CausalLM) -> None:
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
    texts = texts_of(batch, numbers, 8)
    assert texts[0] == texts[2] == list(generate(model, [1, 2, 3, 4], 8, GREEDY))
    assert texts[1] == list(generate(model, [1, 2, 3], 8, GREEDY))


def test_unchanged_batch_copies_no_state(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    joined, join, batch = [], State.concatenate, TextBatch(model)
    monkeypatch.setattr(State, "concatenate", lambda states: joined.append(len(states)) or join(states))
    first = batch.add([1])
    batch.add([2])
    texts_of(batch, [], 5)
    assert joined == [2]
    batch.remove(first)
    batch.add([3])
    texts_of(batch, [], 5)
    assert joined == [2, 1, 2]  # the new text joins when its first token is to be read


def test_text_with_a_sampling_of_its_own_is_that_of_generate_whatever_else_is_drawn(model: CausalLM) -> None:
    own = [Sampling(1.0, seed=5), Sampling(1.3, top_k=7, seed=6, repetition_penalty=1.4), GREEDY, Sampling(1.0, seed=8)]
    batch = TextBatch(model, Sampling(0.9, seed=1))
    shared = batch.add([9, 9])
    numbers = [batch.add([place, 4], sampling=sampling) for place, sampling in enumerate(own)]
    begun = texts_of(batch, numbers, 1)
    batch.remove(shared)
    for place, (first, rest) in enumerate(zip(begun, texts_of(batch, numbers, 9), strict=True)):
        assert first + rest == list(generate(model, [place, 4], 10, own[place]))
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


@systems(["flash", "transformer++"])
def test_text_that_fails_does_not_change_the_others(model: CausalLM) -> None:
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
