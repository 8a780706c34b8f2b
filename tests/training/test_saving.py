import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lineartime
from lineartime import checkpoint as checkpoints
from lineartime.checkpoint import TextPosition, TrainingState
from lineartime.data import ByteTokenizer
from lineartime.errors import LineartimeError
from lineartime.models import CausalLM, presets
from lineartime.models.systems import SYSTEMS
from lineartime.training import saving
from lineartime.training.config import TrainConfig
from lineartime.training.loop import prepare
from lineartime.training.optimizers import ModelOptimizer, build_optimizer
from lineartime.training.parallel import World
from lineartime.training.saving import CheckpointWriter, restore_moments


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
    writer = CheckpointWriter(run, model, one_step(model), ByteTokenizer(), World())
    writer.begin(TrainingState(step, "99 tokens", TextPosition(3), {"preset": "flash-tiny"}, validation_loss=loss))
    writer.finish()
    return checkpoints.checkpoint_path(run, step)


def test_failed_write_leaves_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = save(tmp_path, 1)

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "synchronise_folder", full)
    message = r"Cannot write .*step-00000002: No space left on device; free some space, then resume the run"
    with pytest.raises(LineartimeError, match=message):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == [good.name]
    lineartime.load(tmp_path)


KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from lineartime import files
from lineartime.training import saving
import test_saving
run, moment = Path({run!r}), {moment}
test_saving.save(run, 1)
synchronise, calls = files.synchronise, []
def synchronise_and_die(path):
    synchronise(path)
    calls.append(path)
    if len(calls) == moment:
        os.kill(os.getpid(), signal.SIGKILL)
files.synchronise = saving.synchronise = synchronise_and_die
test_saving.save(run, 2, loss=0.5)
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
    writer = CheckpointWriter(tmp_path, model, optimizer, ByteTokenizer(), World())
    kept = {name: value.clone() for name, value in optimizer.moments().items()}
    writer.begin(TrainingState(1, "", TextPosition(0), {}, validation_loss=1.0))
    optimizer.step()  # what happens while it is written must not get into it
    writer.finish()
    again = build_optimizer(model, TrainConfig(optimizer=kind))
    assert not again.moments()
    restore_moments(checkpoints.checkpoint_path(tmp_path, 1), again, 1, World())
    assert again.moments().keys() == kept.keys()
    assert all(torch.equal(again.moments()[name], value) for name, value in kept.items())


# Those with a state of their own beside parameters, or with other ways through training, on every run.
USUAL = ("flash", "flash-next", "gau-softmax", "transformer++", "reformer", "bigbird")


@pytest.mark.parametrize(
    "system", [name if name in USUAL else pytest.param(name, marks=pytest.mark.nightly) for name in SYSTEMS]
)
def test_trained_system_is_read_back_as_it_was(system: str, config: Callable[..., TrainConfig]) -> None:
    name = f"{system}-tiny"
    task = "clm" if name in presets("clm") else "mlm"
    trainer = prepare(config(preset=name, task=task, override=("d_model=16", "n_blocks=1"), steps=1, track=()))
    run = trainer.run().run
    ids = torch.arange(40)[None]
    with torch.no_grad():
        logits = trainer.model.eval()(ids)
        assert logits.isfinite().all()
        # A hash that is drawn at random, and is no parameter, has to come back as well.
        torch.testing.assert_close(lineartime.load(checkpoints.last_checkpoint(run))(ids), logits)
