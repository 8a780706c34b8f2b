"""The example notebook runs from its first cell to its last, as it stands in the repository, without outputs; so do scripts."""

import ast
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((EXAMPLES / "quickstart.ipynb").read_text())["cells"]
    return found


def test_notebook_is_kept_without_outputs(cells: list[dict[str, Any]]) -> None:
    assert len({cell["id"] for cell in cells}) == len(cells)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 5
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.nightly
def test_cells_of_the_notebook_run(
    cells: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed").use("agg")
    monkeypatch.chdir(tmp_path)
    session: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile(ast.parse("".join(cell["source"])), cell["id"], "exec"), session)
    assert session["result"].finished
    assert all(weights.any() for weights in session["first"].weights.values())
    assert "validation loss" in capsys.readouterr().err  # a line for each evaluation, where no bar can be shown


@pytest.mark.nightly
def test_encoder_decoder_learns_to_rewrite_dates() -> None:
    done = subprocess.run([sys.executable, EXAMPLES / "seq2seq.py"], capture_output=True, text=True, check=True)
    scores = re.findall(r"(greedy|4 beams): exact match ([\d.]+) %", done.stdout)
    assert [name for name, _ in scores] == ["greedy", "4 beams"]
    assert all(float(score) > 95 for _, score in scores)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of transformers, about its own models
def test_packing_says_which_models_leak() -> None:
    """Mamba of transformers carries its state over; ours, with every description of a pack, read each document alone."""
    pytest.importorskip("transformers")
    script = runpy.run_path(str(EXAMPLES / "packing.py"))
    leaking, _ = script["moved"](script["build"]("mamba"))
    assert leaking > 0.1
    for name, masked in (("flash-tiny", False), ("mamba2-tiny", False), ("flash-tiny", True)):
        model = script["build"](name, masked, d_model=32)
        for pack in script["PACKS"]:
            changed, alone = script["moved"](model, pack)
            assert changed == 0
            assert alone < 1e-5
    changed, _ = script["moved"](model, "position_ids", position_ids=None)
    assert changed > script["LEAKS"]


@pytest.mark.nightly
def test_layers_of_mossformer_learn_to_take_noise_off_tones_also_frame_by_frame() -> None:
    done = subprocess.run([sys.executable, EXAMPLES / "enhance.py"], capture_output=True, text=True, check=True)
    found = re.findall(r"^(noisy|without layers|bidirectional|causal) +([\d.]+)", done.stdout, re.MULTILINE)
    noisy, alone, bidirectional, causal = (float(value) for _, value in found)
    assert noisy + 4 < alone < min(bidirectional, causal) - 0.5
    (difference,) = re.findall(r"largest difference ([\d.e-]+)", done.stdout)
    assert float(difference) < 1e-4
    ((after_a_second, after_minutes),) = re.findall(r"([\d,]+) bytes after 1 second, ([\d,]+) after", done.stdout)
    assert after_a_second == after_minutes
