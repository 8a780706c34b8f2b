from lineartime.markdown import markdown_table


def test_text_is_on_the_left_numbers_on_the_right_and_a_bar_stays_in_its_cell() -> None:
    table = markdown_table(["name", "kind", "ms"], [["a|b", "x", "1"], ["c", "y", "20"]], left=2)
    assert table == "| name | kind | ms |\n| --- | --- | ---: |\n| a\\|b | x | 1 |\n| c | y | 20 |\n"
