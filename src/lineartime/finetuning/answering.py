"""Answering questions by a span of a text: SQuAD 1.1 and 2.0, data in its layout, such as CMRC 2018, and TriviaQA.

Exact match and F1 are those of the official scripts of SQuAD 1.1 and 2.0, TriviaQA and CMRC 2018. They differ. SQuAD deletes
punctuation, TriviaQA puts a space in its place and in that of quotes and underscores. Both leave out articles, and compare bags
of words. CMRC compares runs of Chinese characters and words. Only SQuAD 2.0 has questions without an answer.

Shapes: B batch, T tokens, L the maximum number of tokens of an answer.
"""

import json
import random
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lineartime.choices import Domain
from lineartime.data.readers import RECORDS, SourceFile, read_records
from lineartime.errors import ArgumentError, LineartimeError, reporting_file_errors
from lineartime.fields import shown
from lineartime.files import read_plain
from lineartime.finetuning.config import FinetuneConfig
from lineartime.finetuning.data import Records, Windows, held_out, id_of, names_of, on_disk, padded, read_windows, split_files
from lineartime.hf.heads import LineartimeForQuestionAnswering

Metric = Literal["squad", "squad_v2", "triviaqa", "cmrc"]
_ENDS = ("start_positions", "end_positions")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DELETED = str.maketrans("", "", string.punctuation)
_SPACED = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " "))  # noqa: RUF001  # quotes of TriviaQA
_MARKS = "-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』"  # noqa: RUF001  # those of CMRC
_WITHOUT_MARKS = str.maketrans("", "", _MARKS)
_CHINESE_OR_WORD = re.compile(r"[\u4e00-\u9fa5]|\d+(?:[.,]\d+)*|[^\W\d\u4e00-\u9fa5]+|\S")
_LAYOUTS = "give JSON in the layout of SQuAD or TriviaQA"
_KINDS = {str: "a text", list: "a list", dict: "an object", int: "a whole number", bool: "true or false"}
_TRUTH = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_LETTER = r"[^\W\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
"""A letter or a digit of a script that has spaces between words: not of Thai, Lao, Burmese, Khmer, Japanese and Chinese."""


@dataclass(frozen=True)
class Question:
    """A question about a text."""

    key: str  # its place in the file; questions about several documents have one key
    question: str
    text: str  # that holds its answer
    answers: tuple[str, ...] = ()  # with which predictions are compared; none if the text does not answer it
    spans: tuple[tuple[int, int], ...] = ()  # of answers, in characters; none if the text does not hold them word for word
    id: str = ""  # what is written with its answer


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
        return Records(read_questions, train), Records(read_questions, validation), "triviaqa"
    file, other = split_files(data, (".json",), "train-v1.1.json and dev-v1.1.json")
    if SourceFile(file).format_suffix in {*RECORDS} - {".json"}:
        raise ArgumentError("data", f"is {data}, but questions to train with have other files: {_LAYOUTS}.")
    answers = [question.answers for question in read_questions(other or file)]
    texts = "".join(each[0] for each in answers if each)
    is_chinese = 2 * len(re.findall(r"[\u4e00-\u9fa5]", texts)) > len(texts)
    metric: Metric = "squad_v2" if not all(answers) else "cmrc" if is_chinese else "squad"
    if other is not None:
        return Records(read_questions, file), Records(read_questions, other), metric
    return Records(read_questions, file, held=False), Records(read_questions, file, held=True), metric


def read_questions(file: Path, held: bool | None = None) -> Iterator[Question]:
    """The questions of a file: records with `question`, `context` and perhaps `id`; the layout of SQuAD; or TriviaQA.

    Of SQuAD, `held` says whether the articles that are held out are left out (False), or alone are read (True); None reads all.
    The file of TriviaQA is one of its folder `qa`, beside which `evidence` is. Raises LineartimeError if the file cannot be
    read, or a record of it is something else.
    """
    if SourceFile(file).format_suffix in {*RECORDS} - {".json"}:
        for number, (where, record) in enumerate(read_records(SourceFile(file, "question")), 1):
            question, text = (_item(file, where, record, name, str) for name in ("question", "context"))
            yield Question(where, question, text, id=id_of(record, number))
        return
    with SourceFile(file).open() as stream:
        data = read_plain(file, _LAYOUTS, stream.read())
    yield from _trivia(file, data) if "Data" in data else _squad(file, data, held)


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
                yield Question(where, question, text, answers, tuple(spans), id_of(qa, where))


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


def score_answers(predictions: Mapping[str, str], right: Mapping[str, Sequence[str]], metric: Metric) -> dict[str, float]:
    """Mean exact match and F1 of all questions, in percent: predicted and right answers by the question's key.

    A question that is `missing` among the predictions scores 0.
    """
    found = [answer_scores(predictions[key], right[key], metric) for key in right if key in predictions]
    exact, f1 = (100 * sum(each[place] for each in found) / max(len(right), 1) for place in (0, 1))
    return {"exact_match": exact, "f1": f1, "questions": len(right), "missing": len(right) - len(found)}


