"""Sizes that no machine has, and weights that are not the model's: each ends at once, in one sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import lineartime
from lineartime import checkpoint as checkpoints
from lineartime import machine
from lineartime.cli import main
from lineartime.data import ByteTokenizer
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.models import cost, language_model
from lineartime.models.config import ModelConfig
from lineartime.models.presets import resolve
from lineartime.training import setup
from lineartime.training.loop import train

SMALL = {"d_model": 16, "n_blocks": 1, "d_qk": 8, "chunk_size": 8}
OPTIONS: dict[str, Any] = {
    "override": SMALL,
    "context_length": 16,
    "batch_size": 2,
    "eval_windows": 2,
    "steps": 4,
    "track": (),
    "device": "cpu",
    "precision": "fp32",
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("Some words, and a few more of them.\n" * 200)
    return file


@pytest.fixture(scope="module")
def run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    return train(**OPTIONS, data=str(text), cache=folder / "cache", out=folder / "run").run


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return lineartime.save(lineartime.build("flash-tiny", **SMALL), ByteTokenizer(), tmp_path / "model")


@pytest.fixture
def nothing_built(run: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, no model is built but that of the run: one of these sizes would take all memory."""
    build, known = language_model.build_model, [lineartime.load(folder).config for folder in (run, saved)]

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
    f"train --context {2**29}": ("--context-length puts 536,870,912 tokens", "GB"),  # even one sequence is too long
    f"eval RUN --stride {10**23}": ("--stride is", "must be"),
    f"generate RUN --prompt x --samples {10**12}": ("--samples is", "must be"),
}


@pytest.mark.usefixtures("nothing_built")
@pytest.mark.parametrize("command", TOO_LARGE)
def test_a_size_that_no_machine_has_is_refused_at_once(
    command: str, run: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "host_memory", lambda: 32 * 10**9)
    arguments = [str(run) if word == "RUN" else word for word in command.split()]
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


@pytest.mark.parametrize("preset", ["flash-tiny", "transformer-tiny", "gau-multi-head-tiny"])
def test_the_size_of_a_model_is_that_of_its_tensors(preset: str) -> None:
    config = resolve(preset, n_blocks=3)
    tensors = lineartime.build(config).state_dict()
    found = cost.model_tensors(config)
    assert found.n_tensors == len(tensors)
    assert found.n_elements == sum(tensor.numel() for tensor in tensors.values())
    assert {name: tensor.shape for name, tensor in found.items()} == {name: tensor.shape for name, tensor in tensors.items()}


def test_the_option_that_needs_too_much_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "memory_bytes", lambda device: 4 * 10**9)
    with pytest.raises(ArgumentError, match=r"^n_blocks is 5,000, with which the model has"):
        cost.check_memory(resolve("flash-base", n_blocks=5000))
    with pytest.raises(ArgumentError, match=r"^vocab_size is 100,000,000, with which the model has"):
        cost.check_memory(resolve("flash-base", vocab_size=10**8))
    tokens: list[tuple[dict[str, int], str]] = [
        ({"sequences": 4, "tokens": 4 * 2**20}, r"^context_length puts 1,048,576 tokens in memory .* least 5.7\d* GB"),
        ({"sequences": 4, "tokens": 4 * 2**18}, r"^batch_size puts 1,048,576 tokens in memory .* least 5.7\d* GB"),
        ({"sequences": 1, "tokens": 2**10, "step_tokens": 2**28}, r"^tokens_per_batch puts 268,435,456 tokens .* 4.35 GB"),
    ]
    for of_a_step, message in tokens:
        with pytest.raises(ArgumentError, match=message):
            cost.check_memory(resolve("flash-tiny"), copies=4, **of_a_step)


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
    "an infinity": (weights_changed(lambda w: w[NAME].view(-1)[5:6].fill_(float("-inf"))), "not finite"),
    "integers": (weights_changed(lambda w: w.update({NAME: w[NAME].int()})), f"{NAME} is of type I32, but must be one of F64"),
    "8 bits": (weights_changed(lambda w: w.update({NAME: w[NAME].to(torch.float8_e4m3fn)})), "F8_E4M3"),
    "another shape": (weights_changed(lambda w: w.update({NAME: w[NAME].T.contiguous()})), "has the shape [16, 258], but"),
    "one more": (weights_changed(lambda w: w.update({"x": torch.zeros(1)})), "but a model of n_blocks = 1 has"),
    "another name": (
        weights_changed(lambda w: w.update({"x": w.pop(NAME)})),
        "has the tensor 'x', which the model does not have",
    ),
    "nothing": (lambda folder: (folder / "model.safetensors").write_bytes(b"") and None, "model.safetensors: "),
    "no file": (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_that_are_not_the_models_are_named(saved: Path, kind: str) -> None:
    spoil, what = WEIGHTS[kind]
    spoil(saved)
    with pytest.raises(LineartimeError) as caught:
        lineartime.load(saved)
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)


