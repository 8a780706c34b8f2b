"""Questions about texts: SQuAD 1.1 and 2.0 and data in its layout, such as CMRC 2018, and TriviaQA."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lineartime.choices import Domain, Split
from lineartime.data.folders import named_split
from lineartime.errors import ArgumentError, LineartimeError, reporting_file_errors
from lineartime.fields import shown
from lineartime.finetuning.answer_metrics import Metric
from lineartime.finetuning.records import parse_text, read_lines

HELD_OUT_EVERY = 5
"""Of a single file, every fifth article is held out."""
_LAYOUTS = "give JSON in the layout of SQuAD or TriviaQA"
_KINDS = {str: "a text", list: "a list", dict: "an object", int: "a whole number"}


@dataclass(frozen=True)
class Question:
    """A question about a text.

    Attributes:
        key: its name in a file of predictions; questions about several documents have one key.
        question: the question.
        text: the text that holds its answer.
        answers: the right answers, with which predictions are compared; none if the text does not answer it.
        spans: where answers begin and end in the text, in characters; none if the text does not hold them word for word.
        where: its record in the file.
    """

    key: str
    question: str
    text: str
    answers: tuple[str, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    where: str = ""


@dataclass(frozen=True)
class QuestionFile:
    """The questions of one file, or of some of its articles.

    Attributes:
        file: the file.
        metric: the official metric.
        articles: the numbers of the articles to read; None for all.
        evidence: the folder of the documents of TriviaQA.
    """

    file: Path
    metric: Metric
    articles: tuple[int, ...] | None = None
    evidence: Path | None = None

    def __iter__(self) -> Iterator[Question]:
        data = read_json(self.file)
        return _trivia(self.file, data, self.evidence) if self.evidence else _squad(self.file, data, self.articles)


def find_questions(data: Path, domain: Domain = "wikipedia") -> dict[Split, QuestionFile]:
    """The questions to train with and to validate with, in a file or folder.

    Args:
        data: a JSON file in the layout of SQuAD, of which every fifth article is held out; a folder with one for training and
            one for validation, which their names say (train, dev); or the folder of TriviaQA, with `qa` and `evidence`.
        domain: of TriviaQA, the documents to read.

    Raises:
        ArgumentError: for another path.
        LineartimeError: if a file cannot be read or holds something else.
    """
    if data.is_file():
        content = read_json(data)
        articles = _articles(data, content)
        if len(articles) < 2:
            raise ArgumentError("data", f"is {data}, which holds one article, but one is held out: give a folder of two files.")
        held_out = tuple(range(0, len(articles), HELD_OUT_EVERY))
        rest = tuple(place for place in range(len(articles)) if place not in held_out)
        metric = _metric(_squad(data, content, None))
        return {"train": QuestionFile(data, metric, rest), "validation": QuestionFile(data, metric, held_out)}
    if not data.is_dir():
        raise ArgumentError("data", f"is {data}, which does not exist: give a file of questions, or the folder of TriviaQA.")
    if (data / "qa").is_dir():
        evidence = data / "evidence"
        train, validation = (data / "qa" / f"{domain}-{name}.json" for name in ("train", "dev"))
        for path in (train, validation, evidence):
            if not path.exists():
                raise ArgumentError("data", f"is {data}, which has no {path.relative_to(data)}: give the unpacked archive.")
        files: dict[Split, Path] = {"train": train, "validation": validation}
        return {split: QuestionFile(file, "triviaqa", evidence=evidence) for split, file in files.items()}
    of_split = one_of_each_split(data, (".json",), "train-v1.1.json and dev-v1.1.json")
    return {split: QuestionFile(file, _metric(_squad(file, read_json(file), None))) for split, file in of_split.items()}


def one_of_each_split(folder: Path, suffixes: Sequence[str], example: str) -> dict[Split, Path]:
    """The file for training and the one for validation, by their names. Raises ArgumentError unless there is one of each."""
    found: dict[Split, Path] = {}
    for file in sorted(each for each in folder.iterdir() if each.suffix in suffixes):
        split = named_split(file.name)
        if split in found:
            names = f"{found[split].name} and {file.name}"
            raise ArgumentError("data", f"is {folder}, which holds {names} for {split}: leave one of them there.")
        if split in ("train", "validation"):
            found[split] = file
    if len(found) < 2:
        kinds = " or ".join(suffixes)
        what = f"is {folder}, which lacks a {kinds} file named for training or for validation"
        raise ArgumentError("data", f"{what}: give a folder with both, such as {example}, or one file.")
    return found


def read_questions(file: Path) -> Iterator[Question]:
    """The questions of a file: JSON lines with `question`, `context` and perhaps `id`; the layout of SQuAD; or TriviaQA.

    The file of TriviaQA is one of its folder `qa`, beside which `evidence` is.

    Raises:
        LineartimeError: if the file cannot be read, or a record of it is something else.
    """
    if file.suffix == ".jsonl":
        yield from _lines(file)
        return
    data = read_json(file)
    if "Data" in data:
        yield from _trivia(file, data, file.absolute().parent.parent / "evidence")
    else:
        yield from _squad(file, data, None)


def _lines(file: Path) -> Iterator[Question]:
    for number, (where, record) in enumerate(read_lines(file), 1):
        question, text = (item(file, where, record, name, str) for name in ("question", "context"))
        yield Question(str(record.get("id", number)), question, text, where=where)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of any size. Raises LineartimeError for anything else, or if it is not there."""
    if file.is_dir():
        raise LineartimeError(f"{file} is a folder: give one of its files.")
    with reporting_file_errors("read", file), file.open("rb") as opened:
        content = opened.read()
    try:
        found = parse_text(content)
    except ValueError as error:
        raise LineartimeError(f"{file} holds no questions ({error}): {_LAYOUTS}.") from None
    if not isinstance(found, dict):
        raise LineartimeError(f"{file} holds no questions (it is {shown(found)}): {_LAYOUTS}.")
    return found


