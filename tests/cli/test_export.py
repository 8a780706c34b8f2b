"""`lineartime export`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lineartime.cli import main

Fails = Callable[..., None]


@pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*:FutureWarning")
def test_a_run_becomes_a_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(folder / "run")
    monkeypatch.setattr("lineartime.export.write_onnx", lambda program, file: file)  # tests/test_export.py writes real ones
    assert main(["export", run, "step.pt2"]) == 0
    assert "step.pt2: a step of streams" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["step.pt2"]
    assert main(["export", run, "text.pt2", "--part", "text"]) == 0
    assert "for torch.export.load" in capsys.readouterr().out
    assert main(["export", run, "text.onnx", "--part", "text", "--format", "onnx"]) == 0
    assert "text.onnx: ids [B, T] to logits [B, T, V], in ONNX" in capsys.readouterr().out
    fails(["export", run, "step.pt2"], "file is step.pt2, which exists already")
    fails(["export", run, "step.zip"], "file is step.zip, but must end in .pt2")
    package = ["--part", "text", "--format", "package"]
    fails(["export", run, "a.pt2", *package], "--format is package, but .* use program or onnx, or --part step")
    fails(["export", run], "FILE", status=2)


@pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*:FutureWarning")
def test_a_masked_language_model_becomes_a_program_of_whole_texts(
    masked: str, capsys: pytest.CaptureFixture[str], fails: Fails
) -> None:
    fails(["export", masked, "step.pt2"], "--part is step, but a masked language model reads whole texts: use --part text")
    assert main(["export", masked, "text.pt2", "--part", "text"]) == 0
    assert "text.pt2: ids and mask [B, T] to logits [B, T, V]" in capsys.readouterr().out
