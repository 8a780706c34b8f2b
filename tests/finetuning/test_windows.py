import pytest

from lineartime.data.tokenizers import ByteTokenizer
from lineartime.errors import LineartimeError
from lineartime.finetuning.data import Question
from lineartime.finetuning.tune import paired_tokenizer
from lineartime.finetuning.windows import WindowEncoder

TEXT = "Größe 大小 [MASK] und noch viel mehr Text, der nicht in ein Fenster passt, " * 3


def encoder(context_length: int = 64, stride: int = 16) -> WindowEncoder:
    return WindowEncoder.of(paired_tokenizer(ByteTokenizer()), context_length, stride)


def test_windows_are_cls_question_sep_text_sep_and_hold_all_of_the_text() -> None:
    windows = encoder().windows(Question("k", "[END]?", TEXT))
    end = ByteTokenizer.end_of_document
    asked = [end, *b"[END]?", end]
    read = b""
    for window in windows:
        assert window.ids[: len(asked)] == asked
        assert window.ids[-1] == end
        text = bytes(window.ids[window.first : -1])
        read += text if not read else text[16:]
    assert read.decode() == TEXT
    assert len(windows) > 2


def test_a_span_is_the_same_text_in_every_window_that_holds_it() -> None:
    found, windows = 0, encoder().windows(Question("k", "?", TEXT))
    for begin in range(len(TEXT) - 12):
        answer = TEXT[begin : begin + 12]
        for window in windows:
            place = window.tokens_of(((begin, begin + 12),))
            inside = window.starts[0] <= begin and begin + 12 <= window.ends[-1]
            assert (place is not None) == inside
            if place is not None:
                assert TEXT[window.starts[place[0] - window.first] : window.ends[place[1] - window.first]] == answer
                found += 1
    assert found >= len(TEXT) - 12


def test_training_takes_windows_without_the_answer_only_beside_those_with_it() -> None:
    begin = TEXT.index("大小")
    with_answer = Question("a", "?", TEXT, ("大小",), ((begin, begin + 2),))
    nowhere, unanswerable = Question("b", "?", TEXT, ("lost",)), Question("c", "?", TEXT)
    too_long = Question("d", "?", TEXT, (TEXT,), ((0, len(TEXT)),))
    rows = [list(encoder().for_training(each, seed=0)) for each in ([with_answer], [nowhere, too_long, unanswerable])]
    assert [row["start_positions"] > 0 for row in rows[0]] == [True, False]
    assert [(row["question"], row["start_positions"], row["end_positions"]) for row in rows[1]] == [(2, 0, 0)]
    with pytest.raises(LineartimeError, match=r"^No window of 64 tokens holds an answer to train with whole: raise"):
        list(encoder().for_training([nowhere, too_long], seed=0))
