import pytest
from rich.console import ConsoleDimensions

from lineartime.screen import print_markdown
from lineartime.units import column_table, counted, duration, markdown_table, size


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


def test_text_is_on_the_left_numbers_on_the_right_and_a_bar_stays_in_its_cell() -> None:
    table = markdown_table(["name", "kind", "ms"], [["a|b", "x", "1"], ["c", "y", "20"]], left=2)
    assert table == "| name | kind | ms |\n| --- | --- | ---: |\n| a\\|b | x | 1 |\n| c | y | 20 |\n"


def test_table_has_no_empty_columns() -> None:
    assert column_table({"system": ["a"], "x": ["1"], "paper": ["-"]}) == "| system | x |\n| --- | ---: |\n| a | 1 |"


def test_narrow_terminal_folds_what_a_file_has_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = markdown_table(["ms", "model"], [["1", "a-model-with-a-long-name"]])
    print_markdown(text)
    assert capsys.readouterr().out == text
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")  # without colours
    monkeypatch.setattr("rich.console.Console.size", ConsoleDimensions(20, 25))
    print_markdown(text)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 20
    assert "1a-model-with-a-long-name" in "".join("".join(lines).split())
