import pytest

from lineartime.units import counted, duration, number_or_text, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (19_799, "5 h 29 min"), (86_400 * 3 + 7200, "3 d 2 h")],
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (12_000, "12,000"),
        (1_234_567, "1.23 M"),
        (2e6, "2 M"),
        (4.5e10, "45 G"),
        (999_600_000, "1 G"),
        (1e12, "1,000 G"),
    ],
)
def test_counts_are_short(number: float, text: str) -> None:
    assert counted(number) == text


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (12_345, "12.3 kB"), (5.73e9, "5.73 GB"), (2.5e12, "2,500 GB")],
)
def test_sizes_have_three_digits(n_bytes: float, text: str) -> None:
    assert size(n_bytes) == text


@pytest.mark.parametrize(("text", "value"), [("3", 3), ("3.5", 3.5), ("1e-3", 0.001), ("three", "three"), ("", "")])
def test_texts_that_write_numbers_are_numbers(text: str, value: object) -> None:
    found = number_or_text(text)
    assert (found, type(found)) == (value, type(value))
