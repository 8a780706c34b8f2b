"""Ticks at round numbers: at least four labels on every axis of a plot, linear or logarithmic."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

MIN_TICKS = 4
"""The minimum number of labels on an axis: with fewer, values between them are hard to read."""
_CHARACTER = 0.083
"""The width of a digit in a label, in inches."""
_MIN_RANGE = 1e-9
"""The smallest range of an axis, as a share of its values: labels have twelve digits."""


def label_axes(axes: Any, *, whole_x: bool = False, x_values: Sequence[float] = ()) -> None:
    """Give both axes of a finished plot round ticks with distinct labels. An axis too short for four ticks is extended.

    Args:
        axes: matplotlib axes, whose data and scales are already set.
        whole_x: whether only integers make sense on the horizontal axis.
        x_values: ticks of the horizontal axis, if there are at least four; otherwise, values that round ticks should include.
    """
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    for axis, get, limit in ((axes.xaxis, axes.get_xlim, axes.set_xlim), (axes.yaxis, axes.get_ylim, axes.set_ylim)):
        scale, is_x = axis.get_transform(), axis is axes.xaxis
        base = scale.base if axis.get_scale() == "log" else None
        low, high = limits = get()
        low, high = enough_room(low, high, whole=whole_x and is_x)
        if (low, high) != limits:
            limit(low, high)
        wanted = sorted(set(x_values)) if is_x else []
        ticks = wanted if len(wanted) >= MIN_TICKS else round_ticks(low, high, base=base, whole=whole_x and is_x, among=wanted)
        labels = tick_labels(ticks)
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter(FixedFormatter(labels))
        axis.set_minor_locator(NullLocator())
        if is_x:
            inches = axes.get_window_extent().width / axes.figure.dpi
            crowded = sum(len(label) + 2 for label in labels) * _CHARACTER > inches
            axis.set_tick_params(rotation=30 if crowded else 0)


def enough_room(low: float, high: float, whole: bool = False) -> tuple[float, float]:
    """The limits of an axis, extended if four ticks do not fit between them."""
    if whole and math.floor(high) - math.ceil(low) + 1 < MIN_TICKS:
        return math.floor(low), max(high, math.floor(low) + MIN_TICKS - 1)
    largest = max(abs(low), abs(high))
    if high - low < _MIN_RANGE * largest:
        return low - _MIN_RANGE * largest, high + _MIN_RANGE * largest
    return low, high


def round_ticks(
    low: float, high: float, *, base: float | None = None, whole: bool = False, among: Sequence[float] = ()
) -> list[float]:
    """Four to eight round numbers from `low` to `high`.

    Args:
        low: the lower end of the axis.
        high: the upper end; `enough_room` makes the two far enough apart.
        base: of a logarithmic axis; None for a linear one.
        whole: whether to take only integers.
        among: numbers that the ticks of a logarithmic axis should include, if possible.
    """
    spread = [] if base is None else [ticks for ticks in _log_ticks(low, high, base) if len(ticks) >= MIN_TICKS]
    spread.sort(key=lambda ticks: not set(among) <= set(ticks))
    return spread[0] if spread else next(ticks for ticks in _linear_ticks(low, high, whole) if len(ticks) >= MIN_TICKS)


def _log_ticks(low: float, high: float, base: float) -> Iterator[list[float]]:
    """Increasingly dense ticks on a logarithmic axis: every n-th power of the base, then numbers between the powers."""
    powers = range(math.floor(math.log(low, base)) - 1, math.ceil(math.log(high, base)) + 2)
    for every in range(max(1, len(powers) // MIN_TICKS), 0, -1):
        yield _between(low, high, (base**power for power in powers if power % every == 0))
    for steps in [(1.0, 1.5)] if base == 2 else [(1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)]:
        yield _between(low, high, (step * base**power for power in powers for step in steps))


def _linear_ticks(low: float, high: float, whole: bool) -> Iterator[list[float]]:
    """Increasingly dense multiples of 5, 2.5, 2 and 1 times a power of ten."""
    power = math.ceil(math.log10(high - low))
    while True:
        for digits in (5.0, 2.5, 2.0, 1.0):
            step = digits * 10.0**power
            if not whole or step.is_integer():
                first = math.ceil(low / step - 1e-9)
                yield [step * multiple for multiple in range(first, math.floor(high / step + 1e-9) + 1)]
        power -= 1


def _between(low: float, high: float, values: Iterable[float]) -> list[float]:
    """The positive values that lie between the limits of an axis, up to rounding."""
    return [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """The shortest exact labels: 600, 12,000, 1.5 M; evenly spaced ticks have equally many decimals."""
    steps = [after - before for before, after in pairwise(ticks)]
    even = max(steps) - min(steps) < 1e-6 * max(steps)
    if not even:
        return [_label(tick, tick) for tick in ticks]
    largest = max(map(abs, ticks))
    exact = [_label(0.0 if abs(tick) < 1e-9 * largest else tick, largest) for tick in ticks]
    if any("e" in label for label in exact):
        return exact
    decimals = max(len(label.split(" ")[0].partition(".")[2]) for label in exact)
    return [_label(tick, largest, decimals) for tick in ticks]


def _label(value: float, size: float, decimals: int | None = None) -> str:
    """Format a number in the unit that suits numbers of this `size`."""
    limit, unit = next(((limit, unit) for limit, unit in ((1e9, " G"), (1e6, " M")) if abs(size) >= limit), (1.0, ""))
    number = value / limit + 0.0  # 0 for -0
    digits = f"{number:,.12g}" if decimals is None else f"{number:,.{decimals}f}"
    return digits + (unit if number else "")
