"""Files of states."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import lineartime
from lineartime.data import ByteTokenizer
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.generation import Sampling, generate, load_state, read_prompt, save_state
from lineartime.models import CausalLM

from .conftest import Build
from .test_prompts import SYSTEMS

GREEDY = Sampling(temperature=0.0)


@pytest.mark.parametrize("system", SYSTEMS)
def test_text_is_continued_from_a_file_as_from_memory(system: str, awake: Build, tmp_path: Path) -> None:
    model, file = awake(system), tmp_path / "text.state"
    state = read_prompt(model, torch.randint(0, 40, (40,)).tolist())
    save_state(model, state, file)
    loaded = load_state(model, file)
    assert (loaded.position, loaded.last) == (state.position, state.last)
    assert list(generate(model, [3], 10, GREEDY, state=loaded)) == list(generate(model, [3], 10, GREEDY, state=state))
    for found, expected in zip((*loaded.state.tensors(), loaded.logits), (*state.state.tensors(), state.logits), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_file_of_flash_does_not_grow_with_the_text(model: CausalLM, tmp_path: Path) -> None:
    model, sizes = model.bfloat16(), []
    for length in (100, 900):
        save_state(model, read_prompt(model, [1] * length), tmp_path / str(length))
        sizes.append((tmp_path / str(length)).stat().st_size)
    assert abs(sizes[0] - sizes[1]) < 100  # the numbers of tokens have more digits


def test_full_disk_is_named_and_leaves_no_file(model: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(LineartimeError, match=r"Cannot write .*text.state: No space left on device; free some space"):
        save_state(model, read_prompt(model, [1]), tmp_path / "text.state")
    with pytest.raises(LineartimeError, match=r"Cannot write .*model: No space left on device; free some space"):
        lineartime.save(lineartime.build("flash-tiny", n_blocks=1), ByteTokenizer(), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_another_model_cannot_load_a_state(awake: Build, tmp_path: Path) -> None:
    model, file = awake("flash-tiny"), tmp_path / "text.state"
    save_state(model, read_prompt(model, [1]), file)
    with pytest.raises(ArgumentError, match=r"^state is .*text.state, which a model with other weights wrote"):
        load_state(awake("flash-tiny"), file)
    with pytest.raises(ArgumentError, match=r"wrote, but these are in float32: use the same precision"):
        load_state(model.float(), file)


def test_file_is_not_overwritten(model: CausalLM, tmp_path: Path) -> None:
    file = tmp_path / "text.state"
    file.write_text("mine")
    with pytest.raises(ArgumentError, match=r"^path is .*text.state, which exists already"):
        save_state(model, read_prompt(model, [1]), file)
    assert file.read_text() == "mine"


def changed(file: Path, what: str) -> None:
    """Rewrite a file of a state with one thing changed."""
    with safe_open(file, framework="pt") as opened:
        metadata, tensors = dict(opened.metadata()), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    facts = json.loads(metadata["facts"])
    if what == "tensor":
        tensors["0.v"] = tensors["0.v"] + 1
    elif what == "missing tensor":
        del tensors["0.v"]
    elif what == "number":
        facts["numbers"]["0.longest"] += 1
    elif what == "facts":
        facts = [facts]
    elif what == "format":
        metadata["format"] = "pt"
    save_file(tensors, file, {**metadata, "facts": json.dumps(facts)})


def test_damaged_file_is_an_error(awake: Build, tmp_path: Path) -> None:
    model, file = awake("flash-quad-tiny"), tmp_path / "text.state"
    for what, message in {
        "tensor": r"text.state is damaged \(its contents differ from what was written\): read the prompt again",
        "missing tensor": "text.state is damaged .its contents differ",
        "number": "text.state is damaged .its contents differ",
        "facts": "text.state is damaged .its facts cannot be read",
        "format": "text.state is no file of a state: give one that save_state wrote",
    }.items():
        file.unlink(missing_ok=True)
        save_state(model, read_prompt(model, [1]), file)
        changed(file, what)
        with pytest.raises(LineartimeError, match=message):
            load_state(model, file)
    for content in (b"", b"not safetensors at all", b"\xff" * 64):
        file.write_bytes(content)
        with pytest.raises(LineartimeError, match=r"text.state is damaged"):
            load_state(model, file)
    with pytest.raises(LineartimeError, match=r"Cannot read .*missing.state"):
        load_state(model, tmp_path / "missing.state")


def test_state_of_as_many_tokens_as_the_model_reads_is_loaded(tmp_path: Path) -> None:
    model = lineartime.build("transformer-tiny", d_model=16, n_blocks=1, n_heads=2, vocab_size=40, max_positions=4).eval()
    save_state(model, read_prompt(model, [1, 2, 3, 4]), tmp_path / "text.state")
    state = load_state(model, tmp_path / "text.state")
    assert len(list(generate(model, [], 1, GREEDY, state=state))) == 1