def answer_scores(prediction: str, right: Sequence[str], metric: Metric) -> tuple[float, float]:
    """Exact match and F1 of one answer: each is the maximum over the right answers, of which only squad_v2 may have none."""
    if metric == "squad_v2":
        right = [each for each in right if normalized(each, metric)] or [""]
    own, others = normalized(prediction, metric), [normalized(each, metric) for each in right]
    return float(own in others), max(_f1(own, each, metric) for each in others)


def normalized(answer: str, metric: Metric) -> str:
    """An answer in lower case, without punctuation; in English, without articles and superfluous spaces."""
    if metric == "cmrc":
        return answer.lower().strip().translate(_WITHOUT_MARKS)
    answer = answer.lower().translate(_SPACED if metric == "triviaqa" else _DELETED)
    return " ".join(_ARTICLES.sub(" ", answer).split())


def _f1(own: str, right: str, metric: Metric) -> float:
    """The F1 of the words that both have; of CMRC, of the longest run of characters and words that both have."""
    split = _CHINESE_OR_WORD.findall if metric == "cmrc" else str.split
    mine, other = split(own), split(right)
    if metric == "squad_v2" and not (mine and other):
        return float(mine == other)
    if metric == "cmrc":
        common = SequenceMatcher(None, other, mine, autojunk=False).find_longest_match().size
    else:
        common = sum((Counter(mine) & Counter(other)).values())
    return 2 * common / (len(mine) + len(other)) if common else 0.0


def windows_to_answer(questions: Iterable[Question], windows: Windows) -> Iterator[dict[str, Any]]:
    """All windows of questions, with the number of their question, and where each token of its text begins and ends in it.

    `first` is the place of the first of these tokens in the window. Raises LineartimeError as `Windows.of`.
    """
    for number, question in enumerate(questions):
        where = f"The question {question.id}" + f" ({question.key})" * (question.id != question.key)
        for each in windows.of(question.question, question.text, where):
            first = each.type_ids.index(1)
            offsets = np.array(each.offsets[first:-1], dtype=np.int64).reshape(-1, 2)
            places = {"starts": offsets[:, 0], "ends": offsets[:, 1]}
            yield {"input_ids": each.ids, "first": first, "question": number, **places}


def tokens_of(spans: Sequence[tuple[int, int]], window: Mapping[str, Any]) -> tuple[int, int] | None:
    """The places of the first and the last token of the first span that lies in a window; None if none does."""
    starts, ends = window["starts"], window["ends"]
    for begin, end in spans if len(ends) else ():
        if starts[0] <= begin and end <= ends[-1]:
            first, last = np.searchsorted(ends, begin, side="right"), np.searchsorted(starts, end) - 1
            return window["first"] + int(first), window["first"] + int(max(first, last))
    return None


def windows_to_learn(questions: Iterable[Question], windows: Windows, seed: int) -> Iterator[dict[str, Any]]:
    """Windows with the tokens of an answer, and at most as many without, of which [CLS] is the answer.

    A question whose answer no window holds whole is left out. One without an answer has a single window.
    Raises LineartimeError if there is no window.
    """
    found = False
    for number, question in enumerate(questions):
        if question.answers and not question.spans:
            continue
        own = [(window, tokens_of(question.spans, window)) for window in windows_to_answer([question], windows)]
        with_answer, without = ([each for each in own if (each[1] is None) == empty] for empty in (False, True))
        count = min(len(without), len(with_answer) if question.spans else 1)
        chosen = random.Random(f"{seed} {question.id}").sample(without, count)
        for window, place in (*with_answer, *chosen):
            ends = dict(zip(_ENDS, place or (0, 0), strict=True))
            yield {"input_ids": window["input_ids"], "first": window["first"], "question": number, **ends}
            found = True
    if not found:
        size = f"{windows.context_length:,} tokens"
        raise LineartimeError(f"No window of {size} holds an answer to train with whole: raise `context_length`.")


class Answer(NamedTuple):
    """What a model answers: a part of the question's text."""

    text: str
    score: float  # the logits of its first and its last token, less those of [CLS], which stand for no answer

    def above(self, threshold: float | None) -> str:
        """The text, or an empty one if the score is below a threshold."""
        return self.text if threshold is None or self.score >= threshold else ""


def best_threshold(found: Mapping[str, Answer], right: Mapping[str, Sequence[str]]) -> float:
    """The score from which on answers are kept so that F1 on SQuAD 2.0 is greatest."""
    gains = []
    for key, answer in found.items():
        given, none = (answer_scores(text, right[key], "squad_v2")[1] for text in (answer.text, ""))
        gains.append((answer.score, given - none))
    gains.sort(reverse=True)
    best, total, threshold = 0.0, 0.0, gains[0][0] + 1
    for score, together in groupby(gains, key=itemgetter(0)):
        total += sum(each for _, each in together)
        if total > best:
            best, threshold = total, score
    return threshold


