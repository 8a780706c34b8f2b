import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event

from lineartime.errors import LineartimeError
from lineartime.runs.metrics import read_metrics
from lineartime.runs.reporter import Reporter, StepMetrics
from lineartime.runs.trackers import check_trackers


class FakeRun:
    """What the runs of both packages have in common; notes each call."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls

    def log(self, numbers: dict[str, float], step: int | None = None) -> None:
        self.calls.append(("log", numbers, step))

    def define_metric(self, name: str, step_metric: str | None = None, hidden: bool | None = None) -> None:
        self.calls.append(("define_metric", name, step_metric))

    def finish(self) -> None:
        self.calls.append(("finish",))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of packages that stand in for wandb and trackio."""
    found: list[tuple[Any, ...]] = []

    def init_wandb(
        *, project: str, id: str, name: str, dir: str, config: dict[str, Any], resume: str, settings: object
    ) -> FakeRun:
        print("a greeting")
        found.append(("init", "wandb", {"project": project, "id": id, "name": name, "dir": dir, "config": config}, resume))
        return FakeRun(found)

    def init_trackio(*, project: str, name: str, config: dict[str, Any], resume: str, embed: bool) -> FakeRun:
        print("a greeting")
        found.append(("init", "trackio", {"project": project, "name": name, "config": config}, resume))
        return FakeRun(found)

    def settings(*, console: str) -> None:
        assert console == "off"

    packages: dict[str, dict[str, Any]] = {
        "wandb": {"init": init_wandb, "Settings": settings},
        "trackio": {"init": init_trackio, "finish": lambda: FakeRun(found).finish()},
    }
    for package, functions in packages.items():
        module = types.ModuleType(package)
        module.__spec__ = importlib.machinery.ModuleSpec(package, None, origin="a test")
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, package, module)
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


def test_packages_get_options_and_numbers_and_the_same_run_again(
    tmp_path: Path, calls: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    run = tmp_path / "my-run"
    run_with(run, "wandb", "trackio")
    (_, _, wandb, again), (_, _, trackio, _) = (call for call in calls if call[0] == "init")
    identity = wandb.pop("id")
    assert again == "allow"
    assert wandb == {"project": "mine", "name": "my-run", "dir": str(run), "config": {"seed": 3}}
    assert trackio == {"project": "lineartime", "name": f"my-run-{identity}", "config": {"seed": 3}}
    assert [call for call in calls if call[0] == "define_metric"] == [
        ("define_metric", "step", None),
        ("define_metric", "*", "step"),
    ]
    lines = read_metrics(run)
    logged = [call[1:] for call in calls if call[0] == "log"]
    assert [numbers for numbers, step in logged if step is None] == lines  # Weights & Biases
    assert [{"step": step, **numbers} for numbers, step in logged if step is not None] == lines
    assert calls[-2:] == [("finish",), ("finish",)]
    for first_step in (2, 0):  # also before its first checkpoint of a step
        calls.clear()
        run_with(run, "wandb", "trackio", first_step=first_step, resumed=True)
        wandb, trackio = (call[2] for call in calls if call[0] == "init")
        assert (wandb["id"], trackio["name"]) == (identity, f"my-run-{identity}")
    calls.clear()
    run_with(run, "wandb", first_step=0)  # nothing was left of the old one
    assert calls[0][2]["id"] != identity
    assert "a greeting" not in capsys.readouterr().out


def test_a_tracker_that_fails_is_said_once_and_the_others_go_on(
    tmp_path: Path, calls: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: FakeRun, numbers: dict[str, float], step: int | None = None) -> None:
        if step is None:
            raise ConnectionError("no route to host.\nmore")
        self.calls.append(("log", numbers, step))

    monkeypatch.setattr(FakeRun, "log", fail)
    run_with(tmp_path, "wandb", "trackio", "tensorboard")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("The tracker")]
    assert said == ["The tracker wandb failed, and training continues without it: no route to host."]
    assert len([call for call in calls if call[0] == "log"]) == 3
    assert calls.count(("finish",)) == 1  # the one that failed might never end
    assert scalars(tmp_path)["loss", 2] == 5.5
    assert len(read_metrics(tmp_path)) == 3


def test_scalars_on_a_full_disk_end_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(writer: EventsWriter, event: Event) -> None:
        raise OSError(28, "No space left on device")

    with Reporter(tmp_path, 0, 2, ("tensorboard",), record={}, resumed=False) as report:
        tracker = report._trackers._trackers["tensorboard"]
        monkeypatch.setattr(EventsWriter, "write_event", fail)
        report.step(1, StepMetrics(5.5, {"learning_rate": 0.25}, 3.0, tokens=100, seconds=1.0, waiting=0.0, skipped=0))
    tracker.close()
    assert "The tracker tensorboard failed, and training continues without it: [Errno 28] No space" in capsys.readouterr().err
    assert len(read_metrics(tmp_path)) == 1


def test_a_tracker_that_cannot_begin_is_an_error_at_first_and_done_without_later(
    tmp_path: Path, calls: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("no key is configured")

    monkeypatch.setattr(sys.modules["wandb"], "init", fail)
    with pytest.raises(LineartimeError, match=r"The tracker wandb cannot start: no key is configured; fix that, or leave"):
        run_with(tmp_path, "wandb")
    run_with(tmp_path, "wandb", first_step=1, resumed=True)
    assert "The tracker wandb failed, and training continues without it: no key" in capsys.readouterr().err


def test_a_tracker_whose_package_is_missing_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # where there is no package, but a folder of its name
    for name in ("wandb", "trackio"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    sys.path_importer_cache.clear()
    (tmp_path / "wandb").mkdir()
    for name in ("wandb", "trackio"):
        with pytest.raises(LineartimeError, match=rf"The tracker {name} needs {name}, .* pip install 'lineartime\[{name}\]'"):
            check_trackers([name])
    with pytest.raises(LineartimeError, match="track contains 'mlflow', but must be any of tensorboard, wandb, trackio"):
        check_trackers(["mlflow"])
