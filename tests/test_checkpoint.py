"""Checkpoints: which one is loaded, every kind of damage to them, and files of other versions; models saved outside a run."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lineartime
from lineartime import checkpoint as checkpoints
from lineartime.checkpoint import FORMAT, TrainingState, load_tokenizer, write_files
from lineartime.data import ByteTokenizer
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.layers import FLASH

MOMENTS = "optimizer/moments.safetensors"
TOKENIZER = ByteTokenizer()
Save = Callable[..., Path]
Tiny = Callable[..., Any]


@pytest.fixture
def save(tiny: Tiny, tmp_path: Path) -> Save:
    """`save(3, loss=2.0)`: a checkpoint of step 3, as training writes it, in the run `tmp_path`."""

    def write(step: int, loss: float | None = 1.0, **options: Any) -> Path:
        model, path = tiny(**{"n_blocks": 1, **options}), checkpoints.checkpoint_path(tmp_path, step)
        (path / "optimizer").mkdir(parents=True)
        save_file({"exp_avg": torch.arange(3.0)}, path / MOMENTS)
        state = TrainingState(step, "99 tokens", {"rows": 3}, {"preset": "flash-tiny"}, validation_loss=loss)
        write_files(path, model.state_dict(), model.config, TOKENIZER, state)
        return path

    return write


def rewrite(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change a JSON file, as another version of lineartime might have written it."""
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def steps_of(run: Path) -> list[int]:
    return [checkpoints.checkpoint_step(path) for path in checkpoints.list_checkpoints(run)]


def test_files_that_only_resuming_needs_may_be_left_out(save: Save) -> None:
    path = save(1)
    for name in (MOMENTS, "training.json"):
        (path / name).unlink()
    assert lineartime.load(path)
    assert len({file.stat().st_mode for file in path.iterdir() if file.is_file()}) == 1  # whoever reads one reads all
    assert isinstance(load_tokenizer(path), ByteTokenizer)


