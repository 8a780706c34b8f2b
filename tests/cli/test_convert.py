"""`lineartime convert`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lineartime.cli import main

Fails = Callable[..., None]


def test_a_run_is_converted_there_and_back(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    assert main(["convert", str(folder / "run"), there, "--checkpoint", "last"]) == 0
    assert main(["convert", there, back]) == 0
    out, error = capfd.readouterr()
    assert out.splitlines() == [
        f"{there}: a model of transformers, which its Auto classes load after `import lineartime.hf`",
        f"{back}: a model of lineartime, which `lineartime generate {back}` and the other commands read",
    ]
    assert set(error.splitlines()) <= {f"converting {source} ..." for source in (folder / "run", there)}  # if it takes long
    assert main(["generate", back, "--prompt", "the", "--max-tokens", "3"]) == 0


def test_a_masked_model_is_one_for_fill(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    theirs, ours = Path(__file__).parents[1] / "assets" / "gau_alpha" / "published", str(tmp_path / "ours")
    assert main(["convert", str(theirs), ours]) == 0
    assert "which `lineartime fill" in capfd.readouterr().out
    assert main(["fill", ours, "--text", "a[MASK]c", "--top", "2"]) == 0
    capfd.readouterr()


def test_other_commands_name_this_one_for_a_model_of_transformers(folder: Path, tmp_path: Path, fails: Fails) -> None:
    there = str(tmp_path / "there")
    assert main(["convert", str(folder / "run"), there]) == 0
    for command in (["generate", there], ["eval", there]):
        fails(command, "there holds a transformers model: convert it to lineartime with `lineartime convert`.")


def test_wrong_folders_are_named(folder: Path, tmp_path: Path, fails: Fails) -> None:
    taken = str(folder)
    fails(["convert", str(folder / "run"), taken], "destination is .*, which exists already")
    fails(["convert", "nowhere", "new"], "source is nowhere, which does not exist: give the folder of a model, or")
    fails(["convert", "nowhere"], "DESTINATION", status=2)
