"""What fine-tuning reads: records of JSON lines, CSV, TSV and Parquet; texts with labels; and questions about texts.

Questions are those of SQuAD 1.1 and 2.0, of data in its layout, such as CMRC 2018, and of TriviaQA.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lineartime.choices import Domain, Split
from lineartime.data.folders import named_split
from lineartime.data.readers import RECORDS, SourceFile, read_records
from lineartime.errors import ArgumentError, LineartimeError, reporting_file_errors
from lineartime.fields import shown
from lineartime.files import read_plain
from lineartime.finetuning.config import Advanced

HELD_OUT_EVERY = 5
"""Of a single file, every fifth article, or text with a label, is held out."""
Metric = Literal["squad", "squad_v2", "triviaqa", "cmrc"]
_LAYOUTS = "give JSON in the layout of SQuAD or TriviaQA"
_KINDS = {str: "a text", list: "a list", dict: "an object", int: "a whole number"}


def _one_of_each_split(folder: Path, suffixes: Sequence[str], example: str) -> dict[Split, Path]:
    """The file for training and the one for validation, by their names. Raises ArgumentError unless there is one of each."""
    if not folder.is_dir():
        raise ArgumentError("data", f"is {folder}, which does not exist: give a file, or a folder with {example}.")
    files = sorted(each for each in folder.iterdir() if each.suffix in suffixes)
    splits: tuple[Split, ...] = ("train", "validation")
    found = {split: [file for file in files if named_split(file.name) == split] for split in splits}
    if any(len(each) != 1 for each in found.values()):
        what = f"is {folder}, which must have one {' or '.join(suffixes)} file named for training, and one for validation"
        raise ArgumentError("data", f"{what}: give a folder with both, such as {example}, or one file.")
    return {split: each[0] for split, each in found.items()}


# Texts with labels -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Labelled:
    """A text with its label.

    Attributes:
        key: its name in a file of predictions.
        text: the text, or the first of a pair.
        second: the second text of a pair.
        label: the label as it stands in the file; None where it is to be predicted.
        where: its file and place.
    """

    key: str
    text: str
    second: str | None
    label: Any
    where: str


@dataclass(frozen=True)
class LabelledFile:
    """The texts of a file, or a share of them."""

    file: Path
    columns: tuple[str, str | None, str | None]
    """The names of the columns of the text, of the second text of pairs, and of the label."""
    held_out: bool | None = None
    """Whether every fifth text is left out (False), or alone is read (True); None reads all."""

    def __iter__(self) -> Iterator[Labelled]:
        text, second, label = self.columns
        for number, (place, record) in enumerate(read_records(SourceFile(self.file, text))):
            if self.held_out in (None, number % HELD_OUT_EVERY == 0):
                where = f"{self.file}, {place},"
                for option, column in (("text_column", text), ("pair_column", second), ("label_column", label)):
                    if column is not None and column not in record:
                        raise ArgumentError(option, f"is {column}, but {where} has the columns {', '.join(record)}.")
                texts = [record[column] for column in (text, second) if column is not None]
                for value in texts:
                    if not isinstance(value, str):
                        raise LineartimeError(f"{where} has {shown(value)} instead of a text: correct it, or leave it out.")
                key = str(record.get("id", number + 1))
                yield Labelled(key, texts[0], (*texts, None)[1], None if label is None else record[label], where)


def find_texts(data: Path, advanced: Advanced) -> dict[Split, LabelledFile]:
    """The texts to train with and to validate with: every fifth of a file is held out; of a folder, names of files say which.

    Raises ArgumentError for another path.
    """
    columns = (advanced.text_column, advanced.pair_column, advanced.label_column)
    if data.is_file():
        return {"train": LabelledFile(data, columns, False), "validation": LabelledFile(data, columns, True)}
    found = _one_of_each_split(data, RECORDS, "train.csv and validation.csv")
    return {split: LabelledFile(file, columns) for split, file in found.items()}


# Questions ---------------------------------------------------------------------------------------------------------------


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
    """The questions of one file, or of a share of its articles, with their official metric."""

    file: Path
    metric: Metric
    held_out: bool | None = None
    """Whether every fifth article is left out (False), or alone is read (True); None reads all."""

    def __iter__(self) -> Iterator[Question]:
        return read_questions(self.file, self.held_out)


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
        metric = _metric(data)
        return {"train": QuestionFile(data, metric, False), "validation": QuestionFile(data, metric, True)}
    if (data / "qa").is_dir():
        train, validation = (data / "qa" / f"{domain}-{name}.json" for name in ("train", "dev"))
        for path in (train, validation, data / "evidence"):
            if not path.exists():
                raise ArgumentError("data", f"is {data}, which has no {path.relative_to(data)}: give the unpacked archive.")
        return {"train": QuestionFile(train, "triviaqa"), "validation": QuestionFile(validation, "triviaqa")}
    of_split = _one_of_each_split(data, (".json",), "train-v1.1.json and dev-v1.1.json")
    return {split: QuestionFile(file, _metric(file)) for split, file in of_split.items()}


def _metric(file: Path) -> Metric:
    """SQuAD 2.0 has questions without an answer; the answers of CMRC are Chinese."""
    answers = [question.answers for question in read_questions(file)]
    if not all(answers):
        return "squad_v2"
    texts = "".join(each[0] for each in answers)
    return "cmrc" if 2 * len(re.findall(r"[\u4e00-\u9fa5]", texts)) > len(texts) else "squad"


def read_questions(file: Path, held_out: bool | None = None) -> Iterator[Question]:
    """The questions of a file: JSON lines with `question`, `context` and perhaps `id`; the layout of SQuAD; or TriviaQA.

    Of SQuAD, `held_out` says which articles, as for `QuestionFile`. The file of TriviaQA is one of its folder `qa`, beside
    which `evidence` is. Raises LineartimeError if the file cannot be read, or a record of it is something else.
    """
    if file.suffix == ".jsonl":
        for number, (where, record) in enumerate(read_records(SourceFile(file, "question")), 1):
            question, text = (_item(file, where, record, name, str) for name in ("question", "context"))
            yield Question(str(record.get("id", number)), question, text, where=where)
        return
    data = read_plain(file, _LAYOUTS)
    yield from _trivia(file, data) if "Data" in data else _squad(file, data, held_out)


def _item(file: Path, where: str, record: Any, name: str, kind: type[Any]) -> Any:
    """A field of a record. Raises LineartimeError, naming the record, unless it is there and of this type."""
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, kind):
        what = f"without {name}" if value is None else f"whose {name} is {shown(value)}"
        raise LineartimeError(f"{file} has {where} {what}, but it must be {_KINDS[kind]}.")
    return value


def _squad(file: Path, data: Mapping[str, Any], held_out: bool | None) -> Iterator[Question]:
    for place, article in enumerate(_item(file, "an object", data, "data", list)):
        if held_out not in (None, place % HELD_OUT_EVERY == 0):
            continue
        for number, part in enumerate(_item(file, f"data[{place}]", article, "paragraphs", list)):
            paragraph = f"data[{place}].paragraphs[{number}]"
            text = _item(file, paragraph, part, "context", str)
            for count, qa in enumerate(_item(file, paragraph, part, "qas", list)):
                where = f"{paragraph}.qas[{count}]"
                question = _item(file, where, qa, "question", str)
                key = str(qa.get("id", where))
                given = _item(file, where, qa, "answers", list) if qa.get("answers") and not qa.get("is_impossible") else []
                answers = tuple(_item(file, where, answer, "text", str) for answer in given)
                starts = [_item(file, where, answer, "answer_start", int) for answer in given]
                spans = [span for each in zip(answers, starts, strict=True) if (span := _place(text, *each))]
                yield Question(key, question, text, answers, tuple(spans), where)


def _place(text: str, answer: str, start: int) -> tuple[int, int] | None:
    """The place of an answer nearest to where it is said to start: files say other places, and answers that are nowhere."""
    places = [found.start() for found in re.finditer(re.escape(answer), text)] if answer else []
    nearest = min(places, key=lambda place: abs(place - start), default=None)
    return None if nearest is None else (nearest, nearest + len(answer))


def _trivia(file: Path, data: Mapping[str, Any]) -> Iterator[Question]:
    """The questions of TriviaQA, once for each of their documents; keys are those of its official script."""
    evidence, by_question = file.absolute().parent.parent / "evidence", data.get("Domain") == "Wikipedia"
    for place, record in enumerate(_item(file, "an object", data, "Data", list)):
        where = f"Data[{place}]"
        key, question = _item(file, where, record, "QuestionId", str), _item(file, where, record, "Question", str)
        answer = _item(file, where, record, "Answer", dict) if "Answer" in record else {}  # the test split has none
        given, human, aliases = (answer.get(name) or () for name in ("NormalizedAliases", "HumanAnswers", "Aliases"))
        right = tuple(map(str, (*given, *human)))
        matching = _matcher([*right, *map(str, aliases)])
        for kind, folder in (("EntityPages", "wikipedia"), ("SearchResults", "web")):
            for page in _item(file, where, record, kind, list) if record.get(kind) else ():
                name = _item(file, f"{where}.{kind}", page, "Filename", str)
                with reporting_file_errors("read", evidence / folder / name):
                    text = (evidence / folder / name).read_text("utf-8", errors="replace")
                spans = tuple(found.span() for found in matching.finditer(text)) if right else ()
                yield Question(key if by_question else "--".join((key, name)), question, text, right, spans, where)


def _matcher(aliases: Sequence[str]) -> re.Pattern[str]:
    r"""Finds an alias as whole words, whatever is between them: distant supervision. The longest alias wins."""
    words = sorted({tuple(re.findall(r"\w+", alias)) for alias in aliases} - {()}, key=lambda each: -sum(map(len, each)))
    phrases = (r"\W+".join(map(re.escape, each)) for each in words)
    return re.compile(rf"(?<!\w)(?:{'|'.join(phrases)})(?!\w)", re.IGNORECASE)
