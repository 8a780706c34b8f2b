"""`train` as it is called in a notebook: no terminal, in one process, again and again."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lineartime
from lineartime.checkpoint import best_checkpoint
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.models import LayerConfig, presets
from lineartime.models.config import Task
from lineartime.runs.record import read_record
from lineartime.training.config import TrainConfig
from lineartime.training.loop import train

MakeConfig = Callable[..., TrainConfig]


@pytest.fixture
def options(config: MakeConfig) -> dict[str, Any]:
    """The options of a run of a second, as somebody types them: paths are texts, fields of the model a dictionary."""
    values = {name: value for name, value in vars(config()).items() if value != getattr(TrainConfig(), name)}
    values |= {"data": values["data"][0], "cache": str(values["cache"]), "out": str(values["out"])}
    return values | {"override": {"d_model": 16, "n_blocks": 1, "d_qk": 8, "chunk_size": 8}, "track": []}


@pytest.mark.pictures
def test_result_has_the_folder_the_losses_and_the_model(options: dict[str, Any], tmp_path: Path) -> None:
    result = train(**options)
    assert (result.run, result.step, result.finished) == (tmp_path / "run", 6, True)
    assert list(result.training_losses) == [1, 2, 3, 4, 5, 6]
    assert list(result.validation_losses) == [2, 4, 6]
    assert result.checkpoint == best_checkpoint(result.run)
    assert result.model is result.model  # loaded once
    assert not result.model.training
    ids = torch.zeros(1, 5, dtype=torch.long)
    with torch.no_grad():
        assert torch.equal(result.model(ids), lineartime.load(result.run)(ids))
    assert (result.run / "loss.png").is_file()
    assert result.draw_curve() == result.run / "loss.png"


def test_second_run_in_the_same_process_is_a_run_of_its_own(
    options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    first = train(**options)
    torch.manual_seed(123)  # whatever happens in between
    second = train(**options | {"out": str(tmp_path / "second")})
    assert second.training_losses == first.training_losses
    assert signal.getsignal(signal.SIGINT) is handler
    shown = capsys.readouterr()
    assert shown.out == ""  # standard output is the caller's
    assert shown.err.count("flash-tiny: ") == 2
    assert shown.err.count("step 6/6  training loss") == 2
    with pytest.raises(LineartimeError, match="already holds a run"):
        train(**options)


def test_misspelt_option_is_named_with_the_nearest_one() -> None:
    with pytest.raises(TypeError, match=r"train has no option 'stepz' \(did you mean steps"):
        train(stepz=3)


@pytest.mark.parametrize("task", ["clm", "mlm"])
def test_every_model_config_becomes_options_that_build_it_again(task: Task) -> None:
    for name, preset in presets(task).items():
        if not name.endswith("-tiny"):
            continue
        changed = preset.override(d_model=preset.d_model * 2, n_blocks=3, dropout=0.1, norm="rmsnorm", vocab_size=77)
        for model in (preset, changed):
            config = TrainConfig(preset=model, context_length=100)  # type: ignore[arg-type]
            kept = TrainConfig.from_dict(json.loads(json.dumps(config.to_dict())))
            assert kept.model_config(model.vocab_size) == model, name
            for wrong in ("dropout=0.1", None):
                with pytest.raises(ArgumentError, match="override is "):
                    TrainConfig(preset=model, context_length=100, override=wrong).check()  # type: ignore[arg-type]
            everything = TrainConfig(preset=model, recipe="lm-pg19", context_length=100)  # type: ignore[arg-type]
            assert everything.model_config(model.vocab_size) == model, name
    assert TrainConfig(preset=presets("clm")["flash-base"]).override == ("vocab_size=32000",)  # type: ignore[arg-type]


def test_run_may_be_given_a_model_as_plain_data(options: dict[str, Any], tmp_path: Path) -> None:
    model = presets()["flash-tiny"].override(**options.pop("override"), activation="softmax")
    result = train(**options, preset=model)
    assert result.model.config == model
    assert read_record(result.run).options["preset"] == "flash-tiny"
    assert train(out=str(result.run), resume=True, preset=model).finished
    with pytest.raises(ArgumentError, match=r"override cannot set vocab_size to 300: .*`tokenizer`, which has 258 tokens"):
        train(**options | {"preset": model.override(vocab_size=300), "out": str(tmp_path / "other")})


def test_preset_that_is_no_model_is_named() -> None:
    mixed = presets()["flash-tiny"].override(feed_forward=LayerConfig("mlp"))
    wrong: list[tuple[Any, Any, str]] = [
        (mixed, "clm", "preset is a ModelConfig with the mixer 'flash' and the feed-forward layer 'mlp', which no preset has"),
        (LayerConfig("flash"), "clm", "preset is of type LayerConfig, but must be the name of a preset, or a ModelConfig"),
        (presets()["flash-tiny"], "mlm", "task is 'mlm', but that of the ModelConfig is 'clm': leave one of them out"),
    ]
    for preset, task, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            train(preset=preset, task=task)


def test_config_takes_what_python_users_write_and_survives_json(tmp_path: Path) -> None:
    override = {"d_model": 16, "dropout": 0.1, "max_positions": None, "share": True, "absolute_position": "none"}
    config = TrainConfig(override=override, out="runs/x", cache="c", track=["wandb"], data=tmp_path)  # type: ignore[arg-type]
    assert config.override == ("d_model=16", "dropout=0.1", "max_positions=none", "share=true", "absolute_position=none")
    assert (config.out, config.track) == (Path("runs/x"), ("wandb",))
    assert (config.cache, config.data) == (Path("c").absolute(), (str(tmp_path),))
    config.check()
    assert config == TrainConfig(override=config.override, out="runs/x", cache="c", track="wandb", data=tmp_path)  # type: ignore[arg-type]
    assert TrainConfig.from_dict(config.to_dict()) == config


def test_texts_are_recorded_as_readers_of_the_file_expect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").touch()
    given: list[tuple[Any, Any]] = [
        (None, None),
        ("a.txt", str(tmp_path / "a.txt")),
        ("missing.txt", "missing.txt"),  # so that all commands name it as it was given
        (["a.txt", "wiki40b"], [str(tmp_path / "a.txt"), "wiki40b"]),
    ]
    for data, recorded in given:
        config = TrainConfig(data=data)
        assert config.to_dict()["data"] == recorded
        assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ArgumentError, match=r"^data is 3, but must be a list, each item of which is a text"):
        TrainConfig(data=3)  # type: ignore[arg-type]
