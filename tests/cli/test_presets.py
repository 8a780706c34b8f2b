"""`lineartime presets`."""

import json

import pytest

import lineartime
from lineartime.cli import main
from lineartime.models.cost import COSTS, COSTS_LENGTH, cost, preset_cost
from lineartime.models.systems import PRESETS, presets

from .conftest import Prints

MODELS = presets("mlm") | presets("clm")
SOME = ("flash-tiny", "transformer-tiny", "linformer-tiny", "hybrid-gau-tiny", "gau-ablation")


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


def test_presets_prints_json_for_other_programs(prints: Prints) -> None:
    shown = prints("presets", "flash-tiny", "linformer-tiny", "--context-length", 1030, "--json")
    flash, linformer = map(json.loads, shown.splitlines())
    assert flash["parameters"] == sum(p.numel() for p in lineartime.build("flash-tiny").parameters())
    assert (flash["name"], flash["context_length"], flash["n_blocks"], flash["d_model"]) == ("flash-tiny", 1030, 8, 256)
    assert 2 * flash["parameters"] < flash["flops_per_token"] < 4 * flash["parameters"]
    assert (linformer["context_length"], linformer["state_bytes"]) == (512, None)
    assert set(json.loads(COSTS.read_text())) == set(PRESETS)  # of which none is counted by default


@pytest.mark.parametrize(
    "name", [*SOME, *(pytest.param(name, marks=pytest.mark.nightly) for name in sorted({*PRESETS} - {*SOME}))]
)
def test_stored_costs_of_presets_are_those_of_their_models(name: str) -> None:
    length, found = preset_cost(name, MODELS[name], COSTS_LENGTH)
    assert length == min(COSTS_LENGTH, MODELS[name].longest_sequence or COSTS_LENGTH)
    assert found == cost(MODELS[name], length)


if __name__ == "__main__":
    COSTS.write_text("{}")
    rows = {name: preset_cost(name, MODELS[name], COSTS_LENGTH) for name in PRESETS}
    COSTS.write_text(json.dumps({name: [length, *values] for name, (length, values) in rows.items()}) + "\n")
