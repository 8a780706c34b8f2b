"""The folder of a run, its checkpoints, and the weights that a run starts from."""

import fcntl
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import lineartime
from lineartime import checkpoint as checkpoints
from lineartime.checkpoint import TrainingState
from lineartime.data import ByteTokenizer
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.models import CausalLM, presets
from lineartime.models.systems import SYSTEMS
from lineartime.runs.record import is_locked, lock_run, locked, read_record
from lineartime.training import setup
from lineartime.training.config import TrainConfig
from lineartime.training.loop import Trainer, train
from lineartime.training.optimizers import ModelOptimizer, build_optimizer
from lineartime.training.parallel import World
from lineartime.training.setup import CheckpointWriter, restore_moments

MakeConfig = Callable[..., TrainConfig]  # here, because a process imports this file alone


def tiny() -> CausalLM:
    return lineartime.build("flash-tiny", d_model=16, n_blocks=1, d_qk=8, chunk_size=8)


def one_step(model: CausalLM, optimizer: str = "adamw") -> ModelOptimizer:
    updates = build_optimizer(model, TrainConfig(optimizer=optimizer))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    updates.step()
    return updates


def save(run: Path, step: int, loss: float | None = 1.0, model: CausalLM | None = None) -> Path:
    model = model or tiny()
    writer = CheckpointWriter(TrainConfig(out=run), model, one_step(model), ByteTokenizer(), World())
    writer.begin(TrainingState(step, "99 tokens", {"rows": 3}, {"preset": "flash-tiny"}, validation_loss=loss))
    writer.finish()
    return checkpoints.checkpoint_path(run, step)


def test_failed_write_leaves_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = save(tmp_path, 1)

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(setup, "synchronise_folder", full)
    message = r"Cannot write .*step-00000002: No space left on device; free some space, then resume the run"
    with pytest.raises(LineartimeError, match=message):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == [good.name]
    lineartime.load(tmp_path)


def test_any_failure_of_the_thread_that_writes_is_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoints, "list_checkpoints", fails)
    with pytest.raises(OSError, match="Input/output error"):
        save(tmp_path, 1)


KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from lineartime import files
from lineartime.training import setup
import test_setup
run, moment = Path({run!r}), {moment}
test_setup.save(run, 1)
synchronise, calls = files.synchronise, []
def synchronise_and_die(path):
    synchronise(path)
    calls.append(path)
    if len(calls) == moment:
        os.kill(os.getpid(), signal.SIGKILL)
