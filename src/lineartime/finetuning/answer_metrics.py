"""Exact match and F1 of answers, by the definitions of the official scripts of SQuAD 1.1 and 2.0, TriviaQA and CMRC 2018.

They differ. SQuAD deletes punctuation, TriviaQA puts a space in its place and in that of quotes and underscores. Both leave out
articles, and compare bags of words. CMRC compares runs of Chinese characters and words. Only SQuAD 2.0 has questions without an
answer.
"""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

Metric = Literal["squad", "squad_v2", "triviaqa", "cmrc"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DELETED = str.maketrans("", "", string.punctuation)
_SPACED = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " "))  # noqa: RUF001  # quotes of TriviaQA
_MARKS = "-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』"  # noqa: RUF001  # those of CMRC
_WITHOUT_MARKS = str.maketrans("", "", _MARKS)
_CHINESE_OR_WORD = re.compile(r"[\u4e00-\u9fa5]|\d+(?:[.,]\d+)*|[^\W\d\u4e00-\u9fa5]+|\S")


@dataclass(frozen=True)
class Scores:
    """Means over all questions, in percent.

    Attributes:
        exact_match: answers that equal one of the right ones.
        f1: the overlap of answers with the nearest right one.
        questions: the number of questions.
        missing: those without a prediction, which score 0.
    """

    exact_match: float
    f1: float
    questions: int
    missing: int


def score_answers(predictions: Mapping[str, str], right: Mapping[str, Sequence[str]], metric: Metric) -> Scores:
    """Compare the predicted answers of all questions with the right ones, both by the question's key."""
    found = [answer_scores(predictions[key], right[key], metric) for key in right if key in predictions]
    exact, f1 = (100 * sum(each[place] for each in found) / max(len(right), 1) for place in (0, 1))
    return Scores(exact, f1, len(right), len(right) - len(found))


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
