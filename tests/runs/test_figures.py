"""Pictures that are whole or as they were."""

from pathlib import Path
from typing import Any

import pytest

from lineartime.errors import LineartimeError
from lineartime.runs.figures import check_picture, new_figure, save_figure

pytestmark = pytest.mark.pictures


def figure() -> Any:
    return new_figure("A test", 1, 1)


def test_a_picture_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save_figure(figure(), tmp_path / "loss.png")
    old = file.read_bytes()

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(LineartimeError, match=r"Cannot write .*loss.png: No space left on device"):
        save_figure(figure(), file)
    assert file.read_bytes() == old
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_stays_a_link_whether_its_picture_is_there_or_not(tmp_path: Path) -> None:
    link, file = tmp_path / "latest.svg", tmp_path / "loss.svg"
    link.symlink_to(file)
    check_picture("A test", link)
    assert link.is_symlink()
    assert not file.exists()
    save_figure(figure(), link)
    assert link.is_symlink()
    assert file.read_text().startswith("<?xml")


def test_a_format_that_needs_latex_is_named_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = figure()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("xelatex not found")

    monkeypatch.setattr(drawn, "savefig", fail)
    with pytest.raises(LineartimeError, match=r"Cannot draw .*loss.pgf \(xelatex not found\): use .png, .pdf or .svg"):
        save_figure(drawn, tmp_path / "loss.pgf")