files.synchronise = setup.synchronise = synchronise_and_die
test_setup.save(run, 2, loss=0.5)
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", [1, 7, 8])  # a file, before and after the rename
def test_being_killed_while_writing_leaves_a_whole_checkpoint(fork: Callable[[str], Any], tmp_path: Path, moment: int) -> None:
    process = fork(KILLED_WHILE_WRITING.format(tests=str(Path(__file__).parent), run=str(tmp_path), moment=moment))
    assert process.wait() == -signal.SIGKILL, process.output
    expected = "step-00000002" if moment == 8 else "step-00000001"
    assert checkpoints.last_checkpoint(tmp_path).name == expected
    lineartime.load(checkpoints.last_checkpoint(tmp_path))
    (tmp_path / f"metrics.jsonl.{'a1' * 16}.partial").touch()
    (tmp_path / "my.partial").touch()
    folder = tmp_path / f".inspection.{'b2' * 16}.partial"
    (folder / "part").mkdir(parents=True)
    checkpoints.remove_partial(tmp_path)
    assert {path.name for path in tmp_path.glob("*.partial")} == {"my.partial", folder.name}, "another process may write it"
    for path in (folder, folder / "part"):
        os.utime(path, (0, 0))
    checkpoints.remove_partial(tmp_path)
    assert [path.name for path in tmp_path.glob("*.partial")] == ["my.partial"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_moments_come_back_as_they_were(tmp_path: Path, kind: str) -> None:
    model = tiny()
    optimizer = one_step(model, kind)
    writer = CheckpointWriter(TrainConfig(out=tmp_path), model, optimizer, ByteTokenizer(), World())
    kept = {name: value.clone() for name, value in optimizer.moments().items()}
    writer.begin(TrainingState(1, "", {"rows": 0}, {}, validation_loss=1.0))
    optimizer.step()  # what happens while it is written must not get into it
    writer.finish()
    again = build_optimizer(model, TrainConfig(optimizer=kind))
    assert not again.moments()
    restore_moments(checkpoints.checkpoint_path(tmp_path, 1), again, 1)
    assert again.moments().keys() == kept.keys()
    assert all(torch.equal(again.moments()[name], value) for name, value in kept.items())


# Those with a state of their own beside parameters, or with other ways through training, on every run.
USUAL = ("flash", "flash-next", "gau-softmax", "transformer++", "reformer", "bigbird")


@pytest.mark.parametrize(
    "system", [name if name in USUAL else pytest.param(name, marks=pytest.mark.nightly) for name in SYSTEMS]
)
def test_trained_system_is_read_back_as_it_was(system: str, config: MakeConfig) -> None:
    name = f"{system}-tiny"
    task = "clm" if name in presets("clm") else "mlm"
    trainer = Trainer(config(preset=name, task=task, override=("d_model=16", "n_blocks=1"), steps=1, track=()))
    run = trainer.run().run
    ids = torch.arange(40)[None]
    with torch.no_grad():
        logits = trainer.model.eval()(ids)
        assert logits.isfinite().all()
        # A hash that is drawn at random, and is no parameter, has to come back as well.
        torch.testing.assert_close(lineartime.load(checkpoints.last_checkpoint(run))(ids), logits)


@pytest.mark.parametrize("kind", ["rubbish", "no file", "another shape"])
def test_a_damaged_optimiser_says_how_its_weights_can_be_used(finished: Path, kind: str) -> None:
    last = checkpoints.last_checkpoint(finished)
    [file] = (last / "optimizer").iterdir()
    if kind == "another shape":
        with safe_open(file, "pt") as opened:
            names, facts = opened.keys(), opened.metadata()
        save_file({name: torch.zeros(3) for name in names}, file, facts)
    elif kind == "rubbish":
        file.write_bytes(b"\xff" * 99)
    else:
        file.unlink()
    with pytest.raises(LineartimeError, match=rf"is damaged, or of another optimiser \(.*init_from={last}") as caught:
        train(out=finished, resume=True)
    assert "\n" not in str(caught.value)


@pytest.fixture
def rest(text: Path, tmp_path: Path) -> dict[str, Any]:
    """The options of a run that starts from the weights of another."""
    return {"data": str(text), "cache": tmp_path / "cache", "context_length": 16, "eval_windows": 2, "steps": 1, "track": ()}


def test_a_run_starts_from_the_weights_of_another_with_its_own_schedule(
    whole: Path, tmp_path: Path, rest: dict[str, Any]
) -> None:
    new = train(init_from=whole, out=tmp_path / "new", learning_rate=1e-9, precision="fp32", **{**rest, "steps": 2})
    old = lineartime.load(whole)
    assert new.model.config == old.config
    assert torch.allclose(new.model.backbone.embedding.weight, old.backbone.embedding.weight, atol=1e-6)
    assert new.step == 2
    assert train(out=tmp_path / "new", resume=True).finished


def test_weights_that_do_not_fit_the_model_that_is_asked_for_are_named(whole: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"context_length": 16, "out": tmp_path / "new", "track": ()}
    options["data"] = str(tmp_path / "unread.jsonl")  # which is not read before the model is known to fit
    Path(options["data"]).write_text("?" * 100)
    other = {
        "d_model": (
            {"override": {"d_model": 32, "dropout": 0.1}},
            "init_from is .*, but the model needs .* in `override` or `task`",
        ),
        "preset": ({"preset": "transformer++-tiny"}, "preset is transformer..-tiny, .* is flash-tiny: leave it out"),
        "size": ({"preset": "flash-base"}, "preset is flash-base, but the model of `init_from` is flash-tiny: leave it out"),
        "tokenizer": ({"tokenizer": "bytes"}, "tokenizer is bytes, but the model of `init_from` brings the tokens"),
    }
    for asked, message in other.values():
        with pytest.raises(ArgumentError, match=f"^{message}"):
            train(init_from=whole, **asked, **options)
    with pytest.raises(LineartimeError, match=r"unread.jsonl, line 1, is not JSON"):
        train(init_from=whole, override={"dropout": 0.1}, **options)
    with pytest.raises(LineartimeError, match="init_from starts a new run, and cannot be combined with `resume`"):
        train(init_from=whole, resume=True, out=whole)
    with pytest.raises(ArgumentError, match=r"^init_from is .*missing, which does not exist: give the folder of a run"):
        train(init_from=tmp_path / "missing", **options)
    assert not (tmp_path / "new").exists()


def test_override_that_changes_no_shape_is_one_of_the_new_run(whole: Path, tmp_path: Path, rest: dict[str, Any]) -> None:
    other = {"normalization": "paper", "initial_scores": "unit"}  # which makes it the model of another preset
    assert train(init_from=whole, override=other, out=tmp_path / "next", **rest).finished


def test_folder_is_for_one_run_at_a_time(config: MakeConfig) -> None:
    run = config().run_directory
    with locked(run, keep=True):
        assert is_locked(run)
        with pytest.raises(LineartimeError, match=f"out is {run}, which another run is using"):
            train(config())
    assert not is_locked(run)
    assert not run.exists()  # nothing came of it
    train(config(steps=1))
    assert not is_locked(run)


def test_looking_at_a_run_neither_changes_it_nor_keeps_it_from_going_on(finished: Path) -> None:
    run = finished
    lock = run / ".lock"
    lock.chmod(0o400)
    assert not is_locked(run)
    with lock.open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert not is_locked(run)  # somebody else looks, too
        threading.Timer(0.1, fcntl.flock, (looking, fcntl.LOCK_UN)).start()
        lock.chmod(0o600)
        lock_run(run).close()  # waits for the moment that looking takes


def test_mistake_leaves_no_folder(config: MakeConfig, text: Path) -> None:
    with pytest.raises(LineartimeError, match="batch_size is 0"):
        train(config(batch_size=0))
    assert not config().run_directory.exists()
    config().run_directory.mkdir()
    with pytest.raises(LineartimeError, match="data is nothing"):
        train(config(data="nothing"))
    assert config().run_directory.exists(), "a folder of the user is deleted"
    with pytest.raises(LineartimeError, match=f"Cannot write {text}/run: Not a directory"):
        train(config(out=text / "run"))


def test_tokenizer_that_loses_text_or_is_smaller_than_asked_for_is_pointed_out(
    config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lossy = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "the": 1, "square": 2}, unk_token="[UNK]"))
    lossy.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    lossy.save(str(tmp_path / "lossy.json"))
    train(config(tokenizer=str(tmp_path / "lossy.json"), steps=1))
    assert "The tokenizer does not restore the text exactly" in capsys.readouterr().err
    train(config(tokenizer="bpe-8000", steps=1, out=tmp_path / "other"))
    said = capsys.readouterr().err
    assert "does not restore" not in said
    assert re.search(r"The tokenizer has [\d,]+ tokens instead of 8,000, because the text is too short", said)


def test_resuming_and_evaluating_read_the_files_of_training(
    tmp_path: Path, config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one").mkdir()
    for suffix in ("py", "md"):
        (tmp_path / "one" / f"text.{suffix}").write_text(f"a text in {suffix}, to learn\n" * 200)
    run = train(config(data=tmp_path / "one", include=["*.py"], max_time=1e-6)).run
    train(out=run, resume=True, max_time=9)
    lineartime.evaluate(run, split="all", cache=tmp_path / "cache", say=print)
    shown = capsys.readouterr()
    assert "text.md" not in shown.err + shown.out
    assert shown.err.count("90% of text.py") == 2
    assert read_record(run).options["include"] == ["*.py"]
