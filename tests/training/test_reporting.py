import json
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from lineartime.errors import LineartimeError
from lineartime.training.curve import draw_curve
from lineartime.training.reporting import Reporter, read_metrics


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


def test_metrics_and_scalars_hold_the_same_numbers(tmp_path: Path) -> None:
    with Reporter(tmp_path, 0, 2, tensorboard=True) as report:
        report.step(1, 5.5, 0.25, 3.0, 100)
        report.validation(1, 5.25, 7.5)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0].pop("tokens_per_second") > 0
    assert lines == [
        {"step": 1, "loss": 5.5, "learning_rate": 0.25, "gradient_norm": 3.0},
        {"step": 1, "validation_loss": 5.25, "validation_bits_per_byte": 7.5},
    ]
    found = scalars(tmp_path)
    assert found["loss", 1] == 5.5
    assert found["validation_bits_per_byte", 1] == 7.5
    assert found["tokens_per_second", 1] > 0


def test_without_tensorboard_there_are_no_event_files(tmp_path: Path) -> None:
    with Reporter(tmp_path, 0, 2, tensorboard=False) as report:
        report.step(1, 5.5, 0.25, 3.0, 100)
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_what_is_printed_names_loss_speed_and_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter(tmp_path, 0, 10, tensorboard=False) as report:
        report.step(5, 1.25, 0.1, 3.0, 100)
        report.validation(5, 1.5, 2.164)
    line = capsys.readouterr().err
    assert "step  5/10  training loss 1.250  validation loss 1.500 (2.164 bits per byte)" in line
    assert "tokens/s  ETA 0:00:0" in line


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(LineartimeError, match=r"Cannot write .*metrics.jsonl: Is a directory"):
        Reporter(tmp_path, 0, 2, tensorboard=False)


def test_the_curve_is_a_picture_of_the_losses(tmp_path: Path) -> None:
    with Reporter(tmp_path, 0, 30, tensorboard=False) as report:
        for step in range(1, 31):
            report.step(step, 5 / step, 0.1, 1.0, 100)
        report.validation(30, 0.3, None)
    assert draw_curve(tmp_path, "title").read_bytes().startswith(b"\x89PNG")


def test_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}]
    assert draw_curve(tmp_path, "title").exists()


def test_names_with_brackets_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter(tmp_path, 0, 2, tensorboard=False) as report:
        report.say("data/x[/y]z [b]a.txt")
    assert "data/x[/y]z [b]a.txt" in capsys.readouterr().err


def test_a_curve_without_its_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(LineartimeError, match=r"needs matplotlib, .* pip install 'lineartime\[plot\]'"):
        draw_curve(tmp_path, "title")
