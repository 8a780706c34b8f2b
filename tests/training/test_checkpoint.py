import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lineartime
from lineartime.data import ByteTokenizer, load_tokenizer
from lineartime.errors import LineartimeError
from lineartime.models import CausalLM
from lineartime.training import checkpoint as checkpoints
from lineartime.training.checkpoint import TrainingState, save_checkpoint

FILES = ["model.safetensors", "model.json", "tokenizer.json", "training.safetensors", "training.json", "manifest.json"]


def tiny() -> CausalLM:
    return lineartime.build("flash-tiny", d_model=16, n_blocks=1, d_qk=8, chunk_size=8)


def save(run: Path, step: int, loss: float = 1.0, model: CausalLM | None = None) -> Path:
    state = TrainingState(step, loss, 99, {"preset": "flash-tiny"}, {"random.cpu": torch.get_rng_state()})
    return save_checkpoint(run, model or tiny(), ByteTokenizer(), state)


def test_a_checkpoint_holds_all_that_load_needs(tmp_path: Path) -> None:
    model = tiny()
    path = save(tmp_path, 3, model=model)
    moved = path.rename(tmp_path.parent / f"{tmp_path.name}-elsewhere")
    again = lineartime.load(moved)
    assert again.config == model.config
    assert not again.training
    ids = torch.randint(0, 256, (1, 20))
    assert torch.equal(again(ids), model.eval()(ids))
    assert isinstance(load_tokenizer(moved), ByteTokenizer)
    assert sorted(file.name for file in moved.iterdir()) == sorted(FILES)


def test_what_only_resuming_needs_may_be_left_out_when_a_model_is_passed_on(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    for name in ("training.safetensors", "training.json"):
        (path / name).unlink()
    assert lineartime.load(path)
    assert isinstance(load_tokenizer(path), ByteTokenizer)


def test_a_run_is_loaded_by_its_best_checkpoint(tmp_path: Path) -> None:
    best = tiny()
    save(tmp_path, 1, loss=2.0, model=best)
    save(tmp_path, 2, loss=3.0)
    assert torch.equal(lineartime.load(tmp_path).backbone.embedding.weight, best.backbone.embedding.weight)
    assert lineartime.load(str(tmp_path)).config == best.config


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "empty"])
def test_damage_to_any_file_is_noticed_and_said_in_one_sentence(tmp_path: Path, name: str, damage: str) -> None:
    save(tmp_path, 1, loss=0.5)
    path = save(tmp_path, 2)
    file = path / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x01
    if damage == "delete":
        file.unlink()
    else:
        file.write_bytes({"truncate": content[: len(content) // 2], "flip": content, "empty": b""}[damage])
    message = f"The checkpoint {path} is damaged .*: delete it to go on from step-00000001"
    noticed = {}
    for read in (checkpoints.read_training_state, lineartime.load):
        try:
            read(path)
        except LineartimeError as error:
            noticed[read] = str(error)
    assert all(re.fullmatch(message + r"\.", said) for said in noticed.values())  # one line: the dot matches no line end
    if name == "manifest.json":
        assert noticed  # one byte of it may concern one reader alone
    else:
        assert list(noticed) == [checkpoints.read_training_state if name.startswith("training") else lineartime.load]


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"model.json": 3}'])
def test_a_manifest_that_is_none_is_damage(tmp_path: Path, content: str) -> None:
    path = save(tmp_path, 1)
    (path / "manifest.json").write_text(content)
    with pytest.raises(LineartimeError, match=r"is damaged .*restore it from a copy, or train again"):
        lineartime.load(path)


def test_a_model_description_from_another_time_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    description = json.loads((path / "model.json").read_text()) | {"colour": "red"}
    (path / "model.json").write_text(json.dumps(description))
    manifest = json.loads((path / "manifest.json").read_text()) | {"model.json": checkpoints._digest(path / "model.json")}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(LineartimeError, match="model has no field 'colour'"):
        lineartime.load(path)


@pytest.mark.parametrize(
    ("name", "message"), [("missing", "does not exist"), ("folder", "has no checkpoint"), ("file", "is no folder")]
)
def test_what_is_no_checkpoint_is_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(LineartimeError, match=f"{name} {message}: give the folder of a run"):
        lineartime.load(tmp_path / name)


def test_being_killed_while_deleting_an_old_checkpoint_breaks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, loss=3.0)

    def die(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            (path / "training.json").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 2, loss=2.0)
    assert checkpoints.best_checkpoint(tmp_path).name == "step-00000002"
    save(tmp_path, 3, loss=1.0)
    lineartime.load(tmp_path)


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        save(tmp_path, step)
    assert checkpoints.last_checkpoint(tmp_path).name == "step-100000000"


def test_a_failed_write_leaves_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = save(tmp_path, 1)

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "_sync", full)
    message = r"Cannot write .*step-00000002: No space left on device; free some space, then go on by --resume"
    with pytest.raises(LineartimeError, match=message):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == [good.name]
    lineartime.load(tmp_path)


KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from lineartime.training import checkpoint as checkpoints
import test_checkpoint
run, moment = Path(sys.argv[1]), int(sys.argv[2])
test_checkpoint.save(run, 1)
sync, calls = checkpoints._sync, []
def sync_and_die(path):
    sync(path)
    calls.append(path)
    if len(calls) == moment:
        os.kill(os.getpid(), signal.SIGKILL)
checkpoints._sync = sync_and_die
test_checkpoint.save(run, 2, loss=0.5)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", [1, 4, 6, 7, 8]
)  # the first file, the optimiser's state, the manifest, before and after the rename
def test_being_killed_while_writing_leaves_a_whole_checkpoint(tmp_path: Path, moment: int) -> None:
    script = KILLED_WHILE_WRITING.format(tests=str(Path(__file__).parent))
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path), str(moment)], check=False, stderr=subprocess.PIPE)
    assert result.returncode == -signal.SIGKILL, result.stderr
    expected = "step-00000002" if moment == 8 else "step-00000001"
    assert checkpoints.last_checkpoint(tmp_path).name == expected
    lineartime.load(tmp_path)
    checkpoints.read_training_state(checkpoints.last_checkpoint(tmp_path))
    checkpoints.remove_partial(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_disk_that_is_full_is_known_by_what_safetensors_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    def full(*_: object) -> None:
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(LineartimeError, match=r"step-00000001: No space left on device; free some space, then run the command"):
        save(tmp_path, 1)


def test_partial_checkpoints_are_never_taken_for_whole_ones(tmp_path: Path) -> None:
    good = save(tmp_path, 1)
    (tmp_path / ".step-00000009.partial").mkdir()
    assert checkpoints.list_checkpoints(tmp_path) == [good]
