"""Tables in Markdown, and their numbers."""

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table with a line for each row; the first `left` columns are aligned left, the others right. Bars are escaped."""
    marks = ["---" if column < left else "---:" for column in range(len(header))]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in (header, marks, *rows))


def three_digits(number: float) -> str:
    """A positive number with three significant digits, and all digits before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
