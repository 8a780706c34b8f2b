"""The labels of axes, read from drawn figures."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from lineartime.runs.curve import draw_comparison, draw_curve, thinned
from lineartime.runs.ticks import label_axes


def visible_labels(axis: Any) -> dict[float, str]:
    """What a reader of a figure sees beside an axis: the labels by their places."""
    axis.figure.draw_without_rendering()
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    shown = [(tick.get_loc(), tick.label1) for tick in ticks]
    return {place: text.get_text() for place, text in shown if text.get_visible() and text.get_text() and low <= place <= high}


def number(label: str) -> float:
    digits, _, unit = label.replace(",", "").partition(" ")
    return float(digits) * {"": 1.0, "M": 1e6, "G": 1e9}[unit]


VALUES: dict[str, tuple[float, float]] = {
    "a usual loss": (2.31, 5.62),
    "less than a decade": (310.0, 870.0),
    "hardly anything": (2.30001, 2.30004),
    "less than digits tell": (2.3, 2.3 + 1e-12),
    "equal": (2.5, 2.5),
    "one step": (1, 1),
    "two steps": (1, 2),
    "one decade": (1.0, 10.0),
    "five decades": (0.02, 2000.0),
    "fifteen decades": (1e-9, 1e6),
    "small": (1e-7, 3e-7),
    "tokens of context": (512, 2048),
    "millions": (3_000_000, 3_000_500),
    "billions": (2e9, 5e10),
}


@pytest.mark.parametrize("scale", ["linear", "log", "log2", "whole"])
@pytest.mark.parametrize("name", VALUES)
def test_every_axis_has_at_least_four_labels_that_tell_their_places_apart(name: str, scale: str) -> None:
    values = VALUES[name]
    axes = Figure().subplots()
    axes.plot(values, values, "o-")
    if scale.startswith("log"):
        base = 2 if scale == "log2" else 10
        axes.set_xscale("log", base=base)
        axes.set_yscale("log", base=base)
    label_axes(axes, whole_x=scale == "whole")
    for axis in (axes.xaxis, axes.yaxis):
        labels = visible_labels(axis)
        assert 4 <= len(labels) <= 8
        assert len(set(labels.values())) == len(labels)
        for place, label in labels.items():
            assert number(label) == pytest.approx(place, rel=1e-11, abs=1e-12)
            assert len(label) <= (18 if scale == "log2" else 13)  # powers of two have many digits
        low, high = axis.get_view_interval()
        assert low <= min(values) <= max(values) <= high
    if scale == "whole":
        assert all(place == int(place) for place in visible_labels(axes.xaxis))


def test_labels_on_a_linear_axis_are_round_and_have_equally_many_decimals() -> None:
    axes = Figure().subplots()
    axes.plot([0, 600], [2.0, 3.1])
    label_axes(axes, whole_x=True)
    assert list(visible_labels(axes.xaxis).values()) == ["0", "200", "400", "600"]
    assert list(visible_labels(axes.yaxis).values()) == ["2.00", "2.25", "2.50", "2.75", "3.00"]


def test_labels_on_a_logarithmic_axis_are_evenly_spread() -> None:
    axes = Figure().subplots()
    axes.loglog([0.01, 1e5], [30, 900])
    label_axes(axes)
    assert list(visible_labels(axes.xaxis).values()) == ["0.01", "1", "100", "10,000"]
    assert list(visible_labels(axes.yaxis).values()) == ["30", "100", "300", "1,000"]


def test_measured_lengths_have_labels() -> None:
    cases = {
        (512, 1000, 4096, 8000): ["512", "1,000", "4,096", "8,000"],
        (512, 8192): ["512", "1,024", "2,048", "4,096", "8,192"],
        (1024, 8192, 65536): ["1,024", "2,048", "4,096", "8,192", "16,384", "32,768", "65,536"],
    }
    for lengths, expected in cases.items():
        axes = Figure().subplots()
        axes.plot(lengths, lengths)
        axes.set_xscale("log", base=2)
        label_axes(axes, x_values=lengths)
        assert list(visible_labels(axes.xaxis).values()) == expected


def captured(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    figures: list[Figure] = []
    save = Figure.savefig

    def capture(self: Figure, *arguments: Any, **options: Any) -> None:
        figures.append(self)
        save(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", capture)
    return figures


@pytest.mark.parametrize("steps", [1, 2, 19, 20, 45])
def test_the_mean_of_the_last_steps_begins_where_there_are_as_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    text = "".join(f'{{"step": {step}, "loss": {float(step)}}}\n' for step in range(1, steps + 1))
    (tmp_path / "metrics.jsonl").write_text(text)
    figures = captured(monkeypatch)
    draw_curve(tmp_path)
    each, *means = figures[0].axes[0].lines
    assert len(each.get_xdata()) == steps
    assert each.get_marker() == ("o" if steps == 1 else "None")  # else a single step cannot be seen
    found = [list(zip(*line.get_data(), strict=True)) for line in means]
    assert found == ([[(step, step - 9.5) for step in range(20, steps + 1)]] if steps >= 20 else [])
    lines = [{"step": step, "loss": float(step)} for step in range(1, steps + 1)]
    assert [(line["step"], line["loss"]) for line in thinned(lines)] == [(step, step - 9.5) for step in range(20, steps + 1)]


def test_runs_whose_losses_do_not_compare_have_axes_of_their_own_and_equal_losses_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*losses: float) -> list[dict[str, float]]:
        return [
            {"step": step, "tokens": 10 * step, "seconds": float(step), "validation_loss": loss}
            for step, loss in enumerate(losses, 1)
        ]

    figures = captured(monkeypatch)
    draw_comparison(
        {"text one": {"a": run(2.5, 2.5), "b": run(2.5)}, "text two": {"c": run(6.0, 5.0, 4.0)}}, tmp_path / "x.png"
    )
    axes = figures[0].axes
    assert len(axes) == 6
    limits = [each.get_ylim() for each in axes]
    assert limits[0] == limits[1] == limits[2]
    assert limits[3] == limits[4] == limits[5]
    assert limits[0][1] < 3 < limits[3][0]
    for each in axes:
        assert all(len(visible_labels(axis)) >= 4 for axis in (each.xaxis, each.yaxis))
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["a", "b", "c"]
