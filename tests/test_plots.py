"""Plots: what a reader sees beside the axes, and files that are whole or as they were."""

from typing import Any

import pytest
from matplotlib.figure import Figure

from lineartime.plots import label_axes, looks_of

pytestmark = pytest.mark.pictures


def labels(axis: Any) -> list[str]:
    """The labels that are visible beside an axis."""
    axis.figure.draw_without_rendering()
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    return [tick.label1.get_text() for tick in ticks if low <= tick.get_loc() <= high and tick.label1.get_text()]


def test_steps_are_whole_numbers_in_full() -> None:
    axes = Figure().subplots()
    axes.plot([0, 60_000], [2.0, 3.1])
    label_axes(axes, whole_x=True)
    assert labels(axes.xaxis) == ["0", "10,000", "20,000", "30,000", "40,000", "50,000", "60,000"]
    one = Figure().subplots()
    one.plot([3], [2.0], "o")
    label_axes(one, whole_x=True)
    assert labels(one.xaxis) == ["2", "3", "4"]


def test_logarithmic_axis_has_numbers_in_full() -> None:
    for values, expected in (((0.02, 900), {"0.1", "1", "10", "100"}), ((310, 870), {"400", "600", "800"})):
        axes = Figure().subplots()
        axes.loglog(values, values)
        label_axes(axes)
        assert expected <= set(labels(axes.yaxis))


def test_system_has_one_colour_in_every_picture_and_systems_of_one_colour_differ_otherwise() -> None:
    alone = {name: looks_of([name])[name] for name in ("flash", "transformer++", "flash-quad", "flash-next", "combiner")}
    assert looks_of(["chunks of 64", *reversed(alone)]) | alone == looks_of(["chunks of 64", *reversed(alone)])
    assert looks_of(["runs/transformer++-tiny-3"]).popitem()[1] == alone["transformer++"]
    assert len({look["color"] for look in looks_of(["a", "b", *alone]).values()}) == 7
    looks = looks_of(["flash-tiny", "flash-memory-tiny", "linformer-tiny", "flash-memory-large"]).values()
    assert len({tuple(look.items()) for look in looks}) == 4