def best_answers(
    model: LineartimeForQuestionAnswering,
    windows: Any,
    questions: Iterable[Question],
    max_answer_tokens: int,
    batch_size: int,
    bf16: bool = False,
) -> dict[str, Answer]:
    """The best span of each question over all of its windows and, if several documents have its key, over these."""
    best: dict[int, tuple[float, int, int]] = {}  # of each question: the score, and the place in the text in characters
    for rows, outputs in read_windows(model, windows, batch_size, bf16):
        starts, ends = outputs.start_logits.float().cpu(), outputs.end_logits.float().cpu()
        for row, start, end in zip(rows, starts, ends, strict=True):
            number, score, begin, stop = row["question"], float("-inf"), 0, 0
            if len(row["starts"]):
                text = slice(row["first"], row["first"] + len(row["starts"]))
                score, first, last = best_span(start[text], end[text], max_answer_tokens)
                score -= float(start[0] + end[0])
                begin, stop = row["starts"][first], row["ends"][last]
            if number not in best or score > best[number][0]:
                best[number] = score, begin, stop
    answers: dict[str, Answer] = {}
    for number, question in enumerate(questions):
        score, begin, end = best[number]
        if question.key not in answers or score > answers[question.key].score:
            answers[question.key] = Answer(question.text[begin:end], score)
    return answers


def best_span(start: Tensor, end: Tensor, longest: int) -> tuple[float, int, int]:
    """The span of at most `longest` tokens with the greatest sum of the logits [T] of its first and last token.

    Returns the sum, and the places of these tokens.
    """
    longest = min(longest, len(start))
    beyond = torch.nn.functional.pad(end, (0, longest - 1), value=float("-inf"))
    sums = start[:, None] + beyond.unfold(0, longest, 1)  # [T, L]
    best = int(sums.argmax())
    return float(sums.flatten()[best]), best // longest, best // longest + best % longest


class Answering:
    """Questions to train with and to answer, for one model and tokenizer.

    Raises LineartimeError if a file cannot be read, or there is nothing to train with.
    """

    head = LineartimeForQuestionAnswering
    peft_task = "QUESTION_ANS"
    metric = "f1"

    def __init__(self, config: FinetuneConfig, windows: Windows) -> None:
        self.batch_size, self.null_threshold = config.batch_size, config.advanced.null_threshold
        learnt, self.validation, self.kind = find_questions(config.data, config.advanced.domain)
        self.right = {question.key: question.answers for question in self.validation}
        self.ids = {question.key: question.id for question in self.validation}
        if not self.right:
            raise LineartimeError(f"{config.data} holds no question to validate with: give two articles or more.")
        learnable = [not each.answers or bool(each.spans) for each in learnt]
        if not any(learnable):
            what = "holds no question to train with whose text holds its answer: give other data."
            raise LineartimeError(f"{config.data} {what}")
        options = {"questions": learnt, "windows": windows, "seed": config.seed}
        self.train = on_disk(windows_to_learn, options, ("first", "question", *_ENDS), {}, config.out)
        self.left_out = len(learnable) - len(set(self.train["question"]))
        options, places = {"questions": self.validation, "windows": windows}, {"starts": "int32", "ends": "int32"}
        self.held_out = on_disk(windows_to_answer, options, ("first", "question"), places, config.out)
        lengths = np.array(self.train["end_positions"]) - np.array(self.train["start_positions"]) + 1
        self.max_answer_tokens = config.advanced.max_answer_tokens or int(np.quantile(lengths, 0.99, method="higher"))
        self.predictions: dict[str, str] = {}

    def describe(self) -> str:
        """What is trained with and answered."""
        left = f"; {self.left_out:,} questions, whose answer no window holds, are left out" if self.left_out else ""
        return f"{len(self.train):,} windows to train with, {len(self.held_out):,} to answer in{left}"

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """A batch of padded windows, with the places of their answers."""
        return {**padded(rows), **{name: torch.tensor([each[name] for each in rows]) for name in _ENDS}}

    def evaluate(self, model: LineartimeForQuestionAnswering, bf16: bool = False) -> dict[str, float]:
        """Answer the questions to validate with, and compare the answers with the right ones."""
        found = best_answers(model, self.held_out, self.validation, self.max_answer_tokens, self.batch_size, bf16)
        threshold = None
        if self.kind == "squad_v2":
            threshold = best_threshold(found, self.right) if self.null_threshold is None else self.null_threshold
        answers = {key: each.above(threshold) for key, each in found.items()}
        self.predictions = dict(zip(names_of(self.ids.values()), answers.values(), strict=True))
        scores = score_answers(answers, self.right, self.kind)
        return scores if threshold is None else {**scores, "null_threshold": threshold}
