"""The numbers of a run while it trains: metrics.jsonl, what is printed, TensorBoard's files, and the calls of wandb."""

import json
import math
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import MagicMock, Mock, call

import pytest
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event

from lineartime.runs.metrics import METRICS_FILE, NullReporter, Reporter, draw_curve, read_metrics


def reporter(run: Path, first_step: int = 0, steps: int = 2) -> Reporter:
    return Reporter(run, first_step, steps, (), record={}, resumed=False)


STEP = {"loss": 5.5, "learning_rate": 0.25, "gradient_norm": 3.0, "tokens_per_second": 50.0, "waiting": 0.25}


def take(report: NullReporter, step: int, **numbers: float) -> None:
    report.step(step, 100, {**STEP, **numbers})


def test_metrics_hold_all_numbers_and_what_is_printed_names_loss_speed_and_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with reporter(tmp_path, steps=10) as report:
        report.say("data/x[/y]z [b]a.txt")  # as it is, without markup
        time.sleep(0.05)  # an evaluation or a checkpoint belongs to no step
        take(report, 1)
        report.validation(1, 5.25, 7.5)
        take(report, 2, waiting=1.0)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert 0.05 <= lines[0].pop("seconds") <= lines[1].pop("seconds") <= lines[2].pop("seconds") < 60
    assert lines == [
        {"step": 1, **STEP, "tokens": 100},
        {"step": 1, "validation_loss": 5.25, "validation_bits_per_byte": 7.5, "tokens": 100},
        {"step": 2, **STEP, "waiting": 1.0, "tokens": 200},
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


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 1, "loss": "two"}\n\xff\x00\n{"step": 2, "loss": 2.0}\n{"step": 3, "loss": NaN}\n{"loss": 1.0}\n3\n'
        b'{"step": 4, "lo'
    )
    assert read_metrics(tmp_path) == [{"step": 2, "loss": 2.0}]
    # Nor is a last line that a killed process has cut off.
    assert draw_curve(tmp_path).exists()


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """The package wandb, whose `init` prints something and returns `wandb.run`."""
    module = MagicMock(__spec__=ModuleSpec("wandb", None, origin="a test"))
    module.init.side_effect = lambda **_: print("a greeting") or module.run
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def logged(wandb: MagicMock) -> list[dict[str, float]]:
    return [numbers for (numbers,), _ in wandb.run.log.call_args_list]


def run_with(run: Path, first_step: int = 0, resumed: bool = False) -> None:
    with Reporter(run, first_step, 5, ("wandb",), record={"seed": 3}, resumed=resumed) as report:
        for step in (first_step + 1, first_step + 2):
            take(report, step)
        report.validation(first_step + 2, 5.25, 7.5)


def scalars(run: Path) -> dict[tuple[str, int], float]:
    """All scalars in a run's event files; a record is a length (8 bytes), its checksum (4), the event, its checksum (4)."""
    found = {}
    for file in (run / "tensorboard").iterdir():
        content = file.read_bytes()
        while content:
            length = int.from_bytes(content[:8], "little")
            event = Event.FromString(content[12 : 12 + length])
            found.update({(value.tag, event.step): value.simple_value for value in event.summary.value})
            content = content[16 + length :]
    return found


def test_wandb_gets_options_and_numbers_and_the_same_run_again(
    tmp_path: Path, wandb: MagicMock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    run = tmp_path / "my-run"
    run_with(run)
    wandb.Settings.assert_called_once_with(console="off")
    given = wandb.init.call_args.kwargs
    identity = given["id"]
    known = {"project": "mine", "name": "my-run", "dir": str(run), "config": {"seed": 3}, "resume": "allow"}
    assert given == {**known, "id": identity, "settings": wandb.Settings()}
    assert wandb.run.define_metric.mock_calls == [call("step", hidden=True), call("*", step_metric="step")]
    assert logged(wandb) == read_metrics(run)
    assert wandb.run.mock_calls[-1] == call.finish()
    for first_step in (2, 0):  # also before its first checkpoint of a step
        run_with(run, first_step=first_step, resumed=True)
        assert wandb.init.call_args.kwargs["id"] == identity
    run_with(run, first_step=0)  # nothing was left of the old one
    assert wandb.init.call_args.kwargs["id"] != identity
    assert "a greeting" not in capsys.readouterr().out


@pytest.mark.parametrize("failing", ["wandb", "tensorboard"])
def test_tracker_that_fails_is_named_once_and_the_other_goes_on(
    tmp_path: Path, wandb: MagicMock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    full = OSError(28, "No space left on device.\nmore")
    with Reporter(tmp_path, 0, 2, ("wandb", "tensorboard"), record={}, resumed=False) as report:
        broken = (wandb.run, "log") if failing == "wandb" else (EventsWriter, "write_event")
        tensorboard = report._trackers["tensorboard"]
        monkeypatch.setattr(*broken, Mock(side_effect=full))
        for step in (1, 2):
            take(report, step)
        report.validation(2, 5.25, 7.5)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("The tracker")]
    assert said == [f"The tracker {failing} failed, and training continues without it: [Errno 28] No space left on device."]
    lines = read_metrics(tmp_path)
    assert len(lines) == 3
    if failing == "wandb":
        wandb.run.finish.assert_not_called()  # which might never end
        found = scalars(tmp_path)
        for line in lines:
            step = int(line.pop("step"))
            for name in line.keys() - {"tokens", "seconds"}:  # which an evaluation tells once more
                assert found[name, step] == pytest.approx(line[name])
    else:
        tensorboard.close()
        assert logged(wandb) == lines


def test_tracker_that_cannot_start_is_left_out_of_a_resumed_run(
    tmp_path: Path, wandb: MagicMock, capsys: pytest.CaptureFixture[str]
) -> None:
    """That it is an error of a new run is tested beside training."""
    wandb.init.side_effect = RuntimeError("no key is configured")
    run_with(tmp_path, resumed=True)
    assert "The tracker wandb failed, and training continues without it: no key" in capsys.readouterr().err
    assert read_metrics(tmp_path)
