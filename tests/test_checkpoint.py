"""Checkpoints: what they need to be loaded, every kind of damage to them, and files of other versions."""

import copy
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
from lineartime.checkpoint import DamagedCheckpointError, TextPosition, TrainingState, load_tokenizer
from lineartime.checkpoint.format import FORMAT, upgraded_model, write_files
from lineartime.data import ByteTokenizer
from lineartime.data.train_tokenizer import names_folder
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.files import sha256
from lineartime.models import CausalLM

MOMENTS = "optimizer/moments.safetensors"
FILES = ["model.safetensors", "model.json", "tokenizer.json", MOMENTS, "training.json", "manifest.json"]


def tiny(**overrides: Any) -> CausalLM:
    return lineartime.build("flash-tiny", d_model=16, n_blocks=1, d_qk=8, chunk_size=8, **overrides)


def save(run: Path, step: int, loss: float | None = 1.0, model: CausalLM | None = None) -> Path:
    """Write a checkpoint as training does."""
    model = model or tiny()
    path = checkpoints.checkpoint_path(run, step)
    (path / "optimizer").mkdir(parents=True)
    save_file({"exp_avg": torch.arange(3.0)}, path / MOMENTS)
    state = TrainingState(step, "99 tokens", TextPosition(3), {"preset": "flash-tiny"}, validation_loss=loss)
    write_files(path, model.state_dict(), model.config, ByteTokenizer(), state)
    return path


