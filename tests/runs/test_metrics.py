from pathlib import Path

import pytest

from lineartime.errors import LineartimeError
from lineartime.runs.curve import draw_curve
from lineartime.runs.metrics import MetricsLog, losses, read_damaged_metrics, read_metrics
from lineartime.runs.record import write_record


def test_losses_are_listed_by_step(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    log.write(1, {"loss": 2.0})
    log.write(1, {"validation_loss": 2.5})
    log.write(2, {"loss": float("inf")})
    log.write(3, {"loss": 1.0})
    log.close()
    lines = read_metrics(tmp_path)
    assert losses(lines, "loss") == {1: 2.0, 3: 1.0}
    assert losses(lines, "validation_loss") == {1: 2.5}


def test_the_curve_is_a_picture_of_the_losses(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    for step in range(1, 31):
        log.write(step, {"loss": 5 / step})
    log.write(30, {"validation_loss": 0.3})
    log.close()
    assert draw_curve(tmp_path, "title").read_bytes().startswith(b"\x89PNG")


def test_a_curve_is_entitled_with_its_model_and_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    titles = []
    monkeypatch.setattr(Axes, "set_title", lambda self, title: titles.append(title))
    (tmp_path / "metrics.jsonl").touch()
    draw_curve(tmp_path)
    for data in ("somewhere/books.txt", None):
        write_record(tmp_path, {"preset": "flash-tiny", "data": data}, [])
        draw_curve(tmp_path)
    assert titles[:2] == [tmp_path.name, "flash-tiny on books.txt"]
    assert titles[2].startswith("flash-tiny on ")
    assert "None" not in titles[2]


def test_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}]
    assert read_damaged_metrics(tmp_path)[1] == []
    assert draw_curve(tmp_path, "title").exists()


def test_damaged_lines_are_passed_over_and_counted(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 1, "loss": "two"}\n\xff\x00\n[1]\n{"step": "2"}\n{"step": 3, "loss": NaN}\n\x89PNG'
    )
    assert read_metrics(tmp_path) == []
    assert read_damaged_metrics(tmp_path)[1] == [
        "line 1: loss is 'two', but must be a number",
        "line 2: it is not UTF-8 at byte 0",
        "line 3: it is [1], but must be an object",
        "line 4: step is '2', but must be an integer",
        "line 5: loss is nan, but must be a finite number",
        "line 6: it is not UTF-8 at byte 0",
    ]


def test_a_curve_without_its_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(LineartimeError, match=r"needs matplotlib, .* pip install 'lineartime\[plot\]'"):
        draw_curve(tmp_path, "title")
