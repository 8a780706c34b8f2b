"""The example notebook runs from its first cell to its last, as it stands in the repository: without outputs."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"


@pytest.fixture(scope="module")
def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
    return found


def test_the_notebook_is_kept_without_outputs(cells: list[dict[str, Any]]) -> None:
    assert len({cell["id"] for cell in cells}) == len(cells)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 5
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.nightly
def test_the_cells_of_the_notebook_run(
    cells: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed").use("agg")
    monkeypatch.chdir(tmp_path)
    session: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile(ast.parse("".join(cell["source"])), cell["id"], "exec"), session)
    assert session["result"].finished
    assert (tmp_path / "runs" / "notebook" / "inspection" / "index.html").exists()
    assert set(session["first"].weights) == {"local", "global"}
    assert "validation loss" in capsys.readouterr().err  # a line for each evaluation, where no bar can be shown
