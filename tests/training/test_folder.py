import fcntl
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lineartime.errors import LineartimeError
from lineartime.runs.record import is_locked, lock_run
from lineartime.runs.table import summarize
from lineartime.training.config import TrainConfig
from lineartime.training.loop import train
from lineartime.training.parallel import World
from lineartime.training.resuming import locked_run

MakeConfig = Callable[..., TrainConfig]


def trained(config: TrainConfig) -> Path:
    """Train, and return the run's folder."""
    return train(config).run


def test_a_folder_is_for_one_run_at_a_time(config: MakeConfig) -> None:
    run = config().run_directory
    with locked_run(config(), World()):
        assert is_locked(run)
        with pytest.raises(LineartimeError, match=f"out is {run}, which another run is using"):
            trained(config())
    assert not is_locked(run)
    assert not run.exists()  # nothing came of it
    trained(config(steps=1))
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


def test_a_lock_that_was_deleted_while_it_was_opened_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, flock = tmp_path / ".lock", fcntl.flock

    def deleted_first(file: object, operation: int) -> None:
        lock.unlink()
        monkeypatch.undo()
        flock(file, operation)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", deleted_first)
    with lock_run(tmp_path):
        assert is_locked(tmp_path)
        with pytest.raises(LineartimeError, match="which another run is using"):
            lock_run(tmp_path)


def test_a_run_that_is_going_on_is_told_from_one_that_was_stopped(stopped: Path) -> None:
    assert summarize(stopped, "")[0].state == "stopped"
    with locked_run(TrainConfig(out=stopped), World()):
        assert summarize(stopped, "")[0].state == "running"


def test_a_mistake_leaves_no_folder(config: MakeConfig) -> None:
    with pytest.raises(LineartimeError, match="batch_size is 0"):
        trained(config(batch_size=0))
    assert not config().run_directory.exists()
    config().run_directory.mkdir()
    with pytest.raises(LineartimeError, match="data is nothing"):
        trained(config(data="nothing"))
    assert config().run_directory.exists(), "a folder of the user is deleted"


def test_text_that_cannot_be_streamed_leaves_no_folder(config: MakeConfig, text: Path) -> None:
    with pytest.raises(LineartimeError, match="is one long text and cannot be streamed"):
        trained(config(streaming=True))
    assert not config().run_directory.exists()
    with pytest.raises(LineartimeError, match=f"Cannot write {text}/run: Not a directory"):
        trained(config(out=text / "run"))


def test_a_single_document_is_not_blamed_on_the_context(config: MakeConfig, tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    file.write_text('{"text": "' + "word " * 1000 + '"}')
    with pytest.raises(LineartimeError, match=r"There is no text in the validation split of .*one.jsonl: give more text"):
        trained(config(data=str(file)))


def test_a_tokenizer_that_loses_text_is_pointed_out(
    config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import tokenizers

    lossy = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "the": 1, "square": 2}, unk_token="[UNK]"))
    lossy.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    lossy.save(str(tmp_path / "lossy.json"))
    trained(config(tokenizer=str(tmp_path / "lossy.json"), steps=1))
    assert "The tokenizer does not restore the text exactly" in capsys.readouterr().err
    trained(config(tokenizer="bpe-300", steps=1, out=tmp_path / "other"))
    assert "does not restore" not in capsys.readouterr().err
