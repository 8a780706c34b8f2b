"""Plots with matplotlib, which may be missing: one look, and files that are whole or as they were."""

import io
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lineartime.errors import LineartimeError, first_line, missing_extra, reporting_file_errors
from lineartime.files import is_there, write_atomically
from lineartime.units import counted


def new_figure(width: float, height: float) -> Any:
    """Create a figure of the given size in inches. Raises LineartimeError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", "plot", "A plot") from None
    return Figure(figsize=(width, height), layout="constrained")


def label_axes(axes: Any, *, whole_x: bool = False, x_values: Sequence[float] = ()) -> None:
    """Give both axes a grid and plain numbers, such as 12,000, after their scales are set.

    Args:
        axes: axes of matplotlib.
        whole_x: whether only integers make sense on the horizontal axis.
        x_values: the numbers on the horizontal axis, if they are few, such as measured lengths.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

    axes.grid(alpha=0.3)
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            base = axis.get_transform().base
            axis.set_major_locator(LogLocator(base, subs=(1, 2, 5) if base == 10 else (1,)))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    if whole_x:
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(lambda x, _: counted(x))
    if x_values:
        axes.set_xticks(sorted(set(x_values)))
        axes.xaxis.set_tick_params(labelsize="small")


def legend_below(figure: Any, lines: Mapping[str, Any], columns: int, **options: Any) -> None:
    """Add a legend of the lines of all panels, by their names, below the panels."""
    names, columns = map(drawable, lines), min(len(lines), columns)
    figure.legend(lines.values(), names, loc="outside lower center", ncols=columns, frameon=False, **options)


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
    """Write a picture as a whole and return the file; a link stays a link, and a device one.

    Raises:
        LineartimeError: for a suffix that is no image format, or if the file cannot be written.
    """
    _check_suffix(figure, file)
    content = io.BytesIO()
    with reporting_file_errors("write", file), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)  # it is drawn as a box
        try:
            figure.savefig(content, dpi=dots_per_inch, format=file.suffix[1:].lower())
        except RuntimeError as error:  # of the formats for LaTeX, which need it
            raise LineartimeError(f"Cannot draw {file} ({first_line(error)}): use .png, .pdf or .svg.") from None
        write_atomically(file.resolve(), content.getvalue())  # a link stays one
    return file


def _check_suffix(figure: Any, file: Path) -> None:
    if file.suffix.lower().removeprefix(".") not in figure.canvas.get_supported_filetypes():
        raise LineartimeError(f"{file} has a suffix that is no picture format: use .png, .pdf or .svg.")
