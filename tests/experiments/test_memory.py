"""Tasks for a long memory, from their definitions to the report: runs, interruptions, other lengths later, wrong input."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lineartime.choices import MemoryTask
from lineartime.data import Batch
from lineartime.errors import ArgumentError
from lineartime.experiments import memory
from lineartime.experiments.command import reproduce
from lineartime.experiments.memory import TASKS, recall_training
from lineartime.experiments.plan import make_plan, with_saved_options
from lineartime.experiments.report import write_report
from lineartime.experiments.runner import read_run, run_all
from lineartime.runs.metrics import read_metrics

from .conftest import Options

ROWS, LENGTH, PAIRS = 200, 96, 8


def draw(task: MemoryTask) -> Batch:
    return TASKS[task].draw(ROWS, LENGTH, PAIRS, torch.Generator().manual_seed(1))


def recalled(ids: list[int]) -> dict[int, int]:
    values = dict(zip(ids[0 : 2 * PAIRS : 2], ids[1 : 2 * PAIRS : 2], strict=True))
    return {place: values[key] for place, key in enumerate(ids) if place >= 2 * PAIRS and key in values}


def copied(ids: list[int]) -> dict[int, int]:
    half = len(ids) // 2
    assert len({ids[half], *ids[:half]}) == len(set(ids[:half])) + 1  # the separator is no symbol
    return {half + place: symbol for place, symbol in enumerate(ids[:half])}


def induced(ids: list[int]) -> dict[int, int]:
    first, last = (place for place, symbol in enumerate(ids) if symbol == ids[-1])
    return {last: ids[first + 1]}


def selected(ids: list[int]) -> dict[int, int]:
    [(noise, _)] = Counter(ids).most_common(1)
    symbols = [symbol for symbol in ids if symbol not in (noise, ids[-1])]
    return dict(enumerate(symbols, len(ids) - len(symbols)))


SOLVERS: dict[MemoryTask, Callable[[list[int]], dict[int, int]]] = {
    "recall": recalled,
    "copying": copied,
    "induction": induced,
    "selective-copying": selected,
}


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_found_by_a_few_lines_of_python_in_texts_that_follow_from_their_seed(task: MemoryTask) -> None:
    batch = draw(task)
    assert torch.equal(batch.inputs, draw(task).inputs)
    assert len(set(map(tuple, batch.inputs.tolist()))) == ROWS
    assert batch.inputs.shape == batch.targets.shape == (ROWS, LENGTH)
    assert 0 <= int(batch.inputs.min()) <= int(batch.inputs.max()) < TASKS[task].vocab_size(PAIRS)
    for ids, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        assert {place: target for place, target in enumerate(targets) if target != -100} == SOLVERS[task](ids)


def test_recall_is_trained_with_fewer_pairs_and_more_questions() -> None:
    seen = set()
    for seed in range(40):
        batch = recall_training(2, LENGTH, PAIRS, torch.Generator().manual_seed(seed))
        ids, targets = batch.inputs[0].tolist(), batch.targets[0].tolist()
        pairs = sum(64 <= each < 128 for each in ids)  # the values
        values = dict(zip(ids[0 : 2 * pairs : 2], ids[1 : 2 * pairs : 2], strict=True))
        asked = {place: target for place, target in enumerate(targets) if target >= 0}
        assert asked == {place: values[key] for place, key in enumerate(ids) if place >= 2 * pairs and key in values}
        seen.add((pairs, len(asked)))
    assert {pairs for pairs, _ in seen} == {1, 2, 4, 8}
    assert all(asked in (pairs, LENGTH - 2 * pairs) for pairs, asked in seen)
    assert len(seen) == 8


@pytest.fixture
def options(options: Options) -> Options:
    """`options(steps=3)`: options of the experiment on memory, which reads no text."""
    return lambda **values: options("memory", data=(), **values)


def losses(folder: Path) -> list[tuple[float, ...]]:
    names = ("step", "loss", "validation_loss", "validation_accuracy")
    return [tuple(line.get(name, -1.0) for name in names) for line in read_metrics(folder)]


def test_tasks_are_trained_and_reported(options: Options, here: None, done: list[str]) -> None:
    plan = make_plan(options(systems=("flash", "transformer++"), longer=(2,), steps=8))
    assert [str(each) for each in plan.candidates][:2] == ["recall, 64 tokens, 4 to remember", "copying, 64 tokens"]
    assert run_all(plan) == []
    assert done == ["run"] * 4 * 2
    file, report = write_report(plan)
    assert report["problems"] == []
    assert {path.name for path in plan.folder.glob("*.png")} == {"lengths.png", "states.png"}
    for setting in report["settings"]:
        for row in setting["rows"]:
            assert [run["state"] for run in row["runs"]] == ["finished"]
            assert [point[0] for point in row["runs"][0]["curve"]] == [2, 4, 6, 8]
            assert all(0 <= test["accuracy"] <= 1 for run in row["runs"] for test in run["tests"])
            assert row["tokens_per_second"] > 0
    assert "| **test accuracy** at 2 times the length |" in file.read_text()
    flash, transformer = report["settings"][1]["rows"]
    assert 0 < flash["state_bytes"] < transformer["state_bytes"]


def test_rate_with_the_lowest_loss_is_trained_with_all_seeds(options: Options, here: None, done: list[str]) -> None:
    values: dict[str, Any] = {"texts": ("induction",), "systems": ("flash",), "steps": 4}
    plan = make_plan(options(**values, seeds=2, rates=(1e-3, 1e-2)))
    assert run_all(plan) == []
    assert done == ["tune", "tune", "run", "run"]
    row = write_report(make_plan(with_saved_options(options(**values))))[1]["settings"][0]["rows"][0]
    assert [run["seed"] for run in row["runs"]] == [0, 1]
    grid = row["grid"]["adamw"]
    assert grid[f"{row['rate']:g}"] == min(grid.values())
    assert read_run(plan.folder / "induction-64" / "flash" / "seed-0").record.options["beta2"] == 0.98
    with pytest.raises(ArgumentError, match=r"lengths is 32, but the runs in .* were made with the default: use that, or give"):
        reproduce(options(lengths=(32,)))


def test_interrupted_run_begins_again(options: Options, here: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values: dict[str, Any] = {"texts": ("recall",), "systems": ("flash",), "steps": 8}
    plan = make_plan(options(**values))
    with monkeypatch.context() as patch:
        patch.setattr(memory, "held_out", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_all(plan)
    run = Path("recall-64-4", "flash", "seed-0")
    assert read_run(plan.folder / run).state == "missing"
    assert run_all(plan) == []
    whole = make_plan(replace(options(**values), out=tmp_path / "whole"))
    assert run_all(whole) == []
    assert losses(plan.folder / run) == losses(whole.folder / run)
    assert read_run(plan.folder / run).outcome["tests"] == read_run(whole.folder / run).outcome["tests"]
