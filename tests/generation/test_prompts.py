"""Texts that continue the state of what was read before, from memory and from a file."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode

import lineartime
from lineartime.data import ByteTokenizer
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.generation import PromptState, Sampling, generate, generate_batch, load_state, prompts, read_prompt, save_state
from lineartime.models import CausalLM
from lineartime.ops import modes

from .conftest import Build

GREEDY = Sampling(temperature=0.0)
SYSTEMS = [
    "flash shifted",
    "flash-quad",
    "hybrid-attention",
    "transformer++",
    "performer-chunked",
    "combiner",
    "reformer",
    "flash-weighted",
    "flash prefix-lm",
]


def assert_same(found: PromptState, expected: PromptState) -> None:
    assert (found.position, found.last) == (expected.position, expected.last)
    tensors = ((*each.state.tensors(), each.logits) for each in (found, expected))
    torch.testing.assert_close(*tensors, rtol=0, atol=0)


@pytest.mark.parametrize("system", SYSTEMS)
def test_text_read_in_parts_or_from_a_file_is_continued_like_the_whole(
    system: str, awake: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(prompts.PREFILL, "cpu", 12)
    model, ids = awake(system), torch.randint(0, 40, (50,)).tolist()
    save_state(model, read_prompt(model, ids), tmp_path / "whole.state")
    assert_same(load_state(model, tmp_path / "whole.state"), read_prompt(model, ids))
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


@pytest.mark.parametrize("system", ["flash", "transformer++"])
def test_state_is_as_it_was_after_it_was_continued(system: str, awake: Build) -> None:
    model = awake(system)
    state = read_prompt(model, [1, 2, 3])
    before = replace(state, state=state.state.clone(), logits=state.logits.clone())
    first = list(generate(model, [4], 20, GREEDY, state=state))
    list(generate(model, [], 20, Sampling(2.0, seed=0), state=state))
    read_prompt(model, [7, 8, 9], state)
    assert_same(state, before)
    assert list(generate(model, [4], 20, GREEDY, state=state)) == first


@pytest.mark.parametrize("system", ["flash", "reformer"])
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
        (read_prompt(awake("flash-quad"), [1]), "^state is a KVCache, but FLASH needs a MixedChunkState"),
    ]
    for state, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            read_prompt(model, [1], state)
        with pytest.raises(ArgumentError, match=message):
            generate(model, [1], 3, state=state)
    with pytest.raises(ArgumentError, match=r"^state has 1 states for 2 prompts: give one for each, or one for all"):
        generate_batch(model, [[1], [2]], 3, state=[read_prompt(model, [1])])
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


def test_full_disk_is_named_and_leaves_no_file(model: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = SafetensorError("I/O error: No space left on device (os error 28)")
    monkeypatch.setattr("safetensors.torch.save_file", Mock(side_effect=full))
    with pytest.raises(LineartimeError, match=r"Cannot write .*text.state: No space left on device; free some space"):
        save_state(model, read_prompt(model, [1]), tmp_path / "text.state")
    with pytest.raises(LineartimeError, match=r"Cannot write .*model: No space left on device; free some space"):
        lineartime.save(lineartime.build("flash-tiny", n_blocks=1), ByteTokenizer(), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_another_model_cannot_load_a_state(awake: Build, tmp_path: Path) -> None:
    model, file = awake("flash"), tmp_path / "text.state"
    save_state(model, read_prompt(model, [1]), file)
    for other in (awake("flash"), copy.deepcopy(model).float()):
        with pytest.raises(
            ArgumentError, match=r"^state is .*text.state, which a model with other weights, or in another prec"
        ):
            load_state(other, file)


def test_damaged_file_is_an_error(awake: Build, tmp_path: Path) -> None:
    model, file = awake("flash-quad"), tmp_path / "text.state"
    save_state(model, read_prompt(model, [1]), file)
    with safe_open(file, framework="pt") as opened:
        metadata, tensors = dict(opened.metadata()), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    facts = json.loads(metadata["facts"])
    wrong: list[tuple[dict[str, Any], Any, str, str]] = [
        ({"logits": tensors["logits"]}, facts, metadata["format"], "is damaged .KeyError: '0.position'.: read the"),
        (tensors, {**facts, "numbers": {}}, metadata["format"], "is damaged .KeyError: '0.longest'"),
        (tensors, [facts], metadata["format"], "is damaged .TypeError: list indices"),
        (tensors, facts, "pt", "is no file of a state: give one that save_state wrote"),
    ]
    for parts, known, kind, message in wrong:
        save_file(parts, file, {"format": kind, "facts": json.dumps(known)})
        with pytest.raises(LineartimeError, match=f"text.state {message}"):
            load_state(model, file)
    file.write_bytes(b"not safetensors at all")
    with pytest.raises(LineartimeError, match=r"text.state is damaged"):
        load_state(model, file)
    with pytest.raises(LineartimeError, match=r"Cannot read .*missing.state"):
        load_state(model, tmp_path / "missing.state")


class Products(TorchFunctionMode):
    """Notes the dtypes in which PyTorch multiplies matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ in ("linear", "bmm", "baddbmm_", "matmul"):
            self.dtypes |= {x.dtype for x in args if isinstance(x, torch.Tensor)}
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("system", ["flash", "flash-quad", "transformer++"])
@pytest.mark.parametrize("is_faster", [True, False], ids=["fp32 is faster", "bf16 is faster"])
def test_prompt_in_bf16_is_multiplied_in_the_precision_that_is_faster_here(
    system: str, is_faster: bool, awake: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modes, "_is_fp32_faster", lambda: is_faster)
    model, ids = awake(system), torch.randint(0, 40, (50,)).tolist()
    expected, model = read_prompt(model, ids).logits, model.bfloat16()
    with Products() as products:
        found = read_prompt(model, ids).logits
    assert (torch.bfloat16 in products.dtypes) != is_faster
    assert found.dtype == torch.bfloat16
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