def test_tokenizer_is_loaded_from_whatever_a_model_is(save: Save, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(LineartimeError, match=r"has no checkpoint: give the folder of a run"):
        load_tokenizer(tmp_path / "empty")
    with pytest.raises(LineartimeError, match=r"Cannot read .*missing"):
        load_tokenizer(tmp_path / "missing")
    path = save(1)
    for place in (tmp_path, str(tmp_path), path, str(path), path / "tokenizer.json"):
        assert isinstance(lineartime.load_tokenizer(place), ByteTokenizer)


def test_untrained_step_0_is_best_only_where_it_is_alone(save: Save, tmp_path: Path) -> None:
    for step, loss, best in ((0, 0.5, 0), (7, None, 7), (9, 2.0, 9), (11, None, 9)):
        save(step, loss)
        assert checkpoints.best_checkpoint(tmp_path) == checkpoints.checkpoint_path(tmp_path, best)


def test_checkpoint_of_a_run_is_chosen_by_quality_or_step(save: Save, tmp_path: Path) -> None:
    for step, loss in ((3, 1.0), (20, 2.0), (100, 3.0)):
        save(step, loss)
    chosen: dict[checkpoints.CheckpointChoice | None, int] = {None: 3, "best": 3, "last": 100, 20: 20}
    for which, step in chosen.items():
        assert checkpoints.find_checkpoint(tmp_path, which) == checkpoints.checkpoint_path(tmp_path, step)
        expected = lineartime.load(checkpoints.checkpoint_path(tmp_path, step)).backbone.embedding.weight
        assert torch.equal(lineartime.load(tmp_path, checkpoint=which).backbone.embedding.weight, expected)
    for wrong in (4, True, "worst", [3]):
        wanted = rf"is {re.escape(repr(wrong))}, but must be best, last, or the step .*, which has 3, 20, 100\."
        with pytest.raises(ArgumentError, match=wanted):
            lineartime.load(tmp_path, checkpoint=wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"is last, but .*step-00000003 is a checkpoint itself: leave it out"):
        lineartime.load(checkpoints.checkpoint_path(tmp_path, 3), checkpoint="last")


def test_loss_that_is_measured_after_saving_is_added_and_its_damage_is_noticed(save: Save, tmp_path: Path) -> None:
    save(2, loss=1.0)
    later = save(3, loss=None)
    checkpoints.add_validation_loss(later, 0.5)
    assert checkpoints.read_validation_loss(later) == 0.5
    assert checkpoints.best_checkpoint(tmp_path) == later
    for content in ("{", "{}", '{"format": 1, "validation_loss": "low"}'):
        (later / "validation.json").write_text(content)
        with pytest.raises(LineartimeError, match=r"is damaged \(.*validation.json.*\): use step-00000002, or delete"):
            checkpoints.best_checkpoint(tmp_path)


@pytest.mark.parametrize("damage", ["truncate", "delete", "empty", "rubbish"])
@pytest.mark.parametrize("name", ["model.safetensors", "model.json", "tokenizer.json"])
def test_damage_to_any_file_of_a_model_is_noticed_and_said_in_one_sentence(save: Save, name: str, damage: str) -> None:
    save(1, loss=0.5)
    file = save(2) / name
    content = file.read_bytes()
    if damage == "delete":
        file.unlink()
    else:
        file.write_bytes({"truncate": content[: len(content) // 2], "empty": b"", "rubbish": b"\xff" * 99}[damage])
    with pytest.raises(LineartimeError) as caught:
        lineartime.load(file.parent)
    assert "\n" not in str(caught.value)
    assert str(file.parent) in str(caught.value)


def test_tokenizer_that_is_not_the_models_is_named(save: Save) -> None:
    with pytest.raises(LineartimeError, match="its tokenizer has 258 tokens and its model 99"):
        lineartime.load(save(1, vocab_size=99))


@pytest.mark.parametrize(
    ("name", "message"), [("missing", "does not exist"), ("folder", "has no checkpoint"), ("file", "is no folder")]
)
def test_path_without_a_checkpoint_is_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(LineartimeError, match=f"{name} {message}: give the folder of a run"):
        lineartime.load(tmp_path / name)


def test_checkpoints_are_in_the_order_of_their_steps(save: Save, tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        save(step)
    assert checkpoints.last_checkpoint(tmp_path).name == "step-100000000"


def test_last_two_and_the_best_stay_and_every_so_many_if_asked_for(save: Save, tmp_path: Path) -> None:
    for step, loss in ((1, 9.0), (2, 1.0), (3, 5.0), (4, None), (5, 4.0)):
        save(step, loss)
        checkpoints.prune(tmp_path)
    assert steps_of(tmp_path) == [2, 4, 5]
    assert checkpoints.best_checkpoint(tmp_path).name[-1] == "2"
    save(0, loss=0.5)  # the untrained one never stays
    for step in range(6, 10):
        save(step, loss=float(step))
        checkpoints.prune(tmp_path, keep_every=3)
    assert steps_of(tmp_path) == [2, 6, 8, 9]


def test_checkpoint_that_cannot_be_read_is_not_deleted(save: Save, tmp_path: Path) -> None:
    (save(1, loss=0.5) / "training.json").write_text("?")
    for step in (2, 3, 4):
        save(step)
        checkpoints.prune(tmp_path)
    assert 1 in steps_of(tmp_path)


def test_model_that_is_too_large_for_this_machine_is_not_called_damaged(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(1)
    monkeypatch.setattr("lineartime.models.cost.memory_bytes", lambda device: 1000)
    with pytest.raises(LineartimeError, match=r"step-00000001 holds a model that is too large for this machine: .* memory"):
        lineartime.load(path)


def test_being_killed_while_deleting_an_old_checkpoint_breaks_nothing(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step, loss in ((1, 3.0), (2, 2.5), (3, 2.0)):
        save(step, loss)

    def die(path: Path, ignore_errors: bool = False) -> None:
        (path / "training.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.prune(tmp_path)
    assert steps_of(tmp_path) == [2, 3]
    assert checkpoints.best_checkpoint(tmp_path).name == "step-00000003"
    save(4, loss=1.0)
    lineartime.load(tmp_path)


def test_format_of_another_version_is_named(save: Save) -> None:
    path = save(1)
    for version, message in (
        (99, f"has format 99, but .* formats up to {FORMAT}: upgrade"),
        (None, "format is None, but must"),
    ):
        for name, read in (("training.json", checkpoints.read_training_state), ("model.json", lineartime.load)):
            rewrite(path / name, lambda data, version=version: {**data, "format": version})
            with pytest.raises(LineartimeError, match=message):
                read(path)


def test_fields_that_are_missing_take_their_defaults_and_options_that_are_gone_are_left_out(save: Save, tmp_path: Path) -> None:
    def without(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return lambda data: {name: value for name, value in data.items() if name not in names}

    path = save(1)
    expected = lineartime.load(path).config
    rewrite(path / "model.json", without("dropout", "norm"))
    assert lineartime.load(path).config == expected
    rewrite(path / "training.json", without("skipped", "validation_loss"))
    gone = {"like": None, "track": ["trackio", "wandb"]}
    rewrite(path / "training.json", lambda data: {**data, "automatic": {"compile": "auto"}, "config": gone})
    state = checkpoints.read_training_state(path)
    assert (state.skipped, state.config) == (0, {"track": ["wandb"]})
    assert checkpoints.best_checkpoint(tmp_path) == path
    rewrite(path / "training.json", without("step"))
    with pytest.raises(LineartimeError, match="step is missing"):
        checkpoints.read_training_state(path)


# A model saved outside a run: everything that reads a checkpoint reads it ----------------------------------------------


def test_saved_model_is_the_same_when_loaded(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny(dropout=0.1)  # in training mode
    folder = lineartime.save(model, TOKENIZER, str(tmp_path / "new" / "model"))
    assert folder == tmp_path / "new" / "model"
    loaded = lineartime.load(str(folder))
    assert loaded.config == model.config
    assert not loaded.training
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert lineartime.load_tokenizer(folder).to_json() == TOKENIZER.to_json()
    assert [path.name for path in folder.parent.iterdir()] == ["model"]  # nothing half written


def test_model_that_could_not_be_read_back_is_not_saved(tiny: Tiny, tmp_path: Path) -> None:
    infinite, beyond, extended = tiny(), tiny().double(), tiny()
    with torch.no_grad():
        infinite.backbone.embedding.weight[0, 0] = torch.nan
        beyond.backbone.embedding.weight[0, 0] = 1e300  # infinite in float32
    extended.backbone.register_parameter("more", torch.nn.Parameter(torch.zeros(1)))
    wrong: list[tuple[Any, Any, str]] = [
        (infinite, TOKENIZER, "model has numbers in backbone.embedding.weight that are not finite"),
        (beyond, TOKENIZER, "model has numbers in backbone.embedding.weight that are not finite"),
        (tiny(vocab_size=300), TOKENIZER, "tokenizer has 258 tokens, but the model's vocabulary has 300"),
        (extended, TOKENIZER, "model could not be loaded again: model.safetensors has the tensor 'backbone.more'"),
        (tiny().to("meta"), TOKENIZER, "model has backbone.embedding.weight on the meta device, where it has no values"),
        (tiny().to(torch.float8_e4m3fn), TOKENIZER, "model could not be loaded again: .* is of type F8_E4M3, but must be"),
        (torch.nn.Linear(2, 2), TOKENIZER, "model is of type Linear, but must be a language model"),
        (tiny(), "bytes", "tokenizer is of type str"),
    ]
    for model, tokenizer, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            lineartime.save(model, tokenizer, tmp_path / "model")
    assert not list(tmp_path.iterdir())


class Ungated(FLASH):
    def apply_gate(self, gate: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return attended


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda block: setattr(block.mixer, "normalization", "paper"),
            "model has normalization = 'paper' in backbone.blocks.0.mixer, but 'count' in its config, so another model would "
            "be loaded: build it with normalization='paper'",
        ),
        (
            lambda block: setattr(block.mixer.norm, "eps", 1e-3),
            "model has eps = 0.001 in backbone.blocks.0.mixer.norm, but 1e-05",
        ),
        (
            lambda block: setattr(block, "mixer", Ungated(16, d_qk=8, chunk_size=8, causal=True)),
            r"model has a Ungated as backbone.blocks.0.mixer, but a FLASH in its config.*: save its state_dict\(\) instead",
        ),
    ],
)
def test_model_that_would_be_loaded_as_another_function_is_not_saved(
    tiny: Tiny, change: Callable[[Any], None], message: str, tmp_path: Path
) -> None:
    model = tiny()
    change(model.backbone.blocks[0])
    with pytest.raises(ArgumentError, match=f"^{message}"):
        lineartime.save(model, TOKENIZER, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_model_is_loaded_in_float32_whatever_the_default_dtype_is(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny()
    lineartime.save(model, TOKENIZER, tmp_path / "model")
    torch.set_default_dtype(torch.bfloat16)
    try:
        loaded = lineartime.load(tmp_path / "model")
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_model_whose_blocks_share_weights_is_saved_with_a_copy_for_each(tmp_path: Path) -> None:
    model = lineartime.build("flash-tiny", d_model=16, n_blocks=2, d_qk=8, chunk_size=8)
    first, second = model.backbone.blocks
    second.mixer = first.mixer
    loaded = lineartime.load(lineartime.save(model, TOKENIZER, tmp_path / "model"))
    assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in model.state_dict().items())
