"""Plots with matplotlib, which may be missing: one look, and files that are whole or as they were."""

import io
import re
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

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
WIDTH, HEIGHT = 4.8, 3.6
"""The size of a panel, in inches."""


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
class Panel:
    """Curves over a power of two by their names."""

    title: str
    y: str  # what the vertical axis shows, with its unit
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, name: str, x: float, y: float | None) -> None:
        """Add a point to a curve, unless it has none or one there: the paper's numbers are the same for all texts."""
        points = self.curves.setdefault(name, []) if y is not None else []
        if y is not None and x not in dict(points):
            points.append((x, y))

    @property
    def places(self) -> list[float]:
        """Where its curves have points."""
        return sorted({x for points in self.curves.values() for x, _ in points})


def draw_panels(
    panels: Sequence[Panel],
    x: str,
    looks: Mapping[str, Mapping[str, Any]],
    *,
    columns: int | None = None,
    log: bool = False,
    share_y: bool = False,
) -> Any:
    """A figure of panels, by default two or three in a row, with one legend below them; None without panels.

    The looks are the colour, the marker and the like of each curve, by its name, in the order of the legend.
    """
    if not panels:
        return None
    figure, all_axes = new_panels(len(panels), len(looks), columns, share_y)
    lines: dict[str, Any] = {}
    for axes, panel in zip(all_axes, panels, strict=True):
        for name, values in panel.curves.items():
            (lines[name],) = axes.plot(*zip(*sorted(values), strict=True), markersize=4, **looks[name])
        axes.set_xscale("log", base=2)
        axes.set(title=panel.title, xlabel=x, ylabel=panel.y)
        axes.margins(x=0.08, y=0.08)
        if log:
            axes.set_yscale("log")
        axes.yaxis.set_tick_params(labelleft=True)
        label_axes(axes, x_values=panel.places)
    legend_below(figure, {name: lines[name] for name in looks if name in lines}, 3 * _columns(len(panels), columns))
    return figure


def new_panels(count: int, names: int, columns: int | None = None, share_y: bool = False) -> tuple[Any, list[Any]]:
    """A figure with the axes of its panels, in rows, and room for a legend of so many names below them."""
    columns = _columns(count, columns)
    rows, lines = -(-count // columns), -(-names // (3 * columns))
    figure = new_figure(WIDTH * columns + 0.4, HEIGHT * rows + 0.4 + 0.22 * lines)
    figure.get_layout_engine().set(wspace=0.05, hspace=0.05)
    grid = list(figure.subplots(rows, columns, squeeze=False, sharey=share_y).flat)
    for unused in grid[count:]:
        unused.remove()
    return figure, grid[:count]


def _columns(panels: int, columns: int | None) -> int:
    return columns or (2 if panels == 4 else min(panels, 3))


def new_figure(width: float, height: float) -> Any:
    """Create a figure of the given size in inches. Raises LineartimeError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", "plot", "A plot") from None
    return Figure(figsize=(width, height), layout="constrained")


def label_axes(axes: Any, *, whole_x: bool = False, x_values: Sequence[float] = ()) -> None:
    """Give both axes a grid and plain numbers, such as 12,000, after their scales are set.

    `whole_x` allows only integers on the horizontal axis; `x_values` are its numbers, if they are few.
    """
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
        axes.set_xticks(sorted(set(x_values)))
        axes.xaxis.set_tick_params(labelsize="small")


def whole_numbers(axis: Any) -> None:
    """Allow only integers on an axis, such as 12,000."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(lambda x, _: counted(x))


def legend_below(figure: Any, lines: Mapping[str, Any], columns: int) -> None:
    """Add a legend of the lines of all panels, by their names, below the panels."""
    names, columns = map(drawable, lines), min(len(lines), columns)
    figure.legend(lines.values(), names, loc="outside lower center", ncols=columns, frameon=False, fontsize="small")


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
