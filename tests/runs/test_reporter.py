import builtins
import importlib.util
import inspect
import json
import math
import os
import sys
import time
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lineartime.errors import LineartimeError
from lineartime.runs.metrics import METRICS_FILE, read_metrics
from lineartime.runs.reporter import NullReporter, Reporter, StepMetrics

pytestmark = pytest.mark.pictures


def reporter(run: Path, first_step: int = 0, steps: int = 2) -> Reporter:
    return Reporter(run, first_step, steps, (), record={}, resumed=False)


def take(report: NullReporter, step: int, loss: float = 5.5, **numbers: Any) -> None:
    defaults = {"learning_rates": {"learning_rate": 0.25}, "gradient_norm": 3.0, "tokens": 100, "seconds": 0.5, "waiting": 0.0}
    report.step(step, StepMetrics(loss=loss, **{**defaults, "skipped": 0, **numbers}))


def test_metrics_hold_all_numbers(tmp_path: Path) -> None:
    with reporter(tmp_path) as report:
        take(report, 1)
        report.validation(1, 5.25, 7.5)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0].pop("tokens_per_second") > 0
    assert 0 <= lines[0].pop("seconds") <= lines[1].pop("seconds") < 60
    assert lines == [
        {"step": 1, "loss": 5.5, "learning_rate": 0.25, "gradient_norm": 3.0, "waiting": 0.0, "tokens": 100},
        {"step": 1, "validation_loss": 5.25, "validation_bits_per_byte": 7.5, "tokens": 100},
    ]


def test_losses_are_drawn_when_a_run_ends_even_by_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with reporter(tmp_path / "finished") as report:
        take(report, 1)
    assert (tmp_path / "finished" / "loss.png").is_file()
    assert f"loss curve: {tmp_path / 'finished' / 'loss.png'}" in capsys.readouterr().err

    def fail() -> None:
        with reporter(tmp_path / "failed") as report:
            take(report, 1)
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        fail()
    assert (tmp_path / "failed" / "loss.png").is_file()
    with reporter(tmp_path / "nothing"):
        pass
    assert not (tmp_path / "nothing" / "loss.png").exists()


def test_a_run_without_matplotlib_says_why_there_is_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with reporter(tmp_path) as report:
        take(report, 1)
    assert "no loss curve: The loss curve needs matplotlib, which is not installed: pip install" in capsys.readouterr().err


def test_a_resumed_run_counts_tokens_and_time_on_but_not_the_time_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    with reporter(tmp_path, steps=4) as report:
        now += 5
        take(report, 1)
        now += 5
        take(report, 2, skipped=1)
        now += 5
        take(report, 3, skipped=1)  # after the last checkpoint: lost
    now += 1000
    with reporter(tmp_path, first_step=2, steps=4) as report:
        now += 7
        take(report, 3, skipped=1)
        take(report, 4, skipped=2)
    lines = read_metrics(tmp_path)
    assert [(line["step"], line["tokens"], line["seconds"]) for line in lines] == [
        (1, 100, 5.0),
        (2, 200, 10.0),
        (3, 300, 17.0),
        (4, 400, 17.0),
    ]
    assert lines[-1]["skipped"] == 2

    (tmp_path / METRICS_FILE).write_text('{"step": 1, "tokens": 100}\n')  # a power cut took the lines after it
    with reporter(tmp_path, first_step=4, steps=5) as report:
        take(report, 5)
    assert [(line["step"], line["tokens"]) for line in read_metrics(tmp_path)] == [(1, 100), (5, 500)]


def test_speed_and_waiting_are_those_of_the_step_itself(tmp_path: Path) -> None:
    with reporter(tmp_path) as report:
        report.validation(0, 8.0, None)
        time.sleep(0.05)  # an evaluation or a checkpoint belongs to no step
        take(report, 1, seconds=2.0, waiting=0.5)
        take(report, 2, seconds=2.0, waiting=99.0)
    _, *steps = read_metrics(tmp_path)
    assert [(line["tokens_per_second"], line["waiting"]) for line in steps] == [(50.0, 0.25), (50.0, 1.0)]


def test_a_skipped_step_leaves_one_line_of_valid_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with reporter(tmp_path, steps=3) as report:
        take(report, 1, loss=2.0)
        take(report, 2, loss=math.nan, gradient_norm=math.inf, skipped=1)
        report.validation(2, 2.5, None)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = (tmp_path / "metrics.jsonl").read_text()
    lines = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert [line.get("skipped") for line in lines] == [None, 1, None]
    assert not {"loss", "gradient_norm"} & lines[1].keys()
    shown = capsys.readouterr().err
    assert "training loss 2.000" in shown  # the mean of losses that are numbers


def test_a_resumed_run_may_begin_with_an_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with reporter(tmp_path, first_step=1) as report:
        report.validation(1, 2.5, None)
        assert capsys.readouterr().err == "step 1/2  validation loss 2.500\n"


def test_the_null_reporter_takes_all_calls_and_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [name for name in vars(Reporter) if not name.startswith("_")]
    assert {"step", "validation", "say"} <= set(names)
    for name in names:
        assert inspect.signature(getattr(NullReporter, name)) == inspect.signature(getattr(Reporter, name))
    with NullReporter() as report:
        report.say("nothing")
        take(report, 1)
        report.validation(1, 1.0, None)
    assert capsys.readouterr() == ("", "")


def test_what_is_printed_names_loss_speed_and_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with reporter(tmp_path, steps=10) as report:
        take(report, 5, loss=1.25)
        report.validation(5, 1.5, 2.164)
    line = capsys.readouterr().err
    assert "step  5/10  training loss 1.250  validation loss 1.500 (2.164 bits per byte)" in line
    assert "tokens/s  ETA 0:00:0" in line


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(LineartimeError, match=r"Cannot read .*metrics.jsonl: Is a directory"):
        reporter(tmp_path)


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with reporter(tmp_path) as report:
        log = report._log
        log.close()
        log._opened = Path("/dev/full").open("a")  # noqa: SIM115
        with pytest.raises(LineartimeError, match=r"Cannot write .*metrics.jsonl: No space left on device; free some space"):
            take(report, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), log._opened.fileno())  # or what it could not write would fail again


def test_names_with_brackets_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with reporter(tmp_path) as report:
        report.say("data/x[/y]z [b]a.txt")
    assert "data/x[/y]z [b]a.txt" in capsys.readouterr().err


@pytest.mark.parametrize("with_widgets", [True, False])
def test_a_notebook_shows_the_lines_and_with_widgets_a_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_widgets: bool
) -> None:
    displayed: list[Any] = []

    class ZMQInteractiveShell:
        """The class by which a notebook is known."""

    class Output:
        """A place in the notebook that is written anew."""

        def __enter__(self) -> "Output":
            return self

        def __exit__(self, *_: object) -> None: ...

        def clear_output(self, wait: bool) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    modules: dict[str, dict[str, Any]] = {"IPython": {}, "IPython.display": {"display": displayed.append}}
    modules |= {"ipywidgets": {"Output": Output}} if with_widgets else {}
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content, __spec__=ModuleSpec(name, None), __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    assert (importlib.util.find_spec("ipywidgets") is not None) == with_widgets
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with reporter(tmp_path, steps=10) as report:
            take(report, 1)
            report.validation(1, 1.5, None)
    shown = " ".join(str(getattr(thing, "text", thing)) for thing in displayed)
    assert "validation loss 1.500" in shown
    assert ("tokens/s  ETA" in shown) is True
    assert any(isinstance(thing, Output) for thing in displayed) == with_widgets
