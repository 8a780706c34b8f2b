import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hf.tiny import awake, tiny

from lineartime.data.tokenizers import ByteTokenizer
from lineartime.errors import LineartimeError
from lineartime.finetuning.answering import (
    Answer,
    Metric,
    Question,
    answer_scores,
    best_answers,
    best_span,
    best_threshold,
    find_questions,
    read_questions,
    score_answers,
    tokens_of,
    windows_to_answer,
    windows_to_learn,
)
from lineartime.finetuning.data import Windows
from lineartime.finetuning.tune import paired_tokenizer
from lineartime.hf import LineartimeForQuestionAnswering

TEXT = "Größe 大小 [MASK] und noch viel mehr Text, der nicht in ein Fenster passt, " * 3
WINDOWS = Windows(paired_tokenizer(ByteTokenizer()), context_length=64, stride=16)


def test_windows_are_cls_question_sep_text_sep_and_hold_all_of_the_text() -> None:
    windows = list(windows_to_answer([Question("k", "[END]?", TEXT)], WINDOWS))
    end = ByteTokenizer.end_of_document
    asked = [end, *b"[END]?", end]
    read = b""
    for window in windows:
        ids = window["input_ids"]
        assert ids[: len(asked)] == asked
        assert ids[-1] == end
        text = bytes(ids[window["first"] : -1])
        read += text if not read else text[16:]
    assert read.decode() == TEXT
    assert len(windows) > 2


def test_a_span_is_the_same_text_in_every_window_that_holds_it() -> None:
    found, windows = 0, list(windows_to_answer([Question("k", "?", TEXT)], WINDOWS))
    for begin in range(len(TEXT) - 12):
        answer = TEXT[begin : begin + 12]
        for window in windows:
            place, starts, ends = tokens_of(((begin, begin + 12),), window), window["starts"], window["ends"]
            assert (place is not None) == (starts[0] <= begin and begin + 12 <= ends[-1])
            if place is not None:
                first, last = (each - window["first"] for each in place)
                assert TEXT[starts[first] : ends[last]] == answer
                found += 1
    assert found >= len(TEXT) - 12


def test_training_takes_windows_without_the_answer_only_beside_those_with_it() -> None:
    begin = TEXT.index("大小")
    with_answer = Question("a", "?", TEXT, ("大小",), ((begin, begin + 2),))
    nowhere, unanswerable = Question("b", "?", TEXT, ("lost",)), Question("c", "?", TEXT)
    too_long = Question("d", "?", TEXT, (TEXT,), ((0, len(TEXT)),))
    rows = [list(windows_to_learn(each, WINDOWS, seed=0)) for each in ([with_answer], [nowhere, too_long, unanswerable])]
    assert [row["start_positions"] > 0 for row in rows[0]] == [True, False]
    assert [(row["question"], row["start_positions"], row["end_positions"]) for row in rows[1]] == [(2, 0, 0)]
    with pytest.raises(LineartimeError, match=r"^No window of 64 tokens holds an answer to train with whole: raise"):
        list(windows_to_learn([nowhere, too_long], WINDOWS, seed=0))


@pytest.mark.parametrize("longest", [1, 3, 20])
def test_the_best_span_is_the_best_of_all(longest: int) -> None:
    for seed in range(20):
        start, end = torch.randn(2, 9, generator=torch.Generator().manual_seed(seed))
        spans = [(i, j) for i in range(9) for j in range(i, min(i + longest, 9))]
        best = max(spans, key=lambda span: float(start[span[0]] + end[span[1]]))
        score, *places = best_span(start, end, longest)
        assert tuple(places) == best
        assert score == pytest.approx(float(start[best[0]] + end[best[1]]))


def test_answers_do_not_depend_on_the_batch_and_documents_compete() -> None:
    model = awake(LineartimeForQuestionAnswering(tiny(task="mlm", vocab_size=258)))
    questions = [
        Question("a", "was?", TEXT),
        Question("b", "wo?", "kurz"),
        Question("a", "was?", TEXT[40:]),
        Question("c", "?", ""),
    ]
    windows = list(windows_to_answer(questions, WINDOWS))
    found = [best_answers(model, windows, questions, 12, size) for size in (1, 5)]
    assert list(found[0]) == ["a", "b", "c"]
    for key, answer in found[0].items():
        assert found[1][key].text == answer.text
        assert found[1][key].score == pytest.approx(answer.score, abs=1e-5)

    def score(windows: list[dict[str, Any]]) -> float:
        """Of the only question of these windows."""
        return best_answers(model, windows, questions[:1], 12, 4)["a"].score

    first, other = (list(windows_to_answer([questions[place]], WINDOWS)) for place in (0, 2))
    assert len(first) > 2
    assert score(first) == pytest.approx(max(score([each]) for each in first), abs=1e-5)
    both = score(first), best_answers(model, other, questions[2:3], 12, 4)["a"].score
    assert found[0]["a"].score == pytest.approx(max(both), abs=1e-5)
    assert found[0]["c"] == ("", float("-inf"))


