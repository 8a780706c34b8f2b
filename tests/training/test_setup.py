"""The set-up of a run: its weights, from another run or a checkpoint, and what does not fit them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import lineartime
from lineartime import checkpoint as checkpoints
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.training.loop import train

SMALL = {"d_model": 16, "n_blocks": 1, "d_qk": 8, "chunk_size": 8}


@pytest.fixture
def run(whole: Path) -> Path:
    return whole


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
