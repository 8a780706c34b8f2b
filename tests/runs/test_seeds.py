"""Runs that differ only in the seed, merged into one row."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from tests.runs.test_table import make_run, rows

from lineartime.cli import main
from lineartime.runs.seeds import merge_seeds
from lineartime.runs.summary import RunSummary, summarize


def made(folder: Path, **runs: dict[str, Any]) -> list[RunSummary]:
    return [summarize(make_run(folder / name, **options), name)[0] for name, options in runs.items()]


def test_seeds_of_one_setting_are_one_row_with_mean_and_deviation(tmp_path: Path) -> None:
    found = merge_seeds(
        made(
            tmp_path,
            b={"best": 2.2, "seed": 1, "out": "b", "override": ["chunk_size=8"]},
            a={"best": 2.0, "seed": 0, "out": "a", "override": ["chunk_size=8"]},
            c={"best": 1.9, "seed": 0, "override": ["chunk_size=16"]},
        )
    )
    merged, alone = found
    assert (merged.name, merged.seeds, merged.options["override"]) == ("a", (0, 1), ["chunk_size=8"])
    assert merged.validation_loss == pytest.approx(2.1)
    assert merged.validation_deviation == pytest.approx(statistics.stdev([2.0, 2.2]))
    assert (merged.bits_per_byte, merged.bits_deviation) == (pytest.approx(1.05), pytest.approx(statistics.stdev([1.0, 1.1])))
    assert [path.name for path in merged.paths] == ["a", "b"]
    losses = [line["validation_loss"] for line in merged.lines if "validation_loss" in line]
    assert losses == pytest.approx([4.1, 3.1, 2.1, 3.1])
    deviations = [line["validation_deviation"] for line in merged.lines if "validation_loss" in line]
    assert deviations == pytest.approx([statistics.stdev([2.0, 2.2])] * 4)
    assert (alone.name, alone.seeds, alone.validation_deviation) == ("c", (), None)


def test_only_runs_of_as_many_steps_and_one_of_each_seed_are_merged(tmp_path: Path) -> None:
    runs = made(
        tmp_path,
        a={"seed": 0, "override": ["x=1", "y=2"]},
        b={"seed": 1, "taken": 30, "override": ["x=1", "y=2"]},
        f={"seed": 4, "learning_rate": 0.1, "override": ["x=1", "y=2"]},
        g={"seed": 5, "taken": 3, "override": ["x=1", "y=2"]},
        h={"seed": 6, "taken": 3, "override": ["x=1", "y=2"]},
        c={"seed": 2, "override": ["y=2", "x=1"]},
        d={"seed": 2, "override": ["x=1", "y=2"]},
        e={"seed": None, "override": ["x=1", "y=2"]},
    )
    alone = [(name, ()) for name in "bfghde"]  # g and h have no evaluation
    assert [(run.name, run.seeds) for run in merge_seeds(runs)] == [("a", (0, 2)), *alone]


def test_the_command_shows_mean_and_deviation_and_overrides_as_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(
        tmp_path,
        a={"best": 2.0, "seed": 0, "override": ["chunk_size=8", "token_shift=true"]},
        b={"best": 2.2, "seed": 1, "override": ["chunk_size=8", "token_shift=true"]},
        c={"best": 1.9, "seed": 0, "override": ["chunk_size=16"]},
    )
    assert main(["runs", str(tmp_path), "--seeds"]) == 0
    header, best, other = rows(capsys.readouterr().out)
    assert {"chunk_size", "token_shift", "seeds"} <= set(header)
    assert "seed" not in header
    assert (best[0], other[0]) == ("c", "a")
    assert "2.100 ± 0.141" in " ".join(other)
    assert main(["runs", str(tmp_path), "--seeds", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["seeds"], len(run["paths"])) for run in shown] == [([], 0), ([0, 1], 2)]
