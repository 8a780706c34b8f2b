"""TensorBoard's files, and the calls of wandb, for which a package of the test stands in."""

import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event

from lineartime.errors import LineartimeError
from lineartime.runs.metrics import Reporter, StepMetrics, read_metrics


class FakeRun:
    """A run of wandb, which notes each call."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls

    def log(self, numbers: dict[str, float]) -> None:
        self.calls.append(("log", numbers))

    def define_metric(self, name: str, step_metric: str | None = None, hidden: bool | None = None) -> None:
        self.calls.append(("define_metric", name, step_metric))

    def finish(self) -> None:
        self.calls.append(("finish",))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of wandb."""
    found: list[tuple[Any, ...]] = []

    def init(*, settings: object, resume: str, **options: Any) -> FakeRun:
        print("a greeting")
        found.append(("init", options, resume))
        return FakeRun(found)

    module = types.ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="a test")
    vars(module).update({"init": init, "Settings": lambda *, console: None})
    monkeypatch.setitem(sys.modules, "wandb", module)
    return found


def run_with(run: Path, *trackers: str, first_step: int = 0, resumed: bool = False) -> None:
    with Reporter(run, first_step, 5, trackers, record={"seed": 3}, resumed=resumed) as report:
        for step in (first_step + 1, first_step + 2):
            report.step(step, StepMetrics(5.5, {"learning_rate": 0.25}, 3.0, tokens=100, seconds=1.0, waiting=0.0, skipped=0))
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


def test_scalars_hold_the_numbers_of_the_metrics(tmp_path: Path) -> None:
    run_with(tmp_path, "tensorboard")
    found = scalars(tmp_path)
    for line in read_metrics(tmp_path):
        step = int(line.pop("step"))
        for name in line.keys() - {"tokens", "seconds"}:  # which an evaluation tells once more
            assert found[name, step] == pytest.approx(line[name])
    assert found["validation_bits_per_byte", 2] == 7.5


def test_wandb_gets_options_and_numbers_and_the_same_run_again(
    tmp_path: Path, calls: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    run = tmp_path / "my-run"
    run_with(run, "wandb")
    _, given, again = calls[0]
    identity = given.pop("id")
    assert again == "allow"
    assert given == {"project": "mine", "name": "my-run", "dir": str(run), "config": {"seed": 3}}
    assert [call[1:] for call in calls if call[0] == "define_metric"] == [("step", None), ("*", "step")]
    assert [call[1] for call in calls if call[0] == "log"] == read_metrics(run)
    assert calls[-1] == ("finish",)
    for first_step in (2, 0):  # also before its first checkpoint of a step
        calls.clear()
        run_with(run, "wandb", first_step=first_step, resumed=True)
        assert calls[0][1]["id"] == identity
    calls.clear()
    run_with(run, "wandb", first_step=0)  # nothing was left of the old one
    assert calls[0][1]["id"] != identity
    assert "a greeting" not in capsys.readouterr().out


@pytest.mark.parametrize("failing", ["wandb", "tensorboard"])
def test_tracker_that_fails_is_named_once_and_the_other_goes_on(
    tmp_path: Path,
    calls: list[tuple[Any, ...]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    failing: str,
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device.\nmore")

    with Reporter(tmp_path, 0, 2, ("wandb", "tensorboard"), record={}, resumed=False) as report:
        tracker = report._trackers._trackers["tensorboard"]
        monkeypatch.setattr(*((FakeRun, "log", fail) if failing == "wandb" else (EventsWriter, "write_event", fail)))
        for step in (1, 2):
            report.step(step, StepMetrics(5.5, {"learning_rate": 0.25}, 3.0, tokens=100, seconds=1.0, waiting=0.0, skipped=0))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("The tracker")]
    assert said == [f"The tracker {failing} failed, and training continues without it: [Errno 28] No space left on device."]
    assert len(read_metrics(tmp_path)) == 2
    if failing == "wandb":
        assert ("finish",) not in calls  # which might never end
        assert scalars(tmp_path)["loss", 2] == 5.5
    else:
        tracker.close()
        assert len([call for call in calls if call[0] == "log"]) == 2


def test_tracker_that_cannot_start_is_an_error_at_first_and_left_out_later(
    tmp_path: Path, calls: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("no key is configured")

    monkeypatch.setattr(sys.modules["wandb"], "init", fail)
    with pytest.raises(
        LineartimeError, match="The tracker wandb cannot start: no key is configured; fix that, or leave it out"
    ):
        run_with(tmp_path, "wandb")
    run_with(tmp_path, "wandb", resumed=True)
    assert "The tracker wandb failed, and training continues without it: no key" in capsys.readouterr().err
    assert read_metrics(tmp_path)
