"""Durations, counts and sizes in short form, for people; numbers that people write; and tables in Markdown."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress

NOT_THERE = "-"
"""The cell of a value that there is not."""


def duration(seconds: float) -> str:
    """A time in its two largest units: 40 s, 3 min 20 s, 5 h 30 min, 3 d 4 h."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def counted(number: float) -> str:
    """A count: 600, 12,000, 1.23 M, 45 G."""
    for limit, unit in ((1e9, " G"), (1e6, " M")):
        if abs(number) >= 0.9995 * limit:
            return f"{number / limit:,.0f}{unit}" if abs(number) >= 999.5 * limit else f"{number / limit:.3g}{unit}"
    return f"{number:,.0f}"


def size(n_bytes: float) -> str:
    """A number of bytes: 640 B, 12.3 kB, 1.5 GB."""
    for unit in ("B", "kB", "MB"):
        if n_bytes < 999.5:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:,.3g} GB" if n_bytes < 999.5 else f"{n_bytes:,.0f} GB"


def number_or_text(text: str) -> int | float | str:
    """A text as the number that it writes, if it does."""
    for convert in (int, float):
        with suppress(ValueError):
            return convert(text)
    return text


def without_empty(columns: Mapping[str, Sequence[str]], always: Collection[str] = ()) -> dict[str, Sequence[str]]:
    """The columns of a table that have a value, or that are shown always."""
    return {name: cells for name, cells in columns.items() if name in always or set(cells) != {NOT_THERE}}


def column_table(columns: Mapping[str, Sequence[str]], left: int = 1) -> str:
    """A table in Markdown from its columns, without empty ones; the first `left` are aligned left, the others right."""
    shown = without_empty(columns)
    return markdown_table(list(shown), zip(*shown.values(), strict=True), left).rstrip("\n")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table with a line for each row; the first `left` columns are aligned left, the others right. Bars are escaped."""
    marks = ["---" if column < left else "---:" for column in range(len(header))]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in (header, marks, *rows))


def cell(value: float | None, form: str | Callable[[float], str], factor: float = 1, unit: str = "") -> str:
    """The cell of a value, times a factor, in a format or as a function writes it."""
    if value is None:
        return NOT_THERE
    number = factor * value
    return f"{format(number, form) if isinstance(form, str) else form(number)}{unit}"


def three_digits(number: float) -> str:
    """A positive number with three significant digits, and all digits before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
