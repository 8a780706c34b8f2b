"""Options and results: recipes, learning rates, runs that go on to more steps, and `train` as a notebook calls it."""

import json
import math
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lineartime
from lineartime.checkpoint import best_checkpoint
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.models import LayerConfig
from lineartime.models.config import Task
from lineartime.models.systems import presets
from lineartime.runs.metrics import read_metrics
from lineartime.runs.record import read_record
from lineartime.runs.table import summarize
from lineartime.training.config import TrainConfig, learning_rate, recipe_config, with_other_steps
from lineartime.training.loop import train
from lineartime.training.setup import complete

MakeConfig = Callable[..., TrainConfig]

# The table of the paper's recipes, written out a second time.
SHARED = {
    "tokens_per_batch": 262_144,
    "steps": 125_000,
    "warmup_steps": 10_000,
    "learning_rate": 0.0007,
    "beta1": 0.9,
    "beta2": 0.999,
    "epsilon": 0.000001,
    "weight_decay": 0.01,
    "clip": "local",
    "clip_norm": 0.1,
}


def completed(**options: Any) -> TrainConfig:
    return complete(options)


@pytest.mark.parametrize(
    ("recipe", "data", "task", "chunk_size"),
    [
        ("lm-wiki40b", "wiki40b", "clm", 256),
        ("lm-pg19", "pg19", "clm", 512),
        ("mlm-c4", "c4", "mlm", 256),
        ("mlm-wikipedia-4096", "hub:wikimedia/wikipedia/20231101.en", "mlm", 256),
    ],
)
def test_recipe_is_that_of_the_paper(recipe: str, data: str, task: str, chunk_size: int) -> None:
    config = completed(recipe=recipe, preset="flash-base", context_length=4096)
    assert {name: getattr(config, name) for name in SHARED} == SHARED
    assert config.schedule == "linear"
    assert (config.data, config.task, config.context_length, config.preset) == ((data,), task, 4096, "flash-base")
    model = config.model_config(vocab_size=32_000)
    assert model.mixer.options.get("chunk_size") == chunk_size
    assert model.dropout == 0
    config.check()
    for ranks in (1, 2, 8, 64):
        rows = config.rows(0, ranks)
        assert rows.per_step * 4096 == 2**18
    assert "dropout" not in " ".join(config.override)


def test_quick_recipe_chooses_the_model_unless_one_is_given() -> None:
    config = completed(recipe="quick")
    assert (config.preset, config.optimizer, config.tokenizer) == ("flash-memory-tiny", "muon", "bpe-4096")
    other = completed(recipe="quick", preset="transformer-tiny", steps=7)
    assert (other.preset, other.optimizer, other.steps, other.override) == ("transformer-tiny", "muon", 7, ())
    assert other.clip_norm == TrainConfig.clip_norm  # the paper's exception is of the paper's recipes
    assert completed(recipe="lm-pg19").preset == TrainConfig.preset
    for made in (config, other, completed(recipe="quick", optimizer="adamw")):  # which needs no other option
        made.check()


def test_only_the_vanilla_transformer_is_not_clipped() -> None:
    with pytest.raises(LineartimeError, match="preset is 'flash-giant', which is not a preset"):
        recipe_config("lm-pg19", "flash-giant")
    free = {name for name in presets("mlm") if recipe_config("lm-wiki40b", name).clip_norm == 0}
    assert free == {"transformer-base", "transformer-tiny"}
    assert recipe_config("lm-wiki40b", "transformer++-base").clip_norm == 0.1


COSINE = [0.1 + 0.9 * (1 + math.cos(math.pi * x / 8)) / 2 for x in range(8)]


