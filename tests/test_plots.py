"""Plots: what a reader sees beside the axes, and files that are whole or as they were."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from lineartime.plots import label_axes, looks_of
from lineartime.runs.metrics import draw_curve, thinned

pytestmark = pytest.mark.pictures


def labels(axis: Any) -> list[str]:
    """The labels that are visible beside an axis."""
    axis.figure.draw_without_rendering()
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    return [tick.label1.get_text() for tick in ticks if low <= tick.get_loc() <= high and tick.label1.get_text()]


def test_numbers_beside_an_axis_are_in_full() -> None:
    for steps, expected in (([0, 60_000], [f"{step:,}" for step in range(0, 70_000, 10_000)]), ([3], ["2", "3", "4"])):
        axes = Figure().subplots()
        axes.plot(steps, [2.0] * len(steps), "o")
        label_axes(axes, whole_x=True)
        assert labels(axes.xaxis) == expected
    for values, some in (((0.02, 900), {"0.1", "1", "10", "100"}), ((310, 870), {"400", "600", "800"})):
        axes = Figure().subplots()
        axes.loglog(values, values)
        label_axes(axes)
        assert some <= set(labels(axes.yaxis))


def test_system_has_one_colour_in_every_picture_and_systems_of_one_colour_differ_otherwise() -> None:
    alone = {name: looks_of([name])[name] for name in ("flash", "transformer++", "flash-quad", "flash-next", "combiner")}
    assert looks_of(["chunks of 64", *reversed(alone)]) | alone == looks_of(["chunks of 64", *reversed(alone)])
    assert looks_of(["runs/transformer++-tiny-3"]).popitem()[1] == alone["transformer++"]
    assert len({look["color"] for look in looks_of(["a", "b", *alone]).values()}) == 7
    looks = looks_of(["flash-tiny", "flash-memory-tiny", "linformer-tiny", "flash-memory-large"]).values()
    assert len({tuple(look.items()) for look in looks}) == 4


@pytest.mark.parametrize("steps", [1, 19, 45])
def test_mean_of_the_last_steps_begins_where_there_are_as_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    text = "".join(f'{{"step": {step}, "loss": {float(step)}}}\n' for step in range(1, steps + 1))
    (tmp_path / "metrics.jsonl").write_text(text)
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    draw_curve(tmp_path)
    each, *means = figures[0].axes[0].lines
    assert len(each.get_xdata()) == steps
    assert each.get_marker() == ("o" if steps == 1 else "None")  # else a single step cannot be seen
    found = [list(zip(*line.get_data(), strict=True)) for line in means]
    assert found == ([[(step, step - 9.5) for step in range(20, steps + 1)]] if steps >= 20 else [])
    lines = [{"step": step, "loss": float(step)} for step in range(1, steps + 1)]
    averaged = [{"step": step, "loss": step - 9.5} for step in range(20, steps + 1)]
    assert thinned(lines) == (averaged or lines)  # a short run shows each step
