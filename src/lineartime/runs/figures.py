"""Figures of matplotlib, which may be missing: how they are made, titled and written."""

import io
import tempfile
import warnings
from pathlib import Path
from typing import Any

from lineartime.errors import LineartimeError, first_line, missing_extra, reporting_file_errors
from lineartime.files import is_there, write_atomically


def new_figure(purpose: str, width: float, height: float) -> Any:
    """Create a figure of the given size in inches. Raises LineartimeError, naming the purpose, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", "plot", purpose) from None
    return Figure(figsize=(width, height), layout="constrained")


def check_picture(purpose: str, file: Path) -> None:
    """Check before slow work that a figure can be written, and create the folder of the file.

    Raises:
        LineartimeError: without matplotlib, for a suffix that is no image format, or if the file cannot be written.
    """
    _check_suffix(new_figure(purpose, 1, 1), file)
    with reporting_file_errors("write", file):
        file.parent.mkdir(parents=True, exist_ok=True)
        if is_there(file):
            file.open("ab").close()
        else:
            with tempfile.TemporaryFile(dir=file.parent):  # shows that a file can be written there
                pass


def save_figure(figure: Any, file: Path, dots_per_inch: int = 150) -> Path:
    """Write a figure and return the file. Raises LineartimeError if that fails or the suffix is not an image format."""
    _check_suffix(figure, file)
    with reporting_file_errors("write", file), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)  # it is drawn as a box
        content = io.BytesIO()
        try:
            figure.savefig(content, dpi=dots_per_inch, format=file.suffix[1:].lower())
        except RuntimeError as error:  # of the formats for LaTeX, which need it
            raise LineartimeError(f"Cannot draw {file} ({first_line(error)}): use .png, .pdf or .svg.") from None
        target = file.resolve()  # a link stays one
        write = Path.write_bytes if is_there(target) and not target.is_file() else write_atomically  # a device stays one, too
        write(target, content.getvalue())
    return file


def _check_suffix(figure: Any, file: Path) -> None:
    if file.suffix.lower().removeprefix(".") not in figure.canvas.get_supported_filetypes():
        raise LineartimeError(f"{file} has a suffix that is no picture format: use .png, .pdf or .svg.")


def drawable(text: str) -> str:
    """A text that matplotlib can draw: dollar signs, which enclose formulas, are escaped; unprintable characters replaced."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text).replace("$", r"\$")
