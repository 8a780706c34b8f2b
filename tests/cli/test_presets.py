"""`lineartime presets`."""

import json

import pytest

import lineartime
from lineartime.cli import main


def test_presets_lists_sizes_operations_and_memory(capfd: pytest.CaptureFixture[str]) -> None:
    names = ("flash-base", "transformer-tiny", "linformer-tiny", "combiner-tiny")
    assert main(["presets", *names, "--context-length", "1030"]) == 0
    shown, progress = capfd.readouterr()
    assert not progress  # of which there is none to show without a terminal
    assert "Combiner, rowmajor-axial" in shown
    lines = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.strip()}
    assert lines["flash-base"][:5] == ["112.0", "M", "24", "x", "768"]
    flops, state, unit = lines["flash-base"][5:8]
    assert 224 < float(flops) < 300  # two for each parameter but the embedding's and the bias tables', and attention
    assert (state, unit) == ("62.9", "MB")
    assert lines["transformer-tiny"][5].endswith("*")  # reads 1,024
    assert lines["linformer-tiny"][5].endswith("*")  # reads 512
    assert lines["linformer-tiny"][6] == "none"


def test_presets_prints_json_for_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "flash-tiny", "linformer-tiny", "--context-length", "1030", "--json"]) == 0
    flash, linformer = map(json.loads, capsys.readouterr().out.splitlines())
    assert flash["parameters"] == sum(p.numel() for p in lineartime.build("flash-tiny").parameters())
    assert (flash["name"], flash["context_length"], flash["n_blocks"], flash["d_model"]) == ("flash-tiny", 1030, 8, 256)
    assert 2 * flash["parameters"] < flash["flops_per_token"] < 4 * flash["parameters"]
    assert (linformer["context_length"], linformer["state_bytes"]) == (512, None)
