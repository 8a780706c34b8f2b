import fcntl
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import lineartime
from lineartime.errors import LineartimeError
from lineartime.runs.record import is_locked, lock_run, read_record
from lineartime.training.config import TrainConfig
from lineartime.training.loop import train
from lineartime.training.parallel import World
from lineartime.training.saving import locked_run

MakeConfig = Callable[..., TrainConfig]


def trained(config: TrainConfig) -> Path:
    """Train, and return the run's folder."""
    return train(config).run


def test_folder_is_for_one_run_at_a_time(config: MakeConfig) -> None:
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


def test_mistake_leaves_no_folder(config: MakeConfig, text: Path) -> None:
    with pytest.raises(LineartimeError, match="batch_size is 0"):
        trained(config(batch_size=0))
    assert not config().run_directory.exists()
    config().run_directory.mkdir()
    with pytest.raises(LineartimeError, match="data is nothing"):
        trained(config(data="nothing"))
    assert config().run_directory.exists(), "a folder of the user is deleted"
    with pytest.raises(LineartimeError, match=f"Cannot write {text}/run: Not a directory"):
        trained(config(out=text / "run"))


def test_tokenizer_that_loses_text_is_pointed_out(
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
