from lineartime.units import counted, duration, number_or_text, size


def test_durations_have_two_units() -> None:
    for seconds, text in (
        (0.4, "0 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (19_799, "5 h 29 min"),
        (86_400 * 3 + 7200, "3 d 2 h"),
    ):
        assert duration(seconds) == text


def test_counts_and_sizes_have_three_digits() -> None:
    counts = {0: "0", 12_000: "12,000", 1_234_567: "1.23 M", 2e6: "2 M", 4.5e10: "45 G", 999_600_000: "1 G", 1e12: "1,000 G"}
    assert {number: counted(number) for number in counts} == counts
    sizes = {0: "0 B", 999: "999 B", 999.6: "1 kB", 12_345: "12.3 kB", 5.73e9: "5.73 GB", 2.5e12: "2,500 GB"}
    assert {number: size(number) for number in sizes} == sizes


def test_texts_that_write_numbers_are_numbers() -> None:
    for text, value in (("3", 3), ("3.5", 3.5), ("1e-3", 0.001), ("three", "three"), ("", "")):
        found = number_or_text(text)
        assert (found, type(found)) == (value, type(value))
