"""Files that are whole or not there."""

import os
import time
from pathlib import Path

import pytest

from lineartime.errors import ArgumentError, LineartimeError
from lineartime.files import check_new_folder, new_file, new_folder, removed_on_failure, write_atomically


def test_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file.json"
    write_atomically(file, "old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_failure_removes_what_it_added_and_nothing_else(tmp_path: Path) -> None:
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


def test_new_file_or_folder_appears_whole_with_the_folders_above_it(tmp_path: Path) -> None:
    with new_file("file", tmp_path / "a" / "b.pt2") as partial:
        partial.write_text("text")
        assert partial.suffix == ".pt2"  # which writers of other libraries look at
        assert not (tmp_path / "a" / "b.pt2").exists()
    with new_folder("folder", tmp_path / "c" / "d") as folder:
        (folder / "file").write_text("text")
    assert [file.name for file in sorted(tmp_path.rglob("*")) if file.is_file()] == ["b.pt2", "file"]


def test_file_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    def write() -> None:
        with new_file("out", tmp_path / "file") as partial:
            partial.write_text("late")
            (tmp_path / "file").write_text("early")

    with pytest.raises(ArgumentError, match=r"out is .*file, which exists already"):
        write()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "early")]


def test_existing_file_is_not_replaced_and_a_failure_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(ArgumentError, match=r"file is .*file, which exists already"), new_file("file", tmp_path / "file"):
        raise AssertionError
    full = OSError(28, "No space left on device")
    for new in (new_file, new_folder):
        with (
            pytest.raises(LineartimeError, match=r"Cannot write .*other: No space left on device"),
            new("out", tmp_path / "other"),
        ):
            raise full
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_file_that_fails_elsewhere_is_the_one_that_is_named(tmp_path: Path) -> None:
    with pytest.raises(LineartimeError, match=r"Cannot use .*source: No such file"), new_folder("out", tmp_path / "out"):
        (tmp_path / "source").read_text()
    (tmp_path / "file").touch()
    with pytest.raises(LineartimeError, match=r"Cannot write .*out: "), new_folder("out", tmp_path / "file" / "out"):
        raise AssertionError


def test_partial_file_of_a_killed_process_is_removed_once_it_is_old(tmp_path: Path) -> None:
    left = [tmp_path / f".{stem}.{'b2' * 16}.partial{suffix}" for stem, suffix in (("a", ".pt2"), ("b", ".pt2"), ("c", ""))]
    for path in left:
        path.touch()
    for age, kept in ((0, {0, 1, 2}), (7200, {1, 2})):
        os.utime(left[0], (time.time() - age,) * 2)
        with new_file("file", tmp_path / "a.pt2"):
            pass
        (tmp_path / "a.pt2").unlink()
        assert {place for place, path in enumerate(left) if path.exists()} == kept
    left[2].unlink()
    left[2].mkdir()
    os.utime(left[2], (0, 0))
    with new_folder("folder", tmp_path / "c"):
        pass
    assert not left[2].exists()
    assert left[1].exists(), "of another file"


def test_links_and_folders_above_are_no_new_folders(tmp_path: Path) -> None:
    """The rename at the end would fail, after all the work."""
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    wrong = {
        "broken": r"folder is .*broken, which exists already",
        "empty/..": "which is not the name of a new folder",
        "step-00000009": "the name of a checkpoint in a run: choose another name",
        "x" * 300: "Cannot read .*: File name too long",
    }
    for name, message in wrong.items():
        with pytest.raises(LineartimeError, match=message):
            check_new_folder("folder", tmp_path / name)


def test_files_are_as_readable_as_usual_whatever_wrote_them(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    usual = (tmp_path / "usual").stat().st_mode
    with new_file("out", tmp_path / "file") as partial:
        partial.unlink()
        partial.touch(0o600)
    with new_folder("out", tmp_path / "folder") as partial:
        (partial / "file").touch(0o600)
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "folder" / "file").stat().st_mode == usual