def rewrite(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change a JSON file of a checkpoint, and its checksum, as another version of lineartime might have written it."""
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    manifest = file.parent / "manifest.json"
    if file != manifest:
        rewrite(manifest, lambda data: {**data, file.name: sha256(file)})


def version_0(path: Path) -> Path:
    """Make a checkpoint one from before files stated their format."""
    for name in ("model.json", "training.json", "manifest.json"):
        rewrite(path / name, lambda data: {key: value for key, value in data.items() if key != "format"})
    return path


def test_what_only_resuming_needs_may_be_left_out_when_a_model_is_passed_on(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    for name in (MOMENTS, "training.json"):
        (path / name).unlink()
    assert lineartime.load(path)
    assert isinstance(load_tokenizer(path), ByteTokenizer)


def test_a_tokenizer_is_loaded_from_whatever_a_model_is(tmp_path: Path) -> None:
    path = save(tmp_path / "run", 1)
    for place in (tmp_path / "run", str(tmp_path / "run"), path, str(path), path / "tokenizer.json"):
        assert isinstance(lineartime.load_tokenizer(place), ByteTokenizer)
    with pytest.raises(LineartimeError, match=r"has no checkpoint: give the folder of a run"):
        load_tokenizer(tmp_path)
    with pytest.raises(LineartimeError, match=r"Cannot read .*missing"):
        load_tokenizer(tmp_path / "missing")


def test_a_folder_with_the_name_of_a_tokenizer_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bytes").mkdir()
    monkeypatch.chdir(tmp_path)
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)
    assert not names_folder("bytes")
    (tmp_path / "bpe-300").mkdir()  # a run with the name of a tokenizer to train
    assert not names_folder("bpe-300")
    assert names_folder(str(tmp_path / "bytes"))


def test_the_untrained_step_0_is_best_only_where_it_is_alone(tmp_path: Path) -> None:
    untrained = save(tmp_path, 0, loss=0.5)
    assert checkpoints.best_checkpoint(tmp_path) == untrained
    interrupted = save(tmp_path, 7, loss=None)
    assert checkpoints.best_checkpoint(tmp_path) == interrupted
    evaluated = save(tmp_path, 9, loss=2.0)
    save(tmp_path, 11, loss=None)
    assert checkpoints.best_checkpoint(tmp_path) == evaluated


def test_a_checkpoint_of_a_run_is_chosen_by_quality_or_step(tmp_path: Path) -> None:
    for step, loss in ((3, 1.0), (20, 2.0), (100, 3.0)):
        save(tmp_path, step, loss)
    chosen: dict[checkpoints.CheckpointChoice | None, int] = {None: 3, "best": 3, "last": 100, 20: 20}
    for which, step in chosen.items():
        assert checkpoints.find_checkpoint(tmp_path, which) == checkpoints.checkpoint_path(tmp_path, step)
        expected = lineartime.load(checkpoints.checkpoint_path(tmp_path, step)).backbone.embedding.weight
        assert torch.equal(lineartime.load(tmp_path, checkpoint=which).backbone.embedding.weight, expected)


def test_a_choice_among_checkpoints_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    for step in (3, 20):
        save(tmp_path, step)
    for which in (4, True, "worst", [3]):
        wanted = rf"is {re.escape(repr(which))}, but must be best, last, or the step .*, which has 3, 20\."
        with pytest.raises(ArgumentError, match=wanted):
            lineartime.load(tmp_path, checkpoint=which)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"is last, but .*step-00000003 is a checkpoint itself: leave it out"):
        lineartime.load(checkpoints.checkpoint_path(tmp_path, 3), checkpoint="last")


def test_a_loss_that_is_measured_after_saving_is_added_and_its_damage_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, 2, loss=1.0)
    later = save(tmp_path, 3, loss=None)
    checkpoints.add_validation_loss(later, 0.5)
    checkpoints.verify(later)
    assert checkpoints.read_validation_loss(later) == 0.5
    assert checkpoints.best_checkpoint(tmp_path) == later
    for content in ("{", "{}", '{"validation_loss": "low"}'):
        (later / "validation.json").write_text(content)
        with pytest.raises(LineartimeError, match=r"is damaged \(.*validation.json.*\): use step-00000002"):
            checkpoints.best_checkpoint(tmp_path)
        assert checkpoints.last_whole_checkpoint(tmp_path)[0].name == "step-00000002"


@pytest.mark.parametrize("name", FILES)
def test_damage_to_any_file_is_noticed_and_said_in_one_sentence(tmp_path: Path, name: str) -> None:
    for damage in ("truncate", "flip", "delete", "empty"):
        check_damage_is_noticed(tmp_path / damage, name, damage)


def check_damage_is_noticed(tmp_path: Path, name: str, damage: str) -> None:
    save(tmp_path, 1, loss=0.5)
    path = save(tmp_path, 2)
    file = path / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x01
    if damage == "delete":
        file.unlink()
    else:
        file.write_bytes({"truncate": content[: len(content) // 2], "flip": content, "empty": b""}[damage])
    message = f"The checkpoint {path} is damaged .*: use step-00000001"
    noticed = {}
    for read in (checkpoints.verify, lineartime.load):
        try:
            read(path)
        except LineartimeError as error:
            noticed[read] = str(error)
    assert all(re.fullmatch(message + r"\.", said) for said in noticed.values())  # one line: the dot matches no line end
    readers = [checkpoints.verify, lineartime.load]
    if name == "manifest.json":
        assert noticed  # one byte of it may concern one reader alone
    else:
        assert list(noticed) == (readers[:1] if name in (MOMENTS, "training.json") else readers)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"model.json": 3}', '{"format": "new"}'])
def test_a_manifest_that_is_none_is_damage(tmp_path: Path, content: str) -> None:
    path = save(tmp_path, 1)
    (path / "manifest.json").write_text(content)
    with pytest.raises(LineartimeError, match=r"is damaged .*restore it from a copy, or train again"):
        lineartime.load(path)


def test_an_empty_manifest_hides_no_damage(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "manifest.json").write_text("{}")
    with pytest.raises(LineartimeError, match="is damaged"):
        checkpoints.verify(path)


def test_a_tokenizer_that_is_not_the_models_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, 1, model=tiny(vocab_size=99))
    with pytest.raises(LineartimeError, match="its tokenizer has 258 tokens and its model 99"):
        lineartime.load(path)


@pytest.mark.parametrize(
    ("name", "message"), [("missing", "does not exist"), ("folder", "has no checkpoint"), ("file", "is no folder")]
)
def test_what_is_no_checkpoint_is_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(LineartimeError, match=f"{name} {message}: give the folder of a run"):
        lineartime.load(tmp_path / name)


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        save(tmp_path, step)
    assert checkpoints.last_checkpoint(tmp_path).name == "step-100000000"


def test_partial_checkpoints_are_never_taken_for_whole_ones(tmp_path: Path) -> None:
    good = save(tmp_path, 1)
    (tmp_path / ".step-00000009.partial").mkdir()
    assert checkpoints.list_checkpoints(tmp_path) == [good]
    checkpoints.remove_partial(tmp_path)
    assert list(tmp_path.iterdir()) == [good]


def test_the_last_two_and_the_best_stay(tmp_path: Path) -> None:
    for step, loss in ((1, 9.0), (2, 1.0), (3, 5.0), (4, None), (5, 4.0)):
        save(tmp_path, step, loss)
        checkpoints.prune(tmp_path)
    assert [path.name[-1] for path in checkpoints.list_checkpoints(tmp_path)] == ["2", "4", "5"]
    assert checkpoints.best_checkpoint(tmp_path).name[-1] == "2"


def test_every_so_many_checkpoints_stay_if_asked_for_but_not_the_untrained_one(tmp_path: Path) -> None:
    for step in range(8):
        save(tmp_path, step, loss=float(step))
        checkpoints.prune(tmp_path, keep_every=3)
    assert [path.name[-1] for path in checkpoints.list_checkpoints(tmp_path)] == ["1", "3", "6", "7"]


def test_a_model_that_is_too_large_for_this_machine_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 1)
    monkeypatch.setattr("lineartime.models.memory.memory_bytes", lambda device: 1000)
    with pytest.raises(LineartimeError, match=r"step-00000001 holds a model that is too large for this machine: .* memory"):
        lineartime.load(path)


def test_being_killed_while_deleting_an_old_checkpoint_breaks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step, loss in ((1, 3.0), (2, 2.5), (3, 2.0)):
        save(tmp_path, step, loss)

    def die(path: Path, ignore_errors: bool = False) -> None:
        (path / "training.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.prune(tmp_path)
    assert [path.name[-1] for path in checkpoints.list_checkpoints(tmp_path)] == ["2", "3"]
    assert checkpoints.best_checkpoint(tmp_path).name == "step-00000003"
    save(tmp_path, 4, loss=1.0)
    lineartime.load(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", MOMENTS])
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(tmp_path: Path, name: str) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    for step in (2, 3):
        file = checkpoints.checkpoint_path(tmp_path, step) / name
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    found, wrong = checkpoints.last_whole_checkpoint(tmp_path)
    assert found.name == "step-00000001"
    assert [path.name[-1] for path in wrong] == ["3", "2"]
    assert all(re.fullmatch(rf"The checkpoint {path} is damaged \(.*\)", what) for path, what in wrong.items())
    for path in wrong:
        checkpoints.set_aside(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "damaged-step-00000002",
        "damaged-step-00000003",
        "step-00000001",
    ]


def test_if_all_checkpoints_are_damaged_that_is_said_and_none_is_touched(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / MOMENTS).unlink()
    with pytest.raises(LineartimeError, match=r"is damaged \(optimizer/.* is missing\): restore it from a copy"):
        checkpoints.last_whole_checkpoint(tmp_path)
    (save(tmp_path, 2) / "model.json").unlink()
    with pytest.raises(LineartimeError, match=f"All checkpoints in {tmp_path} are damaged: restore one of them"):
        checkpoints.last_whole_checkpoint(tmp_path)
    assert path.is_dir()


# Versions of the format -----------------------------------------------------------------------------------------------


def test_a_checkpoint_from_before_there_were_versions_can_be_read(tmp_path: Path) -> None:
    model = tiny()
    path = version_0(save(tmp_path, 7, loss=1.5, model=model))
    modes = {file.stat().st_mode for file in path.iterdir() if file.is_file()}
    assert len(modes) == 1  # whoever may read the config may read the weights
    checkpoints.verify(path)
    again = lineartime.load(path)
    assert again.config == model.config
    assert torch.equal(again.backbone.embedding.weight, model.backbone.embedding.weight)
    state = checkpoints.read_training_state(path)
    assert (state.step, state.validation_loss, state.data) == (7, 1.5, TextPosition(3))


def test_models_whose_mixers_were_renamed_since_can_be_read(tmp_path: Path) -> None:
    model = lineartime.build("performer-matmul-tiny", d_model=16, n_blocks=1, n_heads=2)

    def rename(data: dict[str, Any]) -> dict[str, Any]:
        options = {name: value for name, value in data["mixer"].items() if name != "causal_sums"}
        return {**data, "mixer": {**options, "kind": "performer_matmul"}}

    path = save(tmp_path, 1, model=model)
    rewrite(path / "model.json", rename)
    again = lineartime.load(version_0(path))
    assert again.config == model.config
    ids = torch.randint(0, 256, (1, 20))
    assert torch.equal(again(ids), model.eval()(ids))
    renamed = {"flash": "flash", "flash_first_to_all": "flash-first-to-all", "attention_relu2": "mhsa-relu2"}
    renamed |= {"attention_gated": "mhsa-gated", "mixed_chunk_heads": "mc-tfm"}
    for old, new in renamed.items():
        assert upgraded_model({"mixer": {"kind": old, "d_qk": 8}}) == {"mixer": {"kind": new, "d_qk": 8}}
    assert upgraded_model({"mixer": None}) == {"mixer": None}  # reading it names what is wrong


@pytest.mark.parametrize("name", ["model.json", "training.json", "manifest.json"])
def test_a_format_from_the_future_asks_for_an_upgrade(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    rewrite(path / name, lambda data: {**data, "format": 99})
    read = checkpoints.read_training_state if name == "training.json" else lineartime.load
    with pytest.raises(LineartimeError, match=rf"{name} has format 99, but .* formats up to {FORMAT}: upgrade lineartime"):
        read(path)
    if name == "manifest.json":  # it is not damaged, so that resuming must not go back to the one before
        with pytest.raises(LineartimeError, match="upgrade lineartime"):
            checkpoints.last_whole_checkpoint(tmp_path)


def test_fields_that_are_missing_take_their_defaults(tmp_path: Path) -> None:
    def without(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return lambda data: {name: value for name, value in data.items() if name not in names}

    path = save(tmp_path, 1)
    rewrite(path / "model.json", without("dropout", "norm"))
    assert lineartime.load(path).config == tiny().config
    rewrite(path / "training.json", without("skipped", "validation_loss"))
    assert checkpoints.read_training_state(path).skipped == 0
    assert checkpoints.best_checkpoint(tmp_path) == path
    rewrite(path / "training.json", without("step"))
    with pytest.raises(LineartimeError, match="step is missing"):
        checkpoints.read_training_state(path)


def test_an_error_can_be_sent_to_another_process() -> None:
    error = DamagedCheckpointError("model.json is missing", "train again")
    assert str(copy.copy(error)) == str(error) == "model.json is missing: train again."  # copied as it is pickled
