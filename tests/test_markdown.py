import pytest
from rich.console import ConsoleDimensions

from lineartime.markdown import column_table, markdown_table
from lineartime.screen import print_markdown


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
