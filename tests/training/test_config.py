"""Options: recipes, learning rates of each step, and runs that go on to more steps."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lineartime
from lineartime.cli import main
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.models.systems import presets
from lineartime.runs.metrics import read_metrics
from lineartime.runs.table import summarize
from lineartime.training.config import TrainConfig, learning_rate, recipe_config, with_other_steps
from lineartime.training.loop import train
from lineartime.training.saving import complete

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


def test_recipe_runs_from_a_local_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path / "mirror" / "google" / "wiki40b" / "en"
    folder.mkdir(parents=True)
    for split, count in (("train", 60), ("validation", 8), ("test", 8)):
        texts = [
            f"\n_START_ARTICLE_\nNumber {i}\n_START_PARAGRAPH_\n{i} squared is {i * i}._NEWLINE_Its double is {2 * i}."
            for i in range(count)
        ]
        table = pyarrow.table({"wikidata_id": [f"Q{i}" for i in range(count)], "text": texts, "version_id": texts})
        pyarrow.parquet.write_table(table, folder / f"{split}-00000-of-00001.parquet")
    monkeypatch.setenv("LINEARTIME_MIRROR", str(tmp_path / "mirror"))
    run = tmp_path / "run"
    small = ["--steps", "2", "--warmup-steps", "1", "--context", "32", "--tokens-per-batch", "64", "--batch-size", "1"]
    model = ["--override", "d_model=16", "n_blocks=1", "d_qk=8", "--tokenizer", "bpe-300", "--eval-windows", "2"]
    where = ["--out", str(run), "--cache", str(tmp_path / "cache"), "--eval-every", "2", "--precision", "fp32"]
    assert main(["train", "--recipe", "lm-wiki40b", "--model", "flash-tiny", *small, *model, *where]) == 0
    assert lineartime.load(run).config.vocab_size == 300
    assert json.loads((run / "run.json").read_text())["options"]["recipe"] == "lm-wiki40b"
    assert main(["eval", str(run), "--cache", str(tmp_path / "cache")]) == 0


MakeConfig = Callable[..., TrainConfig]


def test_learning_rate_rises_then_falls_to_zero() -> None:
    config = TrainConfig(steps=10, warmup_steps=4, learning_rate=1.0)
    rates = [learning_rate(step, config) for step in range(10)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[5:] == pytest.approx([5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert [learning_rate(step, TrainConfig(steps=50, learning_rate=1.0)) for step in (0, 4)] == [0.2, 1.0]  # a tenth
    assert learning_rate(0, TrainConfig(steps=1, warmup_steps=0, learning_rate=2.0)) == 2.0
    constant = TrainConfig(steps=5, warmup_steps=2, learning_rate=2.0, schedule="constant")
    assert [learning_rate(step, constant) for step in range(5)] == [1.0, *[2.0] * 4]


def test_cosine_falls_from_the_peak_to_a_tenth_of_it_along_its_formula() -> None:
    config = TrainConfig(steps=12, warmup_steps=4, learning_rate=2.0, schedule="cosine")
    rates = [learning_rate(step, config) for step in range(13)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[4:] == pytest.approx([0.2 + 1.8 * (1 + math.cos(math.pi * x / 8)) / 2 for x in range(9)])
    assert rates[8] == pytest.approx((2.0 + 0.2) / 2)
    assert rates[12] == pytest.approx(0.2)
    assert learning_rate(0, TrainConfig(steps=1, warmup_steps=0, learning_rate=2.0, schedule="cosine")) == 2.0


def test_wsd_is_constant_then_falls_linearly_to_zero_over_its_last_steps() -> None:
    config = TrainConfig(steps=10, warmup_steps=2, learning_rate=2.0, schedule="wsd", decay_steps=4)
    assert [learning_rate(step, config) for step in range(10)] == [1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.0, 0.5]
    usual = TrainConfig(steps=50, learning_rate=1.0, schedule="wsd")  # a tenth of warm-up, a fifth of decay
    assert [learning_rate(step, usual) for step in (4, 5, 40, 41, 49)] == pytest.approx([1.0, 1.0, 1.0, 0.9, 0.1])
    assert learning_rate(0, TrainConfig(steps=1, warmup_steps=0, learning_rate=2.0, schedule="wsd")) == 2.0


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
        with pytest.raises(ArgumentError, match=r"^steps is .* with `init_from`; a run with `schedule='constant'`, or wsd"):
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
    for name, weight in lineartime.load(whole.run, checkpoint="last").state_dict().items():
        torch.testing.assert_close(lineartime.load(run, checkpoint="last").state_dict()[name], weight, rtol=0, atol=0)
    assert read_metrics(run)[-1]["step"] == 24
    assert (summarize(run, "")[0].state, summarize(run, "")[0].options["steps"]) == ("finished", 24)
    shutil.rmtree(run / "step-00000024")
    assert summarize(run, "")[0].state != "finished"


def test_finished_run_with_a_falling_rate_says_how_to_go_on(finished: Path) -> None:
    message = r"^steps is 8, but the run was started with 6, .* with `init_from`; a run with `schedule='constant'`, or wsd"
    with pytest.raises(ArgumentError, match=message):
        train(out=finished, resume=True, steps=8)
    with pytest.raises(ArgumentError, match=r"^decay_steps is 2, but the linear schedule of this run has no decay"):
        train(out=finished, resume=True, decay_steps=2)


def test_new_run_says_what_its_user_may_not_expect(config: MakeConfig, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(config(steps=2, tokenizer="bpe-8000")).run
    assert re.search(
        r"The tokenizer has [\d,]+ tokens instead of 8,000, because the text is too short", capsys.readouterr().err
    )
    first: dict[str, Any] = {"steps": 2, "override": (), "init_from": run}
    train(config(**first, out=run.with_name("same")))
    assert "were trained on" not in capsys.readouterr().err
    train(config(**first, context_length=32, out=run.with_name("longer")))
    assert "The weights were trained on 24 tokens at a time; now, context_length is 32." in capsys.readouterr().err


def test_rate_of_wsd_never_jumps_whatever_is_left_to_its_defaults() -> None:
    for options in ({"warmup_steps": 9}, {"warmup_steps": 6, "decay_steps": 4}, {}):
        config = TrainConfig(steps=10, learning_rate=1.0, schedule="wsd", **options)
        config.check()
        rates = [learning_rate(step, config) for step in range(10)]
        rising, falling = rates[: rates.index(1.0) + 1], rates[rates.index(1.0) :]
        assert (rising, falling) == (sorted(rising), sorted(falling, reverse=True))
        assert rates[-1] == 1 / (options.get("decay_steps") or (1 if options else 2))
