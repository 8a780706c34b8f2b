import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForQuestionAnswering

import lineartime
from lineartime.data.tokenizers import ByteTokenizer
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.finetuning import predict as predicting
from lineartime.finetuning import tune
from lineartime.finetuning.answering import find_questions, score_answers
from lineartime.finetuning.config import Advanced, FinetuneConfig
from lineartime.finetuning.predict import predict
from lineartime.finetuning.tune import finetune, tuned_config, with_head
from lineartime.hf.heads import LineartimeForQuestionAnswering
from lineartime.runs.record import locked
from lineartime.training.optimizers import matrices_of

Configured = Callable[..., FinetuneConfig]


@pytest.fixture
def config(pretrained: Path, questions: Path, tmp_path: Path) -> Configured:
    def configured(out: str = "out", advanced: dict[str, Any] | None = None, **given: Any) -> FinetuneConfig:
        base = FinetuneConfig(pretrained, questions, tmp_path / out, context_length=64, learning_rates=(3e-2,), batch_size=8)
        return replace(base, advanced=replace(Advanced(stride=8, dropout=0.0), **(advanced or {})), **given)

    return configured


def quiet(line: str) -> None:
    """Say nothing."""


def test_fine_tuning_learns_and_its_model_answers_alone(
    config: Configured, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = config(epochs=5, learning_rates=(3e-2, 1e-6))
    result = finetune(given)
    assert result.best == 0
    assert result.trials[0].metrics["f1"] > 90 > result.trials[1].metrics["f1"]
    steps = "15 steps with each rate"
    assert capsys.readouterr().out.startswith(f"24 windows to train with, 6 to answer in\n{steps}\nrate 0.03, epoch 1: loss ")
    assert sorted(path.name for path in given.out.iterdir()) == ["finetune.json", "model", "predictions.json"]
    assert finetune(replace(given, resume=True)) == result

    predictions = json.loads((given.out / "predictions.json").read_text())
    held_out = {each.id: each for each in find_questions(questions)[1]}
    right = {key: each.answers for key, each in held_out.items()}
    assert score_answers(predictions, right, "squad")["f1"] == result.trials[0].metrics["f1"]
    assert predict(given.out, questions, tmp_path / "answers.json") == 30
    answers = json.loads((tmp_path / "answers.json").read_text())
    assert {key: answers[key] for key in held_out} == predictions
    assert type(AutoModelForQuestionAnswering.from_pretrained(given.out / "model")).__name__ == "LineartimeForQuestionAnswering"


def test_a_fine_tuning_that_was_killed_resumes_to_the_same_losses(config: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"epochs": 3.0, "learning_rates": (1e-2, 3e-2), "advanced": {"dropout": 0.3}}
    whole = finetune(config("whole", **options), quiet)
    evaluate, calls = tune.Answering.evaluate, []

    def killed(*arguments: Any) -> dict[str, float]:
        calls.append(None)
        if len(calls) == 6:  # 4 of the first rate; in the second epoch of the second rate
            raise KeyboardInterrupt
        return evaluate(*arguments)

    monkeypatch.setattr(tune.Answering, "evaluate", killed)
    with pytest.raises(KeyboardInterrupt):
        finetune(config("cut", **options), quiet)
    place = config("cut").out.rename(config("cut").out.with_name("moved"))
    checkpoint = max((place / "rate-0.03").glob("checkpoint-*"), key=lambda each: int(each.name[11:]))
    shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-99"))
    os.truncate(checkpoint.with_name("checkpoint-99") / "trainer_state.json", 20)
    resumed = finetune(config("moved", resume=True, **options), quiet)
    assert resumed.trials == whole.trials
    weights = [load_file(config(each).out / "model" / "model.safetensors") for each in ("whole", "moved")]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    with pytest.raises(ArgumentError, match=r"^epochs is 9.0, but .*moved was begun with 3.0: resume with the same options"):
        finetune(config("moved", resume=True, **{**options, "epochs": 9.0}), quiet)
    other = shutil.copy(config().data, config().out.with_name("other.json"))
    finetune(config("other", data=other, epochs=1), quiet)
    other.write_text(other.read_text().replace("which?", "what?"))
    with pytest.raises(ArgumentError, match=r"^data is .*other.json, but .*other was begun with another one or another"):
        finetune(config("other", data=other, epochs=1, resume=True), quiet)
    with locked(config("whole").out), pytest.raises(ArgumentError, match=r"^out is .*whole, which another run is using"):
        finetune(config("whole", resume=True, **options), quiet)


def test_a_rate_that_diverges_loses_and_alone_is_an_error(config: Configured) -> None:
    said: list[str] = []
    found = finetune(config(learning_rates=(1e5, 1e-3)), said.append)
    assert (found.best, found.trials[0].metrics) == (1, {})
    assert said[2].startswith("rate 100000, epoch ")
    assert "diverged" in said[2]
    with pytest.raises(ArgumentError, match=r"^learning_rates is 100000, with which training diverged: give smaller ones"):
        finetune(config("none", learning_rates=(1e5,)), said.append)
    assert not config("none").out.exists()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize(
    ("preset", "advanced"),
    [
        ("flash-tiny", {"mixer": "flash-first-to-all", "chunk_size": 8}),
        ("flash-tiny", {"mixer": "flash-cls", "patience": 1}),
        ("flash-tiny", {"lora_rank": 2, "clip_norm": 1.0}),
        *((each, {}) for each in ("flash-quad-tiny", "flash-memory-tiny", "transformer+-tiny", "combiner-tiny")),
    ],
)
def test_all_systems_and_tweaks_train_and_load(
    preset: str, advanced: dict[str, Any], config: Configured, questions: Path, tmp_path: Path
) -> None:
    given = config(epochs=1, advanced=advanced)
    if preset != "flash-tiny":
        given = replace(given, run=tmp_path / "other")
        model = lineartime.build(preset, "mlm", vocab_size=258, d_model=16, n_blocks=1)
        lineartime.save(model, ByteTokenizer(), given.run)
    finetune(given, quiet)
    made = AutoModelForQuestionAnswering.from_pretrained(given.out / "model")
    before = lineartime.load(given.run)
    kind = before.config.mixer.kind
    assert made.config.mixer["kind"] == advanced.get("mixer", "flash-cls" if preset == "flash-tiny" else kind)
    assert preset != "flash-tiny" or made.config.mixer["chunk_size"] == advanced.get("chunk_size", 16)
    assert torch.equal(before.backbone.embedding.weight, made.get_input_embeddings().weight) == ("lora_rank" in advanced)
    assert predict(given.out, questions, given.out / "answers.jsonl") == 30


def test_a_smaller_chunk_keeps_the_biases_of_near_tokens(config: Configured) -> None:
    """A text within the smaller chunk is read as before, up to its head."""
    given = config()
    pretrained = lineartime.load(given.run)
    for block in pretrained.backbone.blocks:
        torch.nn.init.normal_(block.mixer.bias.table)
    advanced = replace(given.advanced, mixer="flash", chunk_size=8)
    model = with_head(pretrained, advanced, LineartimeForQuestionAnswering, "QUESTION_ANS")
    ids = torch.randint(0, 256, (2, 8))
    torch.testing.assert_close(model.eval().model(ids).last_hidden_state, pretrained.eval().backbone(ids))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("rank", [0, 2])
def test_decay_is_that_of_matrices_as_in_training(rank: int, config: Configured) -> None:
    given = config(advanced={"lora_rank": rank})
    model = with_head(lineartime.load(given.run), given.advanced, LineartimeForQuestionAnswering, "QUESTION_ANS")
    groups = tune._optimizer(model, 1e-3, 0.5).param_groups
    decayed = {id(each) for group in groups if group["weight_decay"] for each in group["params"]}
    assert decayed == {id(each) for each in matrices_of(model) if each.requires_grad}
    assert {id(each) for name, each in model.named_parameters() if "lora_" in name} <= decayed


def test_mistakes_are_named_and_leave_nothing(config: Configured, tmp_path: Path) -> None:
    causal = lineartime.build("flash-tiny", vocab_size=258, d_model=16, n_blocks=1, d_qk=8)
    lineartime.save(causal, ByteTokenizer(), tmp_path / "causal")
    answers = [{"text": "nowhere", "answer_start": 0}]
    paragraph = {"context": "a text", "qas": [{"id": "1", "question": "?", "answers": answers}]}
    lost = tmp_path / "lost.json"
    lost.write_text(json.dumps({"data": [{"paragraphs": [paragraph]}] * 2}))
    for given, message in (
        (config(run=tmp_path / "causal"), r"^run is .*causal, a causal language model, .*: give a masked one"),
        (config(advanced={"chunk_size": 32}), r"^chunk_size is 32, but the model was trained with 16: give at most that"),
        (config(context_length=16), r"^The question .* leaves 7 tokens of the 16 .*: raise `context_length` above 17"),
        (config(resume=True), r"^resume is True, but .* holds no training that has begun"),
        (config(data=tmp_path / "none"), r"^data is .*none, which does not exist"),
        (config(data=lost), r".*lost.json holds no question to train with whose text holds its answer"),
    ):
        with pytest.raises(LineartimeError, match=message):
            finetune(given, quiet)
        assert not given.out.exists() or not any(given.out.iterdir())
    for options, message in (
        ({"epochs": 0.0}, r"^epochs is 0.0, but must be above 0"),
        ({"learning_rates": ()}, r"^learning_rates is empty: give at least one"),
    ):
        with pytest.raises(ArgumentError, match=message):
            config(**options)
    long = lineartime.presets("mlm")["flash-tiny"].override(chunk_size=256)
    assert tuned_config(long, Advanced()).mixer.kind == "flash-cls"
    assert tuned_config(long, Advanced()).mixer.options["chunk_size"] == 128
    hybrid = tuned_config(lineartime.presets("mlm")["hybrid-gau-tiny"], Advanced(mixer="flash-first-to-all", chunk_size=64))
    assert [mixer.kind for mixer in hybrid.mixers] == [*["flash-first-to-all"] * 3, "gau"]
    assert hybrid.mixer.options["chunk_size"] == 64
    for other, kind in (("flash-quad-tiny", "gau"), ("flash-weighted-tiny", "flash-weighted")):
        with pytest.raises(ArgumentError, match=rf"^mixer is flash-cls, but the model is one of {kind}: leave it out"):
            tuned_config(lineartime.presets("mlm")[other], Advanced(mixer="flash-cls"))
    with pytest.raises(ArgumentError, match=r"^mixer is flash-cls, but the model has the memory mesa: leave it out"):
        tuned_config(lineartime.presets("mlm")["flash-memory-tiny"], Advanced(mixer="flash-cls"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(ArgumentError, match=r"^out is .*full, which is not empty: give `resume=True` to go on there"):
        finetune(config("full"), quiet)


# Predicting ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuned(pretrained: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for questions, hardly trained."""
    config = FinetuneConfig(pretrained, questions, tmp_path_factory.mktemp("tuned") / "out", context_length=64)
    finetune(replace(config, learning_rates=(3e-2,), advanced=Advanced(stride=8)), quiet)
    return config.out


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
        ("model.safetensors", lambda file: os.truncate(file, 2000), "model/model.safetensors is damaged"),
        ("model.safetensors", lambda file: save_file({}, file), r"model/model.safetensors is damaged \(model.backbone"),
        ("model.safetensors", not_finite, "model holds numbers that are not finite in model.backbone"),
        ("config.json", lambda file: file.write_text(file.read_text()[:50]), "model/config.json is damaged"),
        ("config.json", lambda file: file.write_text("{}"), "model/config.json describes a model of type None"),
        ("tokenizer.json", lambda file: file.write_text("{"), "model/tokenizer.json is damaged"),
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
