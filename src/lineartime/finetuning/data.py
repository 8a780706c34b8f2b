"""Texts with labels, and questions about texts: SQuAD 1.1 and 2.0, data in its layout, such as CMRC 2018, and TriviaQA."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from lineartime.choices import Domain
from lineartime.data.folders import named_split
from lineartime.data.readers import RECORDS, SourceFile, read_records
from lineartime.errors import ArgumentError, LineartimeError, reporting_file_errors
from lineartime.fields import shown
from lineartime.files import read_plain

Metric = Literal["squad", "squad_v2", "triviaqa", "cmrc"]
Record = TypeVar("Record")
_LAYOUTS = "give JSON in the layout of SQuAD or TriviaQA"
_KINDS = {str: "a text", list: "a list", dict: "an object", int: "a whole number", bool: "true or false"}
_TRUTH = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_LETTER = r"[^\W\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
"""A letter or a digit of a script that has spaces between words: not of Thai, Lao, Burmese, Khmer, Japanese and Chinese."""


@dataclass(frozen=True)
class Records(Generic[Record]):
    """Records that are read from their file anew each time."""

    read: Callable[[], Iterator[Record]]

    def __iter__(self) -> Iterator[Record]:
        return self.read()


@dataclass(frozen=True)
class Labelled:
    """A text with its label."""

    id: str  # what is written with its prediction
    text: str  # or the first of a pair
    second: str | None
    label: Any  # as it stands in the file; None where it is to be predicted
    where: str  # its file and place


@dataclass(frozen=True)
class Question:
    """A question about a text."""

    key: str  # its place in the file; questions about several documents have one key
    question: str
    text: str  # that holds its answer
    answers: tuple[str, ...] = ()  # with which predictions are compared; none if the text does not answer it
    spans: tuple[tuple[int, int], ...] = ()  # of answers, in characters; none if the text does not hold them word for word
    id: str = ""  # what is written with its answer


def held_out(contents: Iterable[str], classes: Iterable[Iterable[str]]) -> frozenset[int]:
    """The places of the records to validate with: a fifth of each class, at least one of two, by a hash of their contents."""
    digests = [hashlib.sha256(each.encode(errors="replace")).digest() for each in contents]
    of_record = [set(each) or {""} for each in classes]
    left = Counter(name for each in of_record for name in each)
    wanted = {name: max(1, count // 5) for name, count in left.items()}
    chosen = []
    for place in sorted(range(len(digests)), key=digests.__getitem__):
        names = of_record[place]
        if any(wanted[name] > 0 for name in names) and all(left[name] > 1 for name in names):
            chosen.append(place)
            for name in names:
                left[name], wanted[name] = left[name] - 1, wanted[name] - 1
    return frozenset(chosen)


def names_of(ids: Iterable[str]) -> list[str]:
    """The names of records in an object: their ids; if some have the same, their numbers."""
    names = list(ids)
    return names if len(set(names)) == len(names) else [str(place) for place in range(1, len(names) + 1)]


def one_of_each_split(data: Path, suffixes: Sequence[str], example: str) -> tuple[Path, Path | None]:
    """The files to train and to validate with, by their names; None for a share of the first. Raises ArgumentError."""
    if data.is_file() and named_split(data.name) in (None, "train"):
        return data, None
    if not data.is_dir():
        what = f"is {data}, which does not exist, or is held out by its name"
        raise ArgumentError("data", f"{what}: give a file, or a folder with {example}.")
    named = [(named_split(each.name), each) for each in sorted(data.iterdir()) if SourceFile(each).format_suffix in suffixes]
    train, validation, others = ([file for split, file in named if split == name] for name in ("train", "validation", None))
    if len(train) != 1 or len(validation) > 1 or (others and not validation):
        what = f"is {data}, which must have one {' or '.join(suffixes)} file named for training, and one for validation"
        raise ArgumentError("data", f"{what}: give a folder with both, such as {example}, or one file.")
    return train[0], validation[0] if validation else None


def read_labelled(
    file: Path, columns: tuple[str, str | None, str | None], chosen: frozenset[int] | None = None
) -> Iterator[Labelled]:
    """The texts of a file of records, or those of some numbers, from the columns of text, second text of pairs, and label.

    Raises ArgumentError for a column that is not there, and LineartimeError for a text that is none.
    """
    text, second, label = columns
    for number, (place, record) in enumerate(read_records(SourceFile(file, text))):
        if chosen is None or number in chosen:
            where = f"{file}, {place},"
            for option, column in (("text_column", text), ("pair_column", second), ("label_column", label)):
                if column is not None and column not in record:
                    raise ArgumentError(option, f"is {column}, but {where} has the columns {', '.join(record)}.")
            texts = [record[text], None if second is None else record[second]]
            for value in texts[: 1 if second is None else 2]:
                if not isinstance(value, str):
                    raise LineartimeError(f"{where} has {shown(value)} instead of a text: correct it, or leave it out.")
            yield Labelled(_id(record, number + 1), texts[0], texts[1], None if label is None else record[label], where)


def find_questions(data: Path, domain: Domain = "wikipedia") -> tuple[Records[Question], Records[Question], Metric]:
    """The questions to train with, those to validate with, and their official metric.

    They are those of a JSON file in the layout of SQuAD, of which a fifth of the articles is held out, by a hash of their
    contents; of a folder with two such files, named train and dev; or of the folder of TriviaQA, with `qa` and `evidence`, of
    which `domain` says the documents to read. Raises ArgumentError for another path, and LineartimeError for other contents.
    """
    if (data / "qa").is_dir():
        train, validation = (data / "qa" / f"{domain}-{name}.json" for name in ("train", "dev"))
        for path in (train, validation, data / "evidence"):
            if not path.exists():
                raise ArgumentError("data", f"is {data}, which has no {path.relative_to(data)}: give the unpacked archive.")
        return Records(partial(read_questions, train)), Records(partial(read_questions, validation)), "triviaqa"
    file, other = one_of_each_split(data, (".json",), "train-v1.1.json and dev-v1.1.json")
    if SourceFile(file).format_suffix in {*RECORDS} - {".json"}:
        raise ArgumentError("data", f"is {data}, but questions to train with have other files: {_LAYOUTS}.")
    answers = [question.answers for question in read_questions(other or file)]
    texts = "".join(each[0] for each in answers if each)
    is_chinese = 2 * len(re.findall(r"[\u4e00-\u9fa5]", texts)) > len(texts)
    metric: Metric = "squad_v2" if not all(answers) else "cmrc" if is_chinese else "squad"
    if other is not None:
        return Records(partial(read_questions, file)), Records(partial(read_questions, other)), metric
    return Records(partial(read_questions, file, held=False)), Records(partial(read_questions, file, held=True)), metric


def read_questions(file: Path, held: bool | None = None) -> Iterator[Question]:
    """The questions of a file: records with `question`, `context` and perhaps `id`; the layout of SQuAD; or TriviaQA.

    Of SQuAD, `held` says whether the articles that are held out are left out (False), or alone are read (True); None reads all.
    The file of TriviaQA is one of its folder `qa`, beside which `evidence` is. Raises LineartimeError if the file cannot be
    read, or a record of it is something else.
    """
    if SourceFile(file).format_suffix in {*RECORDS} - {".json"}:
        for number, (where, record) in enumerate(read_records(SourceFile(file, "question")), 1):
            question, text = (_item(file, where, record, name, str) for name in ("question", "context"))
            yield Question(where, question, text, id=_id(record, number))
        return
    with SourceFile(file).open() as stream:
        data = read_plain(file, _LAYOUTS, stream.read())
    yield from _trivia(file, data) if "Data" in data else _squad(file, data, held)


def _id(record: Mapping[str, Any], otherwise: object) -> str:
    """The id of a record, which is only written with its prediction; without one, its place."""
    return str(otherwise if record.get("id") is None else record["id"])


def _item(file: Path, where: str, record: Any, name: str, kind: type[Any], otherwise: Any = None) -> Any:
    """A field of a record; a number and a truth value may also be a text. `otherwise` stands for one that is not there.

    Raises LineartimeError, naming the record, unless it is of this type.
    """
    value = record.get(name) if isinstance(record, dict) else None
    found = otherwise if value is None else value
    if kind is bool and value is not None:
        found = _TRUTH.get(str(value).strip().lower())
    if kind is int and value is not None:
        number = re.fullmatch(r"(-?\d{1,18})(\.0*)?", str(value).strip())
        found = number and int(number[1])
    if not isinstance(found, kind):
        what = f"without {name}" if value is None else f"whose {name} is {shown(value)}"
        raise LineartimeError(f"{file} has {where} {what}, but it must be {_KINDS[kind]}.")
    return found


def _squad(file: Path, data: Mapping[str, Any], held: bool | None) -> Iterator[Question]:
    item = partial(_item, file)
    articles = item("an object", data, "data", list)
    chosen = frozenset() if held is None else held_out(map(json.dumps, articles), [""] * len(articles))
    for place, article in enumerate(articles):
        if held not in (None, place in chosen):
            continue
        for number, paragraph in enumerate(item(f"data[{place}]", article, "paragraphs", list)):
            above = f"data[{place}].paragraphs[{number}]"
            text = item(above, paragraph, "context", str)
            for count, qa in enumerate(item(above, paragraph, "qas", list)):
                where = f"{above}.qas[{count}]"
                question = item(where, qa, "question", str)
                given = [] if item(where, qa, "is_impossible", bool, False) else item(where, qa, "answers", list, [])
                answers = tuple(item(where, answer, "text", str) for answer in given)
                starts = [item(where, answer, "answer_start", int, -1) for answer in given]
                spans = [span for each in zip(answers, starts, strict=True) if (span := _place(text, *each))]
                yield Question(where, question, text, answers, tuple(spans), _id(qa, where))


def _place(text: str, answer: str, start: int) -> tuple[int, int] | None:
    """Where an answer is said to start; if it is not there, its nearest place as a whole word, and, below 0, its only one."""
    if answer and start >= 0 and text.startswith(answer, start):
        return start, start + len(answer)
    before = rf"(?<!{_LETTER})" if re.match(_LETTER, answer[:1]) else ""
    after = rf"(?!{_LETTER})" if re.match(_LETTER, answer[-1:]) else ""
    places = [found.span() for found in re.finditer(before + re.escape(answer) + after, text)] if answer else []
    return min(places, key=lambda place: abs(place[0] - start)) if len(places) == 1 or (places and start >= 0) else None


def _trivia(file: Path, data: Mapping[str, Any]) -> Iterator[Question]:
    """The questions of TriviaQA, once for each of their documents; ids are those of its official script.

    An answer is wherever an alias stands as whole words, whatever is between them: distant supervision. The longest alias wins.
    """
    item = partial(_item, file)
    evidence, by_question = file.absolute().parent.parent / "evidence", data.get("Domain") == "Wikipedia"
    for place, record in enumerate(item("an object", data, "Data", list)):
        where = f"Data[{place}]"
        asked, question = item(where, record, "QuestionId", str), item(where, record, "Question", str)
        answer = item(where, record, "Answer", dict, {})  # the test split has none
        names = ("NormalizedAliases", "HumanAnswers", "Aliases")
        given, human, aliases = (list(map(str, item(where, answer, name, list, []))) for name in names)
        right = (*given, *human)
        words = {tuple(re.findall(r"\w+", alias)) for alias in (*right, *aliases)} - {()}
        phrases = (r"\W+".join(map(re.escape, each)) for each in sorted(words, key=lambda each: -sum(map(len, each))))
        matching = re.compile(rf"(?<!\w)(?:{'|'.join(phrases)})(?!\w)", re.IGNORECASE)
        for kind, folder in (("EntityPages", "wikipedia"), ("SearchResults", "web")):
            for page in item(where, record, kind, list, []):
                name = item(f"{where}.{kind}", page, "Filename", str)
                with reporting_file_errors("read", evidence / folder / name):
                    text = (evidence / folder / name).read_text("utf-8", errors="replace")
                spans = tuple(found.span() for found in matching.finditer(text)) if right else ()
                key, own = (where, asked) if by_question else ("--".join((where, name)), "--".join((asked, name)))
                yield Question(key, question, text, right, spans, own)
