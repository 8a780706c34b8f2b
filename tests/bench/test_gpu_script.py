"""`benchmarks/gpu.py`, rehearsed at small sizes: in Triton's interpreter where there is no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
PARTS = ["smoke", "models", "generation", "kernels", "lengths", "ops", "peers", "exactness", "tuning"]


@pytest.mark.nightly
def test_parts_run_from_a_bare_clone_and_writes_its_tables(tmp_path: Path) -> None:
    """From another folder, where the package is not installed and what the command line needs is absent."""
    script = f"""
import runpy, sys
for name in ("tyro", "rich", "datasets", "tensorboardX", "tokenizers", "matplotlib"):
    sys.modules[name] = None
sys.argv, sys.path[0] = [{str(SCRIPT)!r}, *sys.argv[1:]], {str(SCRIPT.parent)!r}
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-c", script, "--rehearse", "--out", str(tmp_path / "out")]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    data = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert {row["part"]: row["result"] for row in data["tables"]["parts"]} == dict.fromkeys(PARTS, "done")
    assert {"errors", "train", "profile", "generation", "kernels", "ops"} <= set(data["tables"])
    assert {row["dtype"] for row in data["tables"]["errors"]} == {"bfloat16", "float32", "float16"}
    assert all(row["worst_ratio"] <= 2 and row["same_bits"] for row in data["tables"]["errors"])
    assert all(isinstance(row["ms"], float) or row["ms"].startswith("not measured: ") for row in data["tables"]["train"])
    text = (tmp_path / "out" / "gpu.md").read_text()
    assert "- share of calls that give the same bits twice: 1, goal >= 1\n" in text
    assert "- error of the kernels / of PyTorch in the same dtype: " in text
