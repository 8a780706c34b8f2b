import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from lineartime.errors import LineartimeError
from lineartime.runs.metrics import METRICS_FILE, NullReporter, Reporter, StepMetrics, read_metrics


def reporter(run: Path, first_step: int = 0, steps: int = 2) -> Reporter:
    return Reporter(run, first_step, steps, (), record={}, resumed=False)


def take(report: NullReporter, step: int, loss: float = 5.5, **numbers: Any) -> None:
    defaults = {"learning_rates": {"learning_rate": 0.25}, "gradient_norm": 3.0, "tokens": 100, "seconds": 0.5, "waiting": 0.0}
    report.step(step, StepMetrics(loss=loss, **{**defaults, "skipped": 0, **numbers}))


def test_metrics_hold_all_numbers_and_what_is_printed_names_loss_speed_and_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with reporter(tmp_path, steps=10) as report:
        report.say("data/x[/y]z [b]a.txt")  # as it is, without markup
        time.sleep(0.05)  # an evaluation or a checkpoint belongs to no step
        take(report, 1, seconds=2.0, waiting=0.5)
        report.validation(1, 5.25, 7.5)
        take(report, 2, seconds=2.0, waiting=99.0)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert 0.05 <= lines[0].pop("seconds") <= lines[1].pop("seconds") <= lines[2].pop("seconds") < 60
    step = {"loss": 5.5, "learning_rate": 0.25, "gradient_norm": 3.0, "tokens_per_second": 50.0}
    assert lines == [
        {"step": 1, **step, "waiting": 0.25, "tokens": 100},
        {"step": 1, "validation_loss": 5.25, "validation_bits_per_byte": 7.5, "tokens": 100},
        {"step": 2, **step, "waiting": 1.0, "tokens": 200},
    ]
    note, line, _ = capsys.readouterr().err.splitlines()
    assert note == "data/x[/y]z [b]a.txt"
    losses = "step  1/10  training loss 5.500  validation loss 5.250 (7.500 bits per byte)"
    assert line == f"{losses}  50 tokens/s  ETA 0:00:18"


@pytest.mark.pictures
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


def test_resumed_run_counts_tokens_and_time_on_but_not_the_time_between(
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


def test_skipped_step_leaves_one_line_of_valid_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with reporter(tmp_path) as report:
        log = report._log
        log.close()
        log._opened = Path("/dev/full").open("a")  # noqa: SIM115
        with pytest.raises(LineartimeError, match=r"Cannot write .*metrics.jsonl: No space left on device; free some space"):
            take(report, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), log._opened.fileno())  # or what it could not write would fail again
