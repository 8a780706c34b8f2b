from typing import Any

import pytest
import torch

import lineartime
from lineartime import generation
from lineartime.generation import Sampling, draw, generate, generate_batch
from lineartime.models import CausalLM

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(params=["flash-tiny", "flash-quad-tiny", "transformer++-tiny"])
def model(request: pytest.FixtureRequest) -> CausalLM:
    size = {"n_heads": 2} if request.param.startswith("transformer") else {"d_qk": 8}
    model = lineartime.build(request.param, d_model=16, n_blocks=2, vocab_size=40, **size).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def test_greedy_text_is_that_of_the_forward_pass(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "PREFILL", 4)  # a prompt in several pieces
    prompt = torch.randint(0, 40, (11,)).tolist()
    ids = list(prompt)
    for _ in range(20):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert list(generate(model, prompt, 20, GREEDY)) == ids[11:]


def test_the_prefix_is_never_read_again(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    extend = model.backbone.extend

    def counting(ids: torch.Tensor, state: Any) -> Any:
        read.append(ids.shape[1])
        return extend(ids, state)

    monkeypatch.setattr(model.backbone, "extend", counting)
    monkeypatch.setattr(model, "forward", None)
    list(generate(model, [1, 2, 3], 5, GREEDY))
    assert read == [3, 1, 1, 1, 1]


def test_tokens_come_one_by_one(model: CausalLM) -> None:
    stream = generate(model, [1], 10**9, GREEDY)
    assert isinstance(next(stream), int)


@pytest.mark.parametrize("model", ["flash-tiny"], indirect=True)
def test_prompts_of_any_lengths_continue_together_as_they_would_alone(model: CausalLM) -> None:
    model.double()
    chunk = model.config.mixer.options["chunk_size"]
    lengths = [1, chunk - 2, chunk, 2 * chunk + 5]  # some fill their chunk on the way
    prompts = [torch.randint(0, 40, (length,)).tolist() for length in lengths]
    together = generate_batch(model, prompts, 12, GREEDY)
    assert together == [list(generate(model, prompt, 12, GREEDY)) for prompt in prompts]
    assert generate_batch(model, [], 12, GREEDY) == []


@pytest.mark.parametrize("model", ["flash-tiny"], indirect=True)
def test_a_text_that_stops_does_not_stop_the_others(model: CausalLM) -> None:
    model.double()
    prompts = [[1, 2, 3], [4], [5, 6]]
    alone = [list(generate(model, prompt, 15, GREEDY)) for prompt in prompts]
    stop = alone[0][2]
    cut = [text[: text.index(stop)] if stop in text else text for text in alone]
    assert generate_batch(model, prompts, 15, GREEDY, stop_token=stop) == cut
    assert len({len(text) for text in cut}) > 1


@pytest.mark.parametrize("model", ["flash-quad-tiny", "transformer++-tiny"], indirect=True)
def test_a_model_that_cannot_step_says_so(model: CausalLM) -> None:
    with pytest.raises(ValueError, match="continues streams at one position only: generate from one prompt at a time"):
        generate_batch(model, [[1], [2, 3]], 5, GREEDY)


def test_a_seed_repeats_a_text(model: CausalLM) -> None:
    texts = [tuple(generate(model, [1], 30, Sampling(temperature=1.0, top_p=1.0, seed=seed))) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_stop_token_ends_the_text_and_is_left_out(model: CausalLM) -> None:
    text = list(generate(model, [1], 10, GREEDY))
    assert list(generate(model, [1], 10, GREEDY, stop_token=text[0])) == []


def frequencies(sampling: Sampling, n: int = 4000) -> list[float]:
    logits = torch.tensor([0.1, 0.6, 0.3]).log()
    generator = torch.Generator().manual_seed(0)
    counts = torch.bincount(torch.tensor([draw(logits, sampling, generator) for _ in range(n)]), minlength=3)
    return (counts / n).tolist()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0, 0, 1.0), [0.1, 0.6, 0.3]),
        (Sampling(0.5, 0, 1.0), [0.01 / 0.46, 0.36 / 0.46, 0.09 / 0.46]),
        (Sampling(1.0, 2, 1.0), [0.0, 2 / 3, 1 / 3]),
        (Sampling(1.0, 1, 1.0), [0.0, 1.0, 0.0]),
        (Sampling(1.0, 0, 0.7), [0.0, 2 / 3, 1 / 3]),
        (Sampling(1.0, 0, 0.5), [0.0, 1.0, 0.0]),
        (Sampling(0.0, 0, 1.0), [0.0, 1.0, 0.0]),
        (Sampling(1e-45, 0, 1.0), [0.0, 1.0, 0.0]),
    ],
)
def test_tokens_are_drawn_with_the_stated_probabilities(sampling: Sampling, expected: list[float]) -> None:
    assert frequencies(sampling) == pytest.approx(expected, abs=0.025)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**70}, "seed is 1180591620717411303424, but must be from 0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
    ],
)
def test_sampling_options_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


def test_an_empty_prompt_is_named(model: CausalLM) -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        next(generate(model, [], 1, GREEDY))
