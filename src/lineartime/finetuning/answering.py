"""Answering questions by a span of a text: the windows to learn from, the best span of each question, and its metrics.

Exact match and F1 are those of the official scripts of SQuAD 1.1 and 2.0, TriviaQA and CMRC 2018. They differ. SQuAD deletes
punctuation, TriviaQA puts a space in its place and in that of quotes and underscores. Both leave out articles, and compare bags
of words. CMRC compares runs of Chinese characters and words. Only SQuAD 2.0 has questions without an answer.

Shapes: B batch, T tokens, L the maximum number of tokens of an answer.
"""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby
from operator import itemgetter
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from lineartime.errors import LineartimeError
from lineartime.finetuning.config import FinetuneConfig
from lineartime.finetuning.data import Metric, Question, QuestionFile, find_questions, names_of
from lineartime.finetuning.windows import WINDOWS, WindowEncoder, dataset_of, padded, read_windows
from lineartime.hf.tasks import LineartimeForQuestionAnswering

_NUMBER, _PLACES = datasets.Value("int32"), datasets.Sequence(datasets.Value("int32"))
_ENDS = ("start_positions", "end_positions")
_TRAINED = datasets.Features({"input_ids": _PLACES, **dict.fromkeys(("first", "question", *_ENDS), _NUMBER)})
_ANSWERED = datasets.Features({"input_ids": _PLACES, "first": _NUMBER, "question": _NUMBER, "starts": _PLACES, "ends": _PLACES})
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DELETED = str.maketrans("", "", string.punctuation)
_SPACED = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " "))  # noqa: RUF001  # quotes of TriviaQA
_MARKS = "-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』"  # noqa: RUF001  # those of CMRC
_WITHOUT_MARKS = str.maketrans("", "", _MARKS)
_CHINESE_OR_WORD = re.compile(r"[\u4e00-\u9fa5]|\d+(?:[.,]\d+)*|[^\W\d\u4e00-\u9fa5]+|\S")


def score_answers(predictions: Mapping[str, str], right: Mapping[str, Sequence[str]], metric: Metric) -> dict[str, float]:
    """Mean exact match and F1 of all questions, in percent: predicted and right answers by the question's key.

    A question that is `missing` among the predictions scores 0.
    """
    found = [answer_scores(predictions[key], right[key], metric) for key in right if key in predictions]
    exact, f1 = (100 * sum(each[place] for each in found) / max(len(right), 1) for place in (0, 1))
    return {"exact_match": exact, "f1": f1, "questions": len(right), "missing": len(right) - len(found)}


def answer_scores(prediction: str, right: Sequence[str], metric: Metric) -> tuple[float, float]:
    """Exact match and F1 of one answer: each is the maximum over the right answers, of which only squad_v2 may have none."""
    if metric == "cmrc":
        exact = _plain(prediction) in map(_plain, right)
        return float(exact), max(_run_f1(prediction, each) for each in right)
    if metric == "squad_v2":
        right = [each for each in right if normalized(each, metric)] or [""]
    own, others = normalized(prediction, metric), [normalized(each, metric) for each in right]
    return float(own in others), max(_bag_f1(own.split(), each.split(), metric) for each in others)


def normalized(answer: str, metric: Metric) -> str:
    """An answer in lower case, without punctuation, articles and superfluous spaces."""
    answer = answer.lower().translate(_SPACED if metric == "triviaqa" else _DELETED)
    return " ".join(_ARTICLES.sub(" ", answer).split())


def _bag_f1(own: list[str], right: list[str], metric: Metric) -> float:
    if metric == "squad_v2" and not (own and right):
        return float(own == right)
    return _f1(sum((Counter(own) & Counter(right)).values()), len(own), len(right))


def _run_f1(prediction: str, right: str) -> float:
    """The F1 of CMRC, of the longest run of characters and words that both have."""
    own, other = (_CHINESE_OR_WORD.findall(_plain(each)) for each in (prediction, right))
    common = SequenceMatcher(None, other, own, autojunk=False).find_longest_match(0, len(other), 0, len(own))
    return _f1(common.size, len(own), len(other))


def _plain(answer: str) -> str:
    return answer.lower().strip().translate(_WITHOUT_MARKS)


def _f1(common: int, predicted: int, right: int) -> float:
    return 2 * common / (predicted + right) if common else 0.0


@dataclass(frozen=True)
class Answer:
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


class Answering:
    """Questions to train with and to answer, for one model and tokenizer.

    Raises LineartimeError if a file cannot be read, or there is nothing to train with.
    """

    head = LineartimeForQuestionAnswering
    peft_task = "QUESTION_ANS"
    metric = "f1"

    def __init__(self, config: FinetuneConfig, encoder: WindowEncoder) -> None:
        self.batch_size, self.null_threshold = config.batch_size, config.advanced.null_threshold
        files = find_questions(config.data, config.advanced.domain)
        learnt, self.validation = files["train"], files["validation"]
        self.right = {question.key: question.answers for question in self.validation}
        self.ids = {question.key: question.id for question in self.validation}
        if not self.right:
            raise LineartimeError(f"{self.validation.file} holds no question to validate with: give two articles or more.")
        learnable = [not each.answers or bool(each.spans) for each in learnt]
        if not any(learnable):
            raise LineartimeError(
                f"{learnt.file} holds no question to train with whose text holds its answer: give other data."
            )
        cache = config.out / WINDOWS
        self.train = dataset_of(encoder.for_training, {"questions": learnt, "seed": config.seed}, _TRAINED, cache)
        self.nowhere, self.left_out = learnable.count(False), len(learnable) - len(set(self.train["question"]))
        self.held_out = dataset_of(encoder.for_answering, {"questions": self.validation}, _ANSWERED, cache)
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
        metric, threshold = self.validation.metric, None
        if metric == "squad_v2":
            threshold = best_threshold(found, self.right) if self.null_threshold is None else self.null_threshold
        answers = {key: each.above(threshold) for key, each in found.items()}
        self.predictions = dict(zip(names_of(self.ids.values()), answers.values(), strict=True))
        scores = score_answers(answers, self.right, metric)
        return scores if threshold is None else {**scores, "null_threshold": threshold}


def best_answers(
    model: LineartimeForQuestionAnswering,
    windows: Any,
    questions: Sequence[Question] | QuestionFile,
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
