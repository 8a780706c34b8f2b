"""Answering questions by a span of a text: the windows to learn from, the best span of each question, and its metrics.

Shapes: B batch, T tokens, L the maximum number of tokens of an answer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from lineartime.choices import Split
from lineartime.errors import LineartimeError
from lineartime.finetuning.answer_metrics import answer_scores, score_answers
from lineartime.finetuning.questions import Question, QuestionFile
from lineartime.finetuning.trainer import Task
from lineartime.finetuning.windows import WindowEncoder, dataset_of, padded, read_windows
from lineartime.hf.tasks import LineartimeForQuestionAnswering

_NUMBER, _PLACES = datasets.Value("int32"), datasets.Sequence(datasets.Value("int32"))
_TRAINED = datasets.Features({"input_ids": _PLACES, "first": _NUMBER, "start_positions": _NUMBER, "end_positions": _NUMBER})
_ANSWERED = datasets.Features({"input_ids": _PLACES, "first": _NUMBER, "question": _NUMBER, "starts": _PLACES, "ends": _PLACES})


@dataclass(frozen=True)
class Answer:
    """What a model answers.

    Attributes:
        text: a part of the question's text.
        score: the logits of its first and its last token, less those of [CLS], which stand for no answer.
    """

    text: str
    score: float

    def above(self, threshold: float | None) -> str:
        """The text, or an empty one if the score is below a threshold."""
        return self.text if threshold is None or self.score >= threshold else ""


def best_threshold(found: Mapping[str, Answer], right: Mapping[str, Sequence[str]]) -> float:
    """The score from which on answers are kept so that F1 on SQuAD 2.0 is greatest."""

    def gain(key: str, answer: Answer) -> float:
        given, none = (answer_scores(text, right[key], "squad_v2")[1] for text in (answer.text, ""))
        return given - none

    gains = sorted(((each.score, gain(key, each)) for key, each in found.items()), reverse=True)
    best, total, threshold = 0.0, 0.0, gains[0][0] + 1
    for score, together in groupby(gains, key=itemgetter(0)):
        total += sum(each for _, each in together)
        if total > best:
            best, threshold = total, score
    return threshold


class Answering(Task):
    """Questions to train with and to answer, for one model and tokenizer.

    Args:
        files: the questions to train with and to validate with.
        encoder: divides them into windows.
        cache: the folder for the windows, which may be large.
        batch_size: the number of windows that are answered at once.
        seed: the windows without an answer that are trained on.
        max_answer_tokens: the longest answer; None for that of 99 % of the training windows.
        null_threshold: for SQuAD 2.0, the score below which a question has no answer; None for the best on validation.

    Raises:
        LineartimeError: if a file cannot be read, or there is nothing to train with.
    """

    head = LineartimeForQuestionAnswering
    peft_task = "QUESTION_ANS"
    metric = "f1"

    def __init__(
        self,
        files: Mapping[Split, QuestionFile],
        encoder: WindowEncoder,
        cache: Path,
        *,
        batch_size: int,
        seed: int = 0,
        max_answer_tokens: int | None = None,
        null_threshold: float | None = None,
    ) -> None:
        self.batch_size, self.null_threshold = batch_size, null_threshold
        self.validation = files["validation"]
        learnt = files["train"]
        self.right = {question.key: question.answers for question in self.validation}
        if not self.right:
            raise LineartimeError(f"{self.validation.file} holds no question to validate with: give other data.")
        learnable = [not each.answers or bool(each.spans) for each in learnt]
        if not any(learnable):
            raise LineartimeError(f"{learnt.file} holds no question whose text holds its answer: give other data.")
        self.left_out = learnable.count(False)
        options = {"questions": learnt, "seed": seed}
        self.train = dataset_of(encoder.for_training, options, _TRAINED, cache)
        self.held_out = dataset_of(encoder.for_answering, {"questions": self.validation}, _ANSWERED, cache)
        lengths = np.array(self.train["end_positions"]) - np.array(self.train["start_positions"]) + 1
        self.max_answer_tokens = max_answer_tokens or int(np.quantile(lengths, 0.99, method="higher"))
        self.predictions: dict[str, str] = {}

    def describe(self) -> str:
        """What is trained with and answered."""
        left = f"; {self.left_out:,} questions are left out, whose texts do not hold their answers" if self.left_out else ""
        return f"{len(self.train):,} windows to train with, {len(self.held_out):,} to answer in{left}"

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """A batch of padded windows, with the places of their answers."""
        places = ("start_positions", "end_positions")
        return {**padded(rows), **{name: torch.tensor([each[name] for each in rows]) for name in places}}

    def evaluate(self, model: LineartimeForQuestionAnswering, bf16: bool = False) -> dict[str, float]:
        """Answer the questions to validate with, and compare the answers with the right ones."""
        found = best_answers(model, self.held_out, self.validation, self.max_answer_tokens, self.batch_size, bf16)
        metric, threshold = self.validation.metric, self.null_threshold
        if metric == "squad_v2" and threshold is None:
            threshold = best_threshold(found, self.right)
        scores = {} if metric != "squad_v2" else {"null_threshold": threshold}
        self.predictions = {key: each.above(scores.get("null_threshold")) for key, each in found.items()}
        return {**asdict(score_answers(self.predictions, self.right, metric)), **scores}


def best_answers(
    model: LineartimeForQuestionAnswering,
    windows: Any,
    questions: Sequence[Question] | QuestionFile,
    max_answer_tokens: int,
    batch_size: int,
    bf16: bool = False,
) -> dict[str, Answer]:
    """The best span of each question over all of its windows and, if several documents have its key, over these."""
    best: dict[int, tuple[float, int, int]] = {}
    for number, score, begin, end in _spans(model, windows, max_answer_tokens, batch_size, bf16):
        if number not in best or score > best[number][0]:
            best[number] = score, begin, end
    answers: dict[str, Answer] = {}
    for number, question in enumerate(questions):
        score, begin, end = best[number]
        if question.key not in answers or score > answers[question.key].score:
            answers[question.key] = Answer(question.text[begin:end], score)
    return answers


def _spans(model: Any, windows: Any, longest: int, batch_size: int, bf16: bool) -> Iterator[tuple[int, float, int, int]]:
    """For each window, the number of its question and its best span: its score, and its place in the text in characters."""
    for rows, outputs in read_windows(model, windows, batch_size, bf16):
        starts, ends = outputs.start_logits.float().cpu(), outputs.end_logits.float().cpu()
        for row, start, end in zip(rows, starts, ends, strict=True):
            text = slice(row["first"], row["first"] + len(row["starts"]))
            score, begin, stop = best_span(start[text], end[text], longest)
            if stop >= 0:
                yield row["question"], score - float(start[0] + end[0]), row["starts"][begin], row["ends"][stop]
            else:  # a text without tokens
                yield row["question"], float("-inf"), 0, 0


def best_span(start: Tensor, end: Tensor, longest: int) -> tuple[float, int, int]:
    """The span of at most `longest` tokens with the greatest sum of the logits [T] of its first and last token.

    Returns:
        The sum, and the places of these tokens; (-inf, -1, -1) if there are none.
    """
    size = len(start)
    if not size:
        return float("-inf"), -1, -1
    longest = min(longest, size)
    beyond = torch.nn.functional.pad(end, (0, longest - 1), value=float("-inf"))
    sums = start[:, None] + beyond.unfold(0, longest, 1)  # [T, L]
    best = int(sums.argmax())
    return float(sums.flatten()[best]), best // longest, best // longest + best % longest
