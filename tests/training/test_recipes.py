import json
from pathlib import Path
from typing import Any

import pytest

import lineartime
from lineartime.cli import main
from lineartime.errors import LineartimeError
from lineartime.models.presets import presets
from lineartime.training.config import TrainConfig, recipe_config
from lineartime.training.resuming import complete

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


def test_options_beside_a_recipe_have_the_last_word() -> None:
    config = completed(recipe="lm-pg19", steps=7, warmup_steps=2, override={"dropout": 0.1}, clip="global")
    assert (config.steps, config.warmup_steps, config.clip) == (7, 2, "global")
    assert config.override == ("chunk_size=512", "dropout=0.1")
    assert config.learning_rate == 7e-4


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