@pytest.mark.parametrize(
    ("schedule", "options", "rates"),
    [
        ("linear", {"steps": 10, "warmup_steps": 4}, [1 / 4, 1 / 2, 3 / 4, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("linear", {"steps": 20}, [1 / 2, 1, *(left / 18 for left in range(18, 0, -1))]),  # a tenth of warm-up
        ("constant", {"steps": 5, "warmup_steps": 2}, [1 / 2, 1, 1, 1, 1]),
        ("cosine", {"steps": 12, "warmup_steps": 4}, [1 / 4, 1 / 2, 3 / 4, 1, *COSINE]),
        ("wsd", {"steps": 10, "warmup_steps": 2, "decay_steps": 4}, [1 / 2, 1, 1, 1, 1, 1, 1, 3 / 4, 1 / 2, 1 / 4]),
        ("wsd", {"steps": 10}, [1, 1, 1, 1, 1, 1, 1, 1, 1, 1 / 2]),  # a fifth of decay
        ("wsd", {"steps": 10, "warmup_steps": 9}, [*(step / 9 for step in range(1, 10)), 1]),  # which never jumps
        *((schedule, {"steps": 1, "warmup_steps": 0}, [1]) for schedule in ("linear", "cosine", "wsd")),
    ],
)
def test_learning_rate_of_each_step_follows_its_formula(schedule: Any, options: dict[str, Any], rates: list[float]) -> None:
    config = TrainConfig(learning_rate=2.0, schedule=schedule, **options)
    config.check()
    assert [learning_rate(step, config) for step in range(config.steps)] == pytest.approx([2 * rate for rate in rates])


@pytest.mark.parametrize(
    ("options", "taken", "steps", "allowed"),
    [
        ({"schedule": "constant"}, 5, 1000, True),  # still in the warm-up, which stays as it was
        ({"schedule": "constant"}, 50, 60, True),
        ({"schedule": "wsd"}, 81, 1000, True),  # the first step of the decay is still at the peak
        ({"schedule": "wsd"}, 82, 1000, False),
        ({"schedule": "wsd"}, 60, 75, True),  # the decay begins sooner
        ({"schedule": "wsd"}, 60, 70, False),
        ({"schedule": "linear"}, 10, 200, True),  # only the warm-up was taken
        ({"schedule": "cosine"}, 50, 200, False),
    ],
)
def test_run_goes_on_to_other_steps_if_those_taken_had_the_same_rates(
    options: dict[str, Any], taken: int, steps: int, allowed: bool
) -> None:
    started = TrainConfig(steps=100, **options)
    asked = TrainConfig(steps=steps, **options)
    if not allowed:
        with pytest.raises(ArgumentError, match=r"^steps is .* with `init_from`; a run with `schedule=constant`, or wsd"):
            with_other_steps(started, asked, taken)
        return
    changed = with_other_steps(started, asked, taken)
    assert (changed.steps, changed.warmup_steps) == (steps, 10)
    assert [learning_rate(step, changed) for step in range(taken)] == [learning_rate(step, started) for step in range(taken)]


def test_run_that_goes_on_is_the_one_that_was_started_for_all_steps(config: MakeConfig) -> None:
    options: dict[str, Any] = {"schedule": "wsd", "warmup_steps": 2, "eval_every": 4}
    run = config().run_directory
    whole = train(config(**options, steps=24, decay_steps=8, out=run.with_name("whole")))
    train(config(**options, steps=20, keep_every=4))
    for step in (16, 20):  # as if the run had been interrupted before its decay
        shutil.rmtree(run / f"step-{step:08d}")
    longer = train(out=run, resume=True, steps=24, decay_steps=8)
    assert (longer.finished, longer.step) == (True, 24)
    weights = [lineartime.load(each, checkpoint="last").state_dict() for each in (run, whole.run)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    assert read_metrics(run)[-1]["step"] == 24
    assert (summarize(run, "")[0].state, summarize(run, "")[0].options["steps"]) == ("finished", 24)
    shutil.rmtree(run / "step-00000024")
    assert summarize(run, "")[0].state != "finished"


def test_finished_run_with_a_falling_rate_says_how_to_go_on(finished: Path) -> None:
    message = r"^steps is 8, but the run was started with 6, .* with `init_from`; a run with `schedule=constant`, or wsd"
    with pytest.raises(ArgumentError, match=message):
        train(out=finished, resume=True, steps=8)
    with pytest.raises(ArgumentError, match=r"^decay_steps is 2, but the linear schedule of this run has no decay"):
        train(out=finished, resume=True, decay_steps=2)


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


def test_misspelt_option_is_named() -> None:
    with pytest.raises(TypeError, match="stepz"):
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
