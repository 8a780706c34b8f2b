"""Answering questions by a span of a text: the windows to learn from, the best span of each question, and its metrics.

Exact match and F1 are those of the official scripts of SQuAD 1.1 and 2.0, TriviaQA and CMRC 2018. They differ. SQuAD deletes
punctuation, TriviaQA puts a space in its place and in that of quotes and underscores. Both leave out articles, and compare bags
of words. CMRC compares runs of Chinese characters and words. Only SQuAD 2.0 has questions without an answer.

Shapes: B batch, T tokens, L the maximum number of tokens of an answer.
"""

import random
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lineartime.errors import LineartimeError
from lineartime.finetuning.config import FinetuneConfig
from lineartime.finetuning.data import Metric, Question, find_questions, names_of
from lineartime.finetuning.windows import NUMBER, NUMBERS, WINDOWS, Windows, dataset_of, padded, read_windows
from lineartime.hf.tasks import LineartimeForQuestionAnswering

_ENDS = ("start_positions", "end_positions")
_WINDOW = {"input_ids": NUMBERS, "first": NUMBER, "question": NUMBER}
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DELETED = str.maketrans("", "", string.punctuation)
_SPACED = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " "))  # noqa: RUF001  # quotes of TriviaQA
_MARKS = "-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』"  # noqa: RUF001  # those of CMRC
_WITHOUT_MARKS = str.maketrans("", "", _MARKS)
_CHINESE_OR_WORD = re.compile(r"[\u4e00-\u9fa5]|\d+(?:[.,]\d+)*|[^\W\d\u4e00-\u9fa5]+|\S")


# Metrics -----------------------------------------------------------------------------------------------------------------


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


# Windows -----------------------------------------------------------------------------------------------------------------


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


# Answers -----------------------------------------------------------------------------------------------------------------


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
        cache, trained = config.out / WINDOWS, {**_WINDOW, **dict.fromkeys(_ENDS, NUMBER)}
        options = {"questions": learnt, "windows": windows, "seed": config.seed}
        self.train = dataset_of(windows_to_learn, options, trained, cache)
        self.nowhere, self.left_out = learnable.count(False), len(learnable) - len(set(self.train["question"]))
        answered = {**_WINDOW, "starts": NUMBERS, "ends": NUMBERS}
        self.held_out = dataset_of(windows_to_answer, {"questions": self.validation, "windows": windows}, answered, cache)
        lengths = np.array(self.train["end_positions"]) - np.array(self.train["start_positions"]) + 1
        self.max_answer_tokens = config.advanced.max_answer_tokens or int(np.quantile(lengths, 0.99, method="higher"))
        self.predictions: dict[str, str] = {}

    def describe(self) -> str:
        """What is trained with and answered."""
        why = f"the texts of {self.nowhere:,} do not hold their answers, and no window holds those of the others whole"
        left = f"; {self.left_out:,} questions are left out: {why}" if self.left_out else ""
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
