"""Files that are whole or not there."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lineartime.files import removed_on_failure, write_atomically


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file.json"
    write_atomically(file, "old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_what_a_failure_has_added_is_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("text")

    def fail() -> None:
        (tmp_path / "folder" / "inside").mkdir(parents=True)
        (tmp_path / "file").write_text("text")
        raise KeyError

    with pytest.raises(KeyError), removed_on_failure(tmp_path):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(KeyError), removed_on_failure(tmp_path / "nowhere"):
        raise KeyError


def test_threads_that_write_the_same_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    file, texts = tmp_path / "file.json", [str(number) * 1000 for number in range(10)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda text: write_atomically(file, text), texts))
    assert file.read_text() in texts
    assert list(tmp_path.iterdir()) == [file]
