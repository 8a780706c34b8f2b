"""Durations, counts and sizes in short form, for people; and numbers that people write."""

from contextlib import suppress


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
