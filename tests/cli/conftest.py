"""A trained run for the commands to work on, and the way their errors look."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lineartime.cli import main

TINY = ["--override", "d_model=16", "n_blocks=1", "d_qk=8", "chunk_size=8", "--context-length", "24", "--batch-size", "2"]

# A process that runs the command line with the arguments, as `fork` of all tests starts it.
COMMAND = "import sys; from lineartime.cli import main; sys.exit(main({!r}))"

Fork = Callable[[str], Any]
Fails = Callable[..., None]
Prints = Callable[..., str]


def small(folder: Path) -> list[str]:
    where = ["--data", str(folder / "text.txt"), "--cache", str(folder / "cache")]
    return [*TINY, *where, "--precision", "fp32", "--eval-windows", "2"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a folder of its own: the one the tests are started in may contain runs."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, a cache and a finished run."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "text.txt").write_text("".join(f"the square of {i} is {i * i}, and so on.\n" for i in range(400)))
    assert main(["train", *small(folder), "--out", str(folder / "run"), "--steps", "4", "--eval-every", "2"]) == 0
    return folder


@pytest.fixture(scope="session")
def masked(folder: Path) -> str:
    """A masked model, hardly trained."""
    run = str(folder / "masked")
    assert main(["train", *small(folder), "--out", run, "--steps", "1", "--task", "mlm"]) == 0
    return run


@pytest.fixture
def options(folder: Path) -> list[str]:
    """Options that make `lineartime train` take a moment."""
    return small(folder)


@pytest.fixture
def prints(capsys: pytest.CaptureFixture[str]) -> Prints:
    """`prints("eval", run)`: the standard output of a command that ends well."""

    def prints(*arguments: object) -> str:
        capsys.readouterr()
        assert main([*map(str, arguments)]) == 0
        return capsys.readouterr().out

    return prints


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    """`fails(arguments, message)`: the command ends with status 1 and one sentence on standard error, or with status 2."""

    def fails(arguments: list[str], message: str, status: int = 1) -> None:
        capsys.readouterr()
        try:
            found = main(arguments)
        except SystemExit as error:
            found = int(error.code or 0)
        shown = capsys.readouterr().err
        assert found == status, shown
        assert re.search(message, re.sub(r"[\s│╭╮╰╯─]+", " ", shown)), shown
        assert "Traceback" not in shown
        if status == 1:
            assert shown.startswith("error: ") or "\nerror: " in shown
            assert len(shown[shown.index("error: ") :].strip().splitlines()) == 1

    return fails
