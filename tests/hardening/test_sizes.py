"""Sizes that no machine has, and weights that are not the model's: each ends at once, in one sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lineartime
from lineartime import machine
from lineartime.cli import main
from lineartime.data import ByteTokenizer
from lineartime.errors import LineartimeError
from lineartime.models import language_model
from lineartime.models.config import ModelConfig
from lineartime.training import setup

SMALL = {"d_model": 16, "n_blocks": 1, "d_qk": 8, "chunk_size": 8}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return lineartime.save(lineartime.build("flash-tiny", **SMALL), ByteTokenizer(), tmp_path / "model")


@pytest.fixture
def nothing_built(whole: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, no model is built but that of the run: one of these sizes would take all memory."""
    build, known = language_model.build_model, [lineartime.load(folder).config for folder in (whole, saved)]

    def build_known(config: ModelConfig) -> Any:
        return build(config) if config in known else pytest.fail(f"a model of {config} is built")

    for module in (language_model, setup):
        monkeypatch.setattr(module, "build_model", build_known)


# Sizes ----------------------------------------------------------------------------------------------------------------

TOO_LARGE = {
    f"train --override n_blocks={10**23}": ("--override", "n_blocks"),
    f"train --override d_model={10**7}": ("--override", "d_model"),
    f"train --override chunk_size={10**20}": ("--override", "chunk_size"),
    f"train --override vocab_size={10**30}": ("--override", "vocab_size"),
    f"train --steps {10**23}": ("--steps is", "must be"),
    f"train --tokens-per-batch {10**12}": ("--tokens-per-batch is", "must be"),
    f"train --seed {10**30}": ("--seed is", "must be"),
    "train --learning-rate inf": ("--learning-rate is inf", "must be"),
    f"train --batch-size {2**25}": ("--batch-size puts", "GB"),
    f"train --context-length {2**29}": ("--context-length puts 536,870,912 tokens", "GB"),  # even one sequence is too long
    f"eval RUN --stride {10**23}": ("--stride is", "must be"),
    f"generate RUN --prompt x --samples {10**12}": ("--samples is", "must be"),
}


@pytest.mark.usefixtures("nothing_built")
@pytest.mark.parametrize("command", TOO_LARGE)
def test_a_size_that_no_machine_has_is_refused_at_once(
    command: str, whole: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "host_memory", lambda: 32 * 10**9)
    arguments = [str(whole) if word == "RUN" else word for word in command.split()]
    if arguments[0] == "train":
        places = ["--data", str(text), "--cache", str(tmp_path), "--out", str(tmp_path / "out")]
        arguments += [*places, "--device", "cpu", "--track"]
    assert main(arguments) == 1
    [error] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert all(part in error for part in TOO_LARGE[command])
    assert len(error) < 600
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("nothing_built")
@pytest.mark.parametrize(("name", "value"), [("n_blocks", 10**9), ("d_model", 32), ("vocab_size", 259), ("d_qk", 10**9)])
def test_a_description_that_the_weights_do_not_fit_takes_no_memory(saved: Path, name: str, value: int) -> None:
    description = json.loads((saved / "model.json").read_text())
    (description["mixer"] if name == "d_qk" else description)[name] = value
    (saved / "model.json").write_text(json.dumps(description))
    with pytest.raises(LineartimeError, match=r"model.json describes no model|is damaged") as caught:
        lineartime.load(saved)
    assert "\n" not in str(caught.value)


# Weights --------------------------------------------------------------------------------------------------------------


def weights_changed(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return spoil


NAME = "backbone.embedding.weight"
WEIGHTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a NaN": (
        weights_changed(lambda w: w[NAME].view(-1)[5:6].fill_(float("nan"))),
        f"{NAME} holds numbers that are not finite",
    ),
    "integers": (weights_changed(lambda w: w.update({NAME: w[NAME].int()})), f"{NAME} is of type I32, but must be one of F64"),
    "another shape": (weights_changed(lambda w: w.update({NAME: w[NAME].T.contiguous()})), "has the shape [16, 258], but"),
    "one more": (weights_changed(lambda w: w.update({"x": torch.zeros(1)})), "has the tensor 'x', which the model"),
    "another name": (weights_changed(lambda w: w.update({"x": w.pop(NAME)})), f"model.safetensors lacks {NAME}"),
    "nothing": (lambda folder: (folder / "model.safetensors").write_bytes(b"") and None, "model.safetensors: "),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_that_are_not_the_models_are_named(saved: Path, kind: str) -> None:
    spoil, what = WEIGHTS[kind]
    spoil(saved)
    with pytest.raises(LineartimeError) as caught:
        lineartime.load(saved)
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)
