import inspect
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from lineartime.errors import LineartimeError
from lineartime.runs.curve import draw_curve
from lineartime.runs.metrics import Reporter, Silent, read_damaged_metrics, read_metrics


def reporter(run: Path, first_step: int = 0, steps: int = 2) -> Reporter:
    return Reporter(run, first_step, steps, (), record={})


def take(report: Reporter, step: int, loss: float = 5.5, **numbers: Any) -> None:
    defaults = {"learning_rate": 0.25, "gradient_norm": 3.0, "tokens": 100, "waiting": 0.0, "skipped": 0}
    report.step(step, loss=loss, **{**defaults, **numbers})


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
        report.skipped(4, "no reason")
    lines = read_metrics(tmp_path)
    assert [(line["step"], line["tokens"], line["seconds"]) for line in lines] == [
        (1, 100, 5.0),
        (2, 200, 10.0),
        (3, 300, 17.0),
        (4, 300, 17.0),
    ]
    assert lines[-1]["skipped"] == 2


def test_a_resumed_run_remembers_how_many_steps_were_skipped(tmp_path: Path) -> None:
    with reporter(tmp_path) as report:
        take(report, 1, skipped=3)
    with reporter(tmp_path, first_step=1) as report:
        report.skipped(2, "no reason")
    assert read_metrics(tmp_path)[-1]["skipped"] == 4


def test_waiting_is_a_share_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with reporter(tmp_path) as report:
        take(report, 1, waiting=0.25)
        take(report, 2, waiting=99.0)
    assert [line["waiting"] for line in read_metrics(tmp_path)] == [0.25, 1.0]


def test_a_skipped_step_is_said_and_counted_and_leaves_valid_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with reporter(tmp_path, steps=3) as report:
        take(report, 1, loss=2.0)
        report.skipped(2, "the loss is nan")
        take(report, 2, loss=math.nan, gradient_norm=math.inf, skipped=1)
        report.validation(2, 2.5, None)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = (tmp_path / "metrics.jsonl").read_text()
    lines = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert [line.get("skipped") for line in lines] == [None, 1, 1, None]
    assert not {"loss", "gradient_norm"} & lines[2].keys()
    shown = capsys.readouterr().err
    assert "step 2 was skipped (1 so far in this run): the loss is nan" in shown
    assert "training loss 2.000" in shown  # the mean of losses that are numbers


def test_a_run_may_go_on_with_an_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with reporter(tmp_path, first_step=1) as report:
        report.validation(1, 2.5, None)
    assert capsys.readouterr().err == "step 1/2  training loss nan  validation loss 2.500\n"


def test_the_silent_one_takes_all_that_the_reporter_takes_and_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [name for name in vars(Reporter) if not name.startswith("_")]
    assert {"step", "skipped", "validation", "say"} <= set(names)
    for name in names:
        assert inspect.signature(getattr(Silent, name)) == inspect.signature(getattr(Reporter, name))
    with Silent() as report:
        report.say("nothing")
        report.skipped(1, "nothing")
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
    with pytest.raises(LineartimeError, match=r"Cannot write .*metrics.jsonl: Is a directory"):
        reporter(tmp_path)


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with reporter(tmp_path) as report:
        report._metrics.close()
        report._metrics = Path("/dev/full").open("a")  # noqa: SIM115
        with pytest.raises(LineartimeError, match=r"Cannot write .*metrics.jsonl: No space left on device; free some space"):
            take(report, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), report._metrics.fileno())  # or what it could not write would fail again


def test_the_curve_is_a_picture_of_the_losses(tmp_path: Path) -> None:
    with reporter(tmp_path, steps=30) as report:
        for step in range(1, 31):
            take(report, step, loss=5 / step)
        report.validation(30, 0.3, None)
    assert draw_curve(tmp_path, "title").read_bytes().startswith(b"\x89PNG")


def test_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}]
    assert read_damaged_metrics(tmp_path)[1] == 0
    assert draw_curve(tmp_path, "title").exists()


def test_damaged_lines_are_passed_over_and_counted(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 1, "loss": "two"}\n\xff\x00\n[1]\n{"step": "2"}\n{"step": 3, "loss": NaN}\n\x89PNG'
    )
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 3}]
    assert read_damaged_metrics(tmp_path)[1] == 4


def test_names_with_brackets_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with reporter(tmp_path) as report:
        report.say("data/x[/y]z [b]a.txt")
    assert "data/x[/y]z [b]a.txt" in capsys.readouterr().err


def test_a_curve_without_its_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(LineartimeError, match=r"needs matplotlib, .* pip install 'lineartime\[plot\]'"):
        draw_curve(tmp_path, "title")
