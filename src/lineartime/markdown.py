"""Tables in Markdown, and their numbers."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

NOT_THERE = "-"
"""The cell of a value that there is not."""


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