def test_the_threshold_of_squad_2_is_the_best_of_all() -> None:
    """Tried beside every other, as the official script does; equal scores are kept or left out together."""
    random = torch.Generator().manual_seed(0)
    for _ in range(20):
        scores = torch.randint(-4, 5, (12,), generator=random).tolist()
        right = {str(place): ["cat"] if place % 3 else [] for place in range(12)}
        found = {
            key: Answer("a cat" if int(key) % 4 else "dog", float(score)) for key, score in zip(right, scores, strict=True)
        }

        def f1(threshold: float, found: dict[str, Answer] = found, right: dict[str, list[str]] = right) -> float:
            return score_answers({key: each.above(threshold) for key, each in found.items()}, right, "squad_v2")["f1"]

        assert f1(best_threshold(found, right)) == max(map(f1, range(-5, 7)))


# What the official scripts give: (exact match, F1).
OFFICIAL: list[tuple[Metric, str, list[str], tuple[float, float]]] = [
    ("squad", "The U.S.", ["US", "America"], (1, 1)),
    ("triviaqa", "The U.S.", ["US", "America"], (0, 0)),
    ("triviaqa", "The U.S.", ["u s"], (1, 1)),
    ("squad", "well-known", ["well known"], (0, 0)),
    ("triviaqa", "well-known", ["well known"], (1, 1)),
    ("triviaqa", "Park_Grove ‘School’", ["park grove school"], (1, 1)),  # noqa: RUF001
    ("squad", "a cat sat down", ["the cat sat"], (0, 0.8)),
    ("squad", "cat cat", ["cat"], (0, 2 / 3)),
    ("squad", "the", [""], (1, 0)),
    ("squad_v2", "the", [], (1, 1)),
    ("squad_v2", "a cat", [], (0, 0)),
    ("squad_v2", "", ["cat"], (0, 0)),
    ("squad_v2", "cat", ["the", "cat"], (1, 1)),
    ("cmrc", "《光荣》和ω-force。", ["光荣和ω-force"], (1, 1)),
    ("cmrc", "公司光荣和", ["光荣和别"], (0, 2 * 3 / 9)),
    ("cmrc", "1998年10月", ["10月"], (0, 2 * 2 / 6)),
]


@pytest.mark.parametrize(("metric", "prediction", "right", "scores"), OFFICIAL)
def test_answers_score_as_the_official_scripts_score_them(
    metric: Metric, prediction: str, right: list[str], scores: tuple[float, float]
) -> None:
    assert answer_scores(prediction, right, metric) == pytest.approx(scores)


# Files -------------------------------------------------------------------------------------------------------------------


TRIVIA = {"QuestionId": "tc", "Question": "Where?"}


def squad(*qas: Any, text: str = "one two one") -> dict[str, Any]:
    return {"data": [{"paragraphs": [{"context": text, "qas": list(qas)}]}]}


def ask(answer: str, start: Any, key: str = "k") -> dict[str, Any]:
    return {"id": key, "question": "?", "answers": [{"text": answer, "answer_start": start}]}


def test_no_article_is_in_both_parts_of_a_file(questions: Path) -> None:
    train, validation = ({each.id for each in part} for part in find_questions(questions)[:2])
    assert validation == {f"q{place}" for place in range(18, 24)}  # by a hash, in any order of the file
    assert train == {f"q{place}" for place in range(30)} - validation


def test_an_answer_is_where_its_file_says_or_a_whole_word(tmp_path: Path) -> None:
    file, text = tmp_path / "train.json", "none one two one, 光荣和光"
    asked = [("one", 11), ("one", "5"), ("one", 1), ("one", None), ("wo", 10), ("two", -1), ("on", 7), ("光", 19), ("lost", 3)]
    file.write_text(json.dumps(squad(*[ask(*each) for each in asked], text=text)))
    spans = [each.spans for each in read_questions(file)]
    assert spans == [((13, 16),), ((5, 8),), ((1, 4),), (), ((10, 12),), ((9, 12),), (), ((18, 19),), ()]


def test_a_truth_value_may_be_a_text(tmp_path: Path) -> None:
    said = [True, False, 1, 0, "true", "false", "True", "False", "1", "0"]
    (tmp_path / "a.json").write_text(json.dumps(squad(*({**ask("one", 0), "is_impossible": each} for each in said))))
    assert [each.answers for each in read_questions(tmp_path / "a.json")] == [(), ("one",)] * 5


@pytest.mark.parametrize(
    ("qas", "metric"),
    [
        ([ask("one", 0)], "squad"),
        ([ask("one", 0), {"id": "n", "question": "?", "answers": []}], "squad_v2"),
        ([ask("光荣", 0)], "cmrc"),
    ],
)
def test_the_metric_is_that_of_the_data(tmp_path: Path, qas: list[dict[str, Any]], metric: str) -> None:
    content = json.dumps(squad(*qas, text="one 光荣")).encode()
    (tmp_path / "train.json").write_bytes(content)
    (tmp_path / "dev.json.gz").write_bytes(gzip.compress(content))
    assert find_questions(tmp_path)[2] == metric


