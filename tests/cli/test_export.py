"""`lineartime export`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lineartime.cli import main

Fails = Callable[..., None]


@pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*:FutureWarning")
def test_a_run_becomes_a_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: Fails) -> None:
    run = str(folder / "run")
    assert main(["export", run, "step.pt2"]) == 0
    assert "step.pt2: a step of streams" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["step.pt2"]
    assert main(["export", run, "text.pt2", "--part", "text"]) == 0
    assert "after `import lineartime`" in capsys.readouterr().out
    fails(["export", run, "step.pt2"], "file is step.pt2, which exists already")
    fails(["export", run, "step.zip"], "file is step.zip, but must end in .pt2")
    fails(["export", run, "a.pt2", "--part", "text", "--format", "package"], "--format is package, but .* use --part step")
    fails(["export", run], "FILE", status=2)