# The optimiser's part, and weights alone ------------------------------------------------------------------------------


def moments(run: Path) -> Path:
    return next((checkpoints.last_checkpoint(run) / "optimizer").iterdir())


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


@pytest.mark.parametrize("kind", ["rubbish", "no file", "another shape"])
def test_a_damaged_optimiser_says_how_its_weights_can_be_used(copy: Path, kind: str) -> None:
    last, file = checkpoints.last_checkpoint(copy), moments(copy)
    if kind == "another shape":
        with safe_open(file, "pt") as opened:
            names, facts = opened.keys(), opened.metadata()
        save_file({name: torch.zeros(3) for name in names}, file, facts)
    elif kind == "rubbish":
        file.write_bytes(b"\xff" * 99)
    else:
        file.unlink()
    with pytest.raises(LineartimeError, match=rf"is damaged, or of another optimiser \(.*init_from='{last}'") as caught:
        train(out=copy, resume=True)
    assert "\n" not in str(caught.value)


@pytest.fixture
def rest(text: Path, tmp_path: Path) -> dict[str, Any]:
    """The options of a run that starts from the weights of another."""
    return {"data": str(text), "cache": tmp_path / "cache", "context_length": 16, "eval_windows": 2, "steps": 1, "track": ()}


def test_a_run_starts_from_the_weights_of_another_with_its_own_schedule(
    run: Path, tmp_path: Path, rest: dict[str, Any]
) -> None:
    new = train(init_from=run, out=tmp_path / "new", learning_rate=1e-9, precision="fp32", **{**rest, "steps": 2})
    old = lineartime.load(run)
    assert new.model.config == old.config
    assert torch.allclose(new.model.backbone.embedding.weight, old.backbone.embedding.weight, atol=1e-6)
    assert new.step == 2
    assert train(out=tmp_path / "new", resume=True).finished


def test_a_tokenizer_that_is_not_the_models_is_refused_even_if_it_has_the_same_size(
    tmp_path: Path, rest: dict[str, Any]
) -> None:
    rest |= {"tokenizer": "bpe-270"}
    first = train(out=tmp_path / "first", override=SMALL, **rest).run
    other = tmp_path / "other.txt"
    other.write_text("".join(f"{i} other words of another text\n" for i in range(900)))
    with pytest.raises(ArgumentError, match="tokenizer is bpe-270, but the model of `init_from` has learnt the tokens"):
        train(init_from=first, out=tmp_path / "other", **{**rest, "data": str(other)})
    assert train(init_from=first, out=tmp_path / "second", **rest).finished


def test_weights_that_do_not_fit_the_model_that_is_asked_for_are_named(run: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"context_length": 16, "out": tmp_path / "new", "track": ()}
    options["data"] = str(tmp_path / "unread.jsonl")  # which is not read before the model is known to fit
    Path(options["data"]).write_text("?" * 100)
    other = {
        "d_model": (
            {"override": {"d_model": 32, "dropout": 0.1}},
            "init_from is .*, but the model needs .* in `override` or `task`",
        ),
        "preset": ({"preset": "transformer++-tiny"}, "preset is transformer..-tiny, .* is flash-tiny: leave it out"),
        "trained": ({"tokenizer": "bpe-500"}, "tokenizer is bpe-500, which has 500 tokens, .* has 258: leave it out"),
        "unknown": ({"tokenizer": "none"}, "tokenizer is none, which is neither a file nor a name"),
    }
    for asked, message in other.values():
        with pytest.raises(ArgumentError, match=f"^{message}"):
            train(init_from=run, **asked, **options)
    with pytest.raises(LineartimeError, match=r"unread.jsonl, line 1, is not JSON"):
        train(init_from=run, override={"dropout": 0.1}, tokenizer="bytes", **options)
    with pytest.raises(LineartimeError, match="init_from starts a new run, and cannot be combined with `resume`"):
        train(init_from=run, resume=True, out=run)
    with pytest.raises(ArgumentError, match=r"^init_from is .*missing, which does not exist: give the folder of a run"):
        train(init_from=tmp_path / "missing", **options)
    assert not (tmp_path / "new").exists()


def test_a_preset_of_another_size_than_the_weights_is_refused_whatever_overrides_make_of_it(
    run: Path, tmp_path: Path, rest: dict[str, Any]
) -> None:
    with pytest.raises(ArgumentError, match=r"^preset is flash-base, but the model of `init_from` is flash-tiny: leave it out"):
        train(init_from=run, preset="flash-base", out=tmp_path / "base", **rest)
    # An override that changes no shapes is one of the new run, also where it makes the model that of another preset.
    other = {"normalization": "paper", "initial_scores": "unit"}
    assert train(init_from=run, override=other, out=tmp_path / "next", **rest).finished