def item(file: Path, where: str, record: Any, name: str, kind: type[Any]) -> Any:
    """A field of a record. Raises LineartimeError, naming the record, unless it is there and of this type."""
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, kind):
        what = f"without {name}" if value is None else f"whose {name} is {shown(value)}"
        raise LineartimeError(f"{file} has {where} {what}, but it must be {_KINDS[kind]}.")
    return value


def _articles(file: Path, data: Mapping[str, Any]) -> list[Any]:
    articles = data.get("data")
    if not isinstance(articles, list) or not articles:
        raise LineartimeError(f"{file} holds no list `data` of articles: give a file in the layout of SQuAD.")
    return articles


def _metric(questions: Iterable[Question]) -> Metric:
    """SQuAD 2.0 has questions without an answer; the answers of CMRC are Chinese."""
    answers = [question.answers for question in questions]
    if not all(answers):
        return "squad_v2"
    texts = "".join(each[0] for each in answers)
    return "cmrc" if 2 * len(re.findall(r"[\u4e00-\u9fa5]", texts)) > len(texts) else "squad"


def _squad(file: Path, data: Mapping[str, Any], chosen: Sequence[int] | None) -> Iterator[Question]:
    articles = _articles(file, data)
    for place in range(len(articles)) if chosen is None else chosen:
        for number, part in enumerate(item(file, f"data[{place}]", articles[place], "paragraphs", list)):
            paragraph = f"data[{place}].paragraphs[{number}]"
            text = item(file, paragraph, part, "context", str)
            for count, qa in enumerate(item(file, paragraph, part, "qas", list)):
                where = f"{paragraph}.qas[{count}]"
                question = item(file, where, qa, "question", str)
                key = str(qa.get("id", where))
                given = item(file, where, qa, "answers", list) if qa.get("answers") and not qa.get("is_impossible") else []
                answers = tuple(item(file, where, answer, "text", str) for answer in given)
                starts = [item(file, where, answer, "answer_start", int) for answer in given]
                spans = [span for each in zip(answers, starts, strict=True) if (span := _place(text, *each))]
                yield Question(key, question, text, answers, tuple(spans), where)


def _place(text: str, answer: str, start: int) -> tuple[int, int] | None:
    """The place of an answer nearest to where it is said to start: files say other places, and answers that are nowhere."""
    places = [found.start() for found in re.finditer(re.escape(answer), text)] if answer else []
    nearest = min(places, key=lambda place: abs(place - start), default=None)
    return None if nearest is None else (nearest, nearest + len(answer))


def _trivia(file: Path, data: Mapping[str, Any], evidence: Path) -> Iterator[Question]:
    """The questions of TriviaQA, once for each of their documents; keys are those of its official script."""
    records, by_question = data.get("Data"), data.get("Domain") == "Wikipedia"
    if not isinstance(records, list):
        raise LineartimeError(f"{file} holds no list `Data` of questions: give a file of TriviaQA.")
    for place, record in enumerate(records):
        where = f"Data[{place}]"
        key, question = item(file, where, record, "QuestionId", str), item(file, where, record, "Question", str)
        answer = item(file, where, record, "Answer", dict) if "Answer" in record else {}  # the test split has none
        given, human, aliases = (
            _listed(file, where, answer, name) for name in ("NormalizedAliases", "HumanAnswers", "Aliases")
        )
        right = tuple(map(str, (*given, *human)))
        matching = _matcher([*right, *map(str, aliases)])
        for kind, folder in (("EntityPages", "wikipedia"), ("SearchResults", "web")):
            for page in _listed(file, where, record, kind):
                name = item(file, f"{where}.{kind}", page, "Filename", str)
                with reporting_file_errors("read", evidence / folder / name):
                    text = (evidence / folder / name).read_text("utf-8", errors="replace")
                spans = tuple(found.span() for found in matching.finditer(text)) if right else ()
                yield Question(key if by_question else "--".join((key, name)), question, text, right, spans, where)


def _listed(file: Path, where: str, record: dict[str, Any], name: str) -> list[Any]:
    """A list of a record; empty if the record has none."""
    found: list[Any] = item(file, where, record, name, list) if record.get(name) is not None else []
    return found


def _matcher(aliases: Sequence[str]) -> re.Pattern[str]:
    r"""Finds an alias as whole words, whatever is between them: distant supervision. The longest alias wins."""
    words = sorted({tuple(re.findall(r"\w+", alias)) for alias in aliases} - {()}, key=lambda each: -sum(map(len, each)))
    phrases = (r"\W+".join(map(re.escape, each)) for each in words)
    return re.compile(rf"(?<!\w)(?:{'|'.join(phrases)})(?!\w)", re.IGNORECASE)
