import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from lineartime.errors import ArgumentError, LineartimeError
from lineartime.finetuning import predict as predicting
from lineartime.finetuning.config import Advanced, FinetuneConfig
from lineartime.finetuning.predict import predict
from lineartime.finetuning.tune import finetune


@pytest.fixture(scope="module")
def tuned(pretrained: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for questions, hardly trained."""
    out = tmp_path_factory.mktemp("tuned") / "out"
    rates, advanced = (3e-2,), Advanced(stride=8)
    finetune(
        FinetuneConfig(pretrained, questions, out, context_length=64, learning_rates=rates, advanced=advanced), lambda _: None
    )
    return out


def test_predicting_goes_on_after_a_kill_with_the_same_inputs_alone(
    tuned: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    predict(tuned, questions, whole)
    monkeypatch.setattr(predicting, "BLOCK", 4)
    found, calls = predicting.best_answers, []

    def killed(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return found(*arguments)

    monkeypatch.setattr(predicting, "best_answers", killed)
    with pytest.raises(KeyboardInterrupt):
        predict(tuned, questions, cut)
    whole_lines = cut.read_bytes()
    other = tmp_path / "other.json"
    other.write_text(questions.read_text().replace("which?", "what?"))
    with pytest.raises(ArgumentError, match=r"^file is .*other.json, but .*cut.jsonl was begun with another one"):
        predict(tuned, other, cut, resume=True)
    cut.write_bytes(whole_lines + b'{"id": "q')  # killed while a line was written
    assert predict(tuned, questions, cut, resume=True, batch_size=3) == 30
    for mine, right in zip(
        *([json.loads(line) for line in file.read_text().splitlines()] for file in (cut, whole)), strict=True
    ):
        assert mine == {**right, "score": pytest.approx(right["score"], abs=1e-5)}
    for again in (False, True):  # it is done
        with pytest.raises(ArgumentError, match=r"^out is .*cut.jsonl, which exists already"):
            predict(tuned, questions, cut, resume=again)
    with pytest.raises(ArgumentError, match=r"^run is .*, which holds no fine-tuned model: give the folder that"):
        predict(tmp_path, questions, tmp_path / "new.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.jsonl", "other.json", "whole.jsonl"]


def not_finite(file: Path) -> None:
    weights = load_file(file)
    save_file({name: weight * float("nan") for name, weight in weights.items()}, file)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("model.safetensors", lambda file: os.truncate(file, 2000), "run/model is damaged"),
        ("model.safetensors", lambda file: save_file({}, file), r"run/model is damaged \(model.backbone"),
        ("model.safetensors", not_finite, "model holds numbers that are not finite in model.backbone"),
        ("config.json", lambda file: file.write_text(file.read_text()[:50]), "run/model is damaged"),
        ("tokenizer.json", lambda file: file.write_text("{"), "run/model is damaged"),
    ],
)
def test_damaged_models_are_named(
    tuned: Path, questions: Path, tmp_path: Path, name: str, damage: Callable[[Path], Any], message: str
) -> None:
    shutil.copytree(tuned, tmp_path / "run")
    damage(tmp_path / "run" / "model" / name)
    with pytest.raises(LineartimeError, match=message):
        predict(tmp_path / "run", questions, tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
