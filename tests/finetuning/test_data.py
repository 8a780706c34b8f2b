import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lineartime.errors import LineartimeError
from lineartime.finetuning.answering import find_questions, read_questions

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