@pytest.fixture
def trivia(tmp_path: Path) -> Path:
    """Two documents of Wikipedia, and one of the web, for the same question."""
    for folder, name, text in (
        ("wikipedia", "A.txt", "In York, UK. And YORK-UK; Yorkshire."),
        ("wikipedia", "B.txt", "nothing"),
        ("web", "1/1.txt", "new york"),
    ):
        (tmp_path / "evidence" / folder / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "evidence" / folder / name).write_text(text)
    answer = {"Aliases": ["York, UK"], "NormalizedAliases": ["york", "york uk"], "HumanAnswers": ["Eboracum"]}
    record = {"QuestionId": "tc", "Question": "Where?", "Answer": answer}
    pages = {"EntityPages": [{"Filename": "A.txt"}, {"Filename": "B.txt"}], "SearchResults": [{"Filename": "1/1.txt"}]}
    (tmp_path / "qa").mkdir()
    for domain, of_record in (("wikipedia", {"EntityPages": pages["EntityPages"]}), ("web", pages)):
        for split in ("train", "dev"):
            data = {"Domain": domain.capitalize(), "Data": [{**record, **of_record}]}
            (tmp_path / "qa" / f"{domain}-{split}.json").write_text(json.dumps(data))
    return tmp_path


def test_triviaqa_has_the_keys_of_its_official_script_and_the_longest_aliases(trivia: Path) -> None:
    first, second = find_questions(trivia)[0]
    assert (first.id, second.id, first.key) == ("tc", "tc", second.key)
    assert [first.text[slice(*span)] for span in first.spans] == ["York, UK", "YORK-UK"]
    assert second.spans == ()
    assert first.answers == ("york", "york uk", "Eboracum")
    assert [each.id for each in find_questions(trivia, "web")[1]] == ["tc--A.txt", "tc--B.txt", "tc--1/1.txt"]
    assert [each.id for each in read_questions(trivia / "qa" / "web-dev.json")] == ["tc--A.txt", "tc--B.txt", "tc--1/1.txt"]


def test_questions_without_answers_are_read_from_lines(tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text('{"question": "a?", "context": "x"}\n\n{"question": "b?", "context": "y", "id": 7}\n')
    (tmp_path / "asked.csv").write_text("question,context,id\na?,x,1\nb?,y,7\n", encoding="utf-8-sig")
    for each in (file, tmp_path / "asked.csv"):
        assert [(one.id, one.question, one.text) for one in read_questions(each)] == [("1", "a?", "x"), ("7", "b?", "y")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            squad({"id": "k", "answers": []}),
            r"a.json has data\[0\].paragraphs\[0\].qas\[0\] without question, but it must be a text",
        ),
        (squad(ask("one", True)), r"qas\[0\] whose answer_start is True, but it must be a whole number"),
        (squad({**ask("one", 0), "is_impossible": "no"}), r"is_impossible is 'no', but it must be true or false"),
        ({"data": [1]}, r"a.json has data\[0\] without paragraphs, but it must be a list"),
        ({"version": 1}, r"a.json has an object without data, but it must be a list"),
        ([1], r"a.json is damaged \(it is \[1\], but must be an object\): give JSON in the layout"),
        ({"Data": [{**TRIVIA, "Answer": {"Aliases": "UK"}}]}, r"whose Aliases is 'UK', but it must be a list"),
        ({"Data": [{**TRIVIA, "Answer": 1}]}, r"has Data\[0\] whose Answer is 1, but it must be an object"),
        ({"Data": [{**TRIVIA, "EntityPages": [1]}]}, r"has Data\[0\].EntityPages without Filename"),
    ],
)
def test_a_wrong_record_is_named(tmp_path: Path, content: Any, message: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(LineartimeError, match=message):
        list(read_questions(tmp_path / "a.json"))
    (tmp_path / "a.jsonl").write_text('{"question": "?", "text": ""}')
    with pytest.raises(LineartimeError, match=r"a.jsonl has line 1 without context, but it must be a text"):
        list(read_questions(tmp_path / "a.jsonl"))


def test_wrong_data_is_named(tmp_path: Path, trivia: Path) -> None:
    (trivia / "evidence" / "wikipedia" / "B.txt").unlink()
    with pytest.raises(LineartimeError, match=r"Cannot read .*B.txt: No such file"):
        list(find_questions(trivia)[0])
    (trivia / "qa" / "wikipedia-dev.json").unlink()
    with pytest.raises(LineartimeError, match=r"^data is .*, which has no qa/wikipedia-dev.json: give the unpacked archive"):
        find_questions(trivia)
    with pytest.raises(LineartimeError, match=r"^data is .*, which must have one .json file named for training, and"):
        find_questions(tmp_path / "evidence")
    with pytest.raises(LineartimeError, match=r"^data is .*none, which does not exist, or is held out by its name: give a"):
        find_questions(tmp_path / "none")
