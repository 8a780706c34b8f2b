"""Tasks for a long memory, from their definitions to the report: runs, interruptions, other lengths later, wrong input."""

import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lineartime.choices import MemoryTask
from lineartime.data import Batch, TokenStream
from lineartime.errors import ArgumentError
from lineartime.experiments.command import reproduce
from lineartime.experiments.memory import DIGITS, TASKS, TaskTrainer, needle, recall_training
from lineartime.experiments.plan import make_plan, with_saved_options
from lineartime.experiments.report import write_report
from lineartime.experiments.runner import read_run, run_all
from lineartime.runs.metrics import read_metrics

from .conftest import Do, Options, ignore

ROWS, LENGTH, PAIRS = 200, 96, 8
TEXT = TokenStream("a text", np.frombuffer(bytes(97 + i * i % 23 for i in range(5000)), dtype=np.uint8), 5000)


def draw(task: MemoryTask, length: int = LENGTH, depth: float | None = None) -> Batch:
    generator, make = torch.Generator().manual_seed(1), TASKS[task].draw
    return needle(ROWS, length, generator, TEXT, depth) if make is None else make(ROWS, length, PAIRS, generator)


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


def found(ids: list[int]) -> dict[int, int]:
    text = bytes(ids).decode()
    number = re.findall(rf"The magic number is (\d{{{DIGITS}}})\. ", text)[0]
    assert text.endswith(f" The magic number is {number[:-1]}")
    return dict(enumerate(number.encode(), len(ids) - DIGITS))


SOLVERS: dict[MemoryTask, Callable[[list[int]], dict[int, int]]] = {
    "recall": recalled,
    "copying": copied,
    "induction": induced,
    "selective-copying": selected,
    "needle": found,
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


def test_needle_is_as_deep_as_asked() -> None:
    for depth, low, high in ((0.0, 0, 0), (0.5, 19, 25), (1.0, 40, 50)):
        places = [bytes(ids).decode().index(" The magic") for ids in draw("needle", depth=depth).inputs.tolist()]
        assert low <= min(places) <= max(places) <= high
    anywhere = [bytes(ids).decode().index(" The magic") for ids in draw("needle").inputs.tolist()]
    assert len(set(anywhere)) > 20


def losses(folder: Path) -> list[tuple[float, ...]]:
    names = ("step", "loss", "validation_loss", "validation_accuracy")
    return [tuple(line.get(name, -1.0) for name in names) for line in read_metrics(folder)]


def test_tasks_are_trained_and_reported(options: Options, here: Do, done: list[str]) -> None:
    tasks = ("recall", "copying", "induction", "selective-copying", "needle")
    plan = make_plan(options("memory", tasks=tasks, systems=("flash", "transformer++"), longer=(2,), steps=8))
    assert [str(each) for each in plan.candidates][:2] == ["recall, 64 tokens, 4 to remember", "copying, 64 tokens"]
    assert run_all(plan, ignore, here) == []
    assert done == ["memory"] * 5 * 2
    file, report = write_report(plan)
    assert report["problems"] == []
    assert {path.name for path in plan.folder.glob("*.png")} == {"lengths.png", "states.png"}
    for setting in report["settings"]:
        for row in setting["rows"][:: len(setting["rows"]) - 1]:  # flash and transformer++
            assert [run["state"] for run in row["runs"]] == ["finished"]
            assert [point[0] for point in row["runs"][0]["curve"]] == [2, 4, 6, 8]
            assert all(0 <= test["accuracy"] <= 1 for run in row["runs"] for test in run["tests"])
            assert (row["state_bytes"] or 0) > 0
            assert row["tokens_per_second"] > 0
    text = file.read_text()
    assert "| **test accuracy** at 2 times the length |" in text
    assert "| **test accuracy** depth 25% |" in text
    assert not list(plan.folder.rglob("progress.safetensors"))
    flash, transformer = (report["settings"][1]["rows"][place] for place in (0, -1))
    assert (flash["state_bytes"] or 0) < (transformer["state_bytes"] or 0)


def test_best_rate_of_a_system_is_shown_with_all_its_seeds(options: Options, here: Do) -> None:
    values: dict[str, Any] = {"tasks": ("induction",), "systems": ("flash",), "steps": 4}
    plan = make_plan(options("memory", **values, seeds=2, rates=(1e-3, 1e-2)))
    assert run_all(plan, ignore, here) == []
    row = write_report(make_plan(with_saved_options(options("memory", **values))))[1]["settings"][0]["rows"][0]
    assert [run["seed"] for run in row["runs"]] == [0, 1]
    folder = plan.folder / "induction-64" / "flash"
    accuracies = {
        f"{rate:g}": sum(read_run(folder / f"rate-{rate:g}-seed-{seed}").final["validation_accuracy"] for seed in (0, 1)) / 2
        for rate in plan.config.rates
    }
    assert row["grid"]["adamw"] == accuracies
    assert accuracies[f"{row['rate']:g}"] == max(accuracies.values())


@pytest.mark.parametrize("kill", [False, True])
def test_interrupted_run_ends_as_if_it_had_not_been(
    options: Options, here: Do, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kill: bool
) -> None:
    values: dict[str, Any] = {"tasks": ("recall",), "systems": ("flash",), "steps": 8}
    plan = make_plan(options("memory", **values))
    take = TaskTrainer.take_step

    def take_and_stop(self: TaskTrainer, step: int) -> dict[str, float]:
        if step == 4 and kill:
            raise OSError("killed")
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return take(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(TaskTrainer, "take_step", take_and_stop)
        with nullcontext() if kill else pytest.raises(KeyboardInterrupt):
            run_all(plan, ignore, here)
    run = Path("recall-64-4", "flash", "rate-0.003-seed-0")
    assert read_run(plan.folder / run).state == "interrupted"
    assert run_all(plan, ignore, here) == []
    whole = make_plan(replace(options("memory", **values), out=tmp_path / "whole"))
    assert run_all(whole, ignore, here) == []
    assert losses(plan.folder / run) == losses(whole.folder / run)
    assert read_run(plan.folder / run).outcome["tests"] == read_run(whole.folder / run).outcome["tests"]


def test_other_lengths_join_the_report_and_nothing_is_repeated(options: Options, here: Do, done: list[str]) -> None:
    shared: dict[str, Any] = {"tasks": ("recall",), "systems": ("flash",), "steps": 2}
    for lengths, pairs in (((32,), (2,)), ((64,), (2, 8)), ((32, 64), (2,))):
        plan = make_plan(with_saved_options(options("memory", **shared, lengths=lengths, pairs=pairs)))
        assert run_all(plan, ignore, here) == []
    assert len(done) == 3
    file, report = write_report(make_plan(with_saved_options(options("memory", **shared, lengths=(32,), pairs=(2,)))))
    assert [each["label"] for each in report["settings"]] == ["recall-32-2", "recall-64-2", "recall-64-8"]
    assert "--tasks recall --lengths 32 64 --pairs 2 8" in file.read_text()
    with pytest.raises(ArgumentError, match=r"steps is 3, but the runs in .* were made with 2: use that, or give another"):
        reproduce(options("memory", steps=3))


def test_text_shorter_than_a_row_of_needles_is_told(options: Options, here: Do, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a short text\n" * 40)
    plan = make_plan(options("memory", tasks=("needle",), lengths=(4096,), systems=("flash",), steps=2, data=(str(short),)))
    [problem] = run_all(plan, ignore, here)
    assert "fewer than a text of 4,096: give more text, or smaller `lengths`" in problem
