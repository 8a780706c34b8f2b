"""Plots with matplotlib, which may be missing: one look, and files that are whole or as they were."""

import io
import re
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

from lineartime.errors import LineartimeError, missing_extra, reporting_file_errors
from lineartime.files import is_there, write_atomically
from lineartime.units import counted

_COLOURS = "#4477aa #ee6677 #228833 #aa3377 #66ccee #ee7733 #332288 #009988 #777777 #aa8866 #000000"
_MARKERS, _LINES = "osD^v<>PX*d", ("-", "--", ":", "-.")
_SYSTEMS = (
    "flash transformer++ flash-quad flash-next transformer transformer+ performer performer-chunked combiner mc-tfm++ "
    "flash-memory linear-elu cosformer flowformer linformer retnet gla mamba2 gated-deltanet rwkv7 deltanet hybrid-gau"
)
"""The systems by their colours, which begin again after the last: those that share one are in few pictures together."""
WIDTH, HEIGHT = 4.8, 3.6  # of a panel, in inches


def looks_of(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """The colour, marker and line of each name: a system's and its preset's colour is the same in every picture."""
    systems = {name: re.sub(r"-(tiny|base|large|qa|ablation|scaling)\b.*", "", Path(name).name) for name in names}
    colours, table = _COLOURS.split(), _SYSTEMS.split()
    known = {name: table.index(system) for name, system in systems.items() if system in table}
    count, taken = len(colours), {place % len(colours) for place in known.values()}
    left = cycle([place for place in range(count) if place not in taken] or range(count))
    looks: dict[str, dict[str, str]] = {}
    for name in systems:
        place = known[name] if name in known else next(left)
        look = {"color": colours[place % count], "marker": _MARKERS[(place + place // count) % len(_MARKERS)]}
        looks[name] = {**look, "linestyle": _LINES[sum(look.items() <= other.items() for other in looks.values()) % 4]}
    return looks


@dataclass
class Curve:
    """A curve by its name, which chooses its look; also `thin`, for further ones of a name, or `faint`, without markers."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    thin: bool = False
    faint: bool = False


@dataclass
class Panel:
    """Curves with the labels of their axes."""

    title: str
    x: str
    y: str  # with its unit
    curves: list[Curve] = field(default_factory=list)
    log: Literal["", "x", "xy"] = ""  # axes with logarithms, to the base 2 for x
    whole_x: bool = False  # whether only integers stand at the horizontal axis
    y_limits: tuple[float, float] | None = None
    level: float | None = None  # of a dotted line


def curves_of(points: Iterable[tuple[str, float | None, float | None]]) -> list[Curve]:
    """Curves through the points of each name (name, x, y), sorted by x; a point without a number is left out."""
    found: dict[str, dict[float, float]] = {}
    for name, x, y in points:
        if x is not None and y is not None:
            found.setdefault(name, {})[x] = y
    return [Curve(name, sorted(curve), [curve[x] for x in sorted(curve)]) for name, curve in found.items()]


def draw_panels(panels: Sequence[Panel], looks: Mapping[str, Mapping[str, Any]], *, columns: int | None = None) -> Any:
    """A figure of panels, by default two or three in a row, with one legend below them.

    The looks are the colour, the marker and the like of each curve, by its name, in the order of the legend.
    """
    columns = columns or (2 if len(panels) == 4 else min(len(panels), 3))
    rows, names = -(-len(panels) // columns), {curve.name for panel in panels for curve in panel.curves}
    beside = max(1, min(len(names), int(WIDTH * columns / (0.6 + 0.08 * max(map(len, names), default=0)))))  # in the legend
    figure = new_figure(WIDTH * columns + 0.4, HEIGHT * rows + 0.4 + 0.22 * -(-len(names) // beside))
    figure.get_layout_engine().set(wspace=0.05, hspace=0.05)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in grid[len(panels) :]:
        unused.remove()
    legend: dict[str, Any] = {}
    for axes, panel in zip(grid, panels, strict=False):
        for curve in panel.curves:
            look = {**looks[curve.name], "markersize": 4, "linewidth": 1.4}
            if curve.thin or curve.faint:
                look |= {"marker": "", "linewidth": 0.8, "alpha": 0.4 if curve.faint else 1}
            (line,) = axes.plot(curve.x, curve.y, **look)
            if curve.name not in legend or not (curve.thin or curve.faint):
                legend[curve.name] = line
        if panel.level is not None:
            axes.axhline(panel.level, color="black", linestyle=":", linewidth=1)
        axes.set(title=drawable(panel.title), xlabel=panel.x, ylabel=panel.y)
        axes.margins(x=0.08, y=0.08)
        if panel.log:
            axes.set_xscale("log", base=2)
        if panel.log == "xy":
            axes.set_yscale("log")
        if panel.y_limits:
            axes.set_ylim(panel.y_limits)
        label_axes(axes, whole_x=panel.whole_x, x_values=sorted({x for each in panel.curves for x in each.x if panel.log}))
    shown = {name: legend[name] for name in looks if name in legend}
    below = {"loc": "outside lower center", "ncols": beside, "fontsize": "small"}
    figure.legend(shown.values(), map(drawable, shown), frameon=False, **below)
    return figure


def new_figure(width: float, height: float) -> Any:
    """Create a figure of the given size in inches. Raises LineartimeError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", "plot", "A plot") from None
    return Figure(figsize=(width, height), layout="constrained")


def label_axes(axes: Any, *, whole_x: bool = False, x_values: Sequence[float] = ()) -> None:
    """Give both axes a grid and plain numbers, such as 12,000, after their scales are set; `x_values`, if they are few."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axes.grid(alpha=0.3)
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            base = axis.get_transform().base
            axis.set_major_locator(LogLocator(base, subs=(1, 2, 5) if base == 10 else (1,)))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    if whole_x:
        low, high = axes.get_xlim()
        axes.set_xlim(min(low, (low + high) / 2 - 1), max(high, (low + high) / 2 + 1))  # there is no whole number between
        whole_numbers(axes.xaxis)
    if x_values:
        axes.set_xticks(x_values)
        axes.xaxis.set_tick_params(labelsize="small")


def whole_numbers(axis: Any) -> None:
    """Allow only integers on an axis, such as 12,000."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(lambda x, _: counted(x))


def drawable(text: str) -> str:
    """A text that matplotlib can draw: dollar signs, which enclose formulas, are escaped; unprintable characters replaced."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text).replace("$", r"\$")


def check_picture(file: Path) -> None:
    """Check before slow work that a picture can be written, and create its folder.

    Raises:
        LineartimeError: without matplotlib, for a suffix that is no image format, or if the file cannot be written.
    """
    _check_suffix(new_figure(1, 1), file)
    with reporting_file_errors("write", file):
        file.parent.mkdir(parents=True, exist_ok=True)
        if is_there(file):
            file.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=file.parent).close()


def save_figure(figure: Any, file: Path, dots_per_inch: int = 150) -> Path:
    """Write a picture as a whole and return the file.

    Raises:
        LineartimeError: for a suffix that is no image format, or if the file cannot be written.
    """
    _check_suffix(figure, file)
    content = io.BytesIO()
    with reporting_file_errors("write", file), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)  # it is drawn as a box
        figure.savefig(content, dpi=dots_per_inch, format=file.suffix[1:].lower())
        write_atomically(file, content.getvalue())
    return file


def _check_suffix(figure: Any, file: Path) -> None:
    formats = figure.canvas.get_supported_filetypes().keys() - {"pgf"}  # which needs LaTeX
    if file.suffix.lower().removeprefix(".") not in formats:
        raise LineartimeError(f"{file} has a suffix that is no picture format: use .png, .pdf or .svg.")
