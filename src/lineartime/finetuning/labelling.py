"""Labels of texts: one or several of a set, or a number; the windows to learn from, the prediction of each text, its metrics.

A text longer than a window is read in several. Each of them is trained with the text's label, and the prediction is the mean of
their logits.

Shapes: K labels.
"""

import ast
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import pearsonr, spearmanr
from sklearn import metrics
from torch import Tensor

from lineartime.data.readers import RECORDS, SourceFile, read_records
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.fields import shown
from lineartime.finetuning.config import Advanced, FinetuneConfig, LabelKind
from lineartime.finetuning.data import Records, Windows, held_out, id_of, names_of, on_disk, padded, read_windows, split_files
from lineartime.hf.heads import LineartimeForSequenceClassification
from lineartime.hf.model import LineartimeConfig

_PROBLEMS: dict[LabelKind, str] = {
    "single": "single_label_classification",
    "multiple": "multi_label_classification",
    "numbers": "regression",
}
_METRICS = {"single": "accuracy", "multiple": "f1", "numbers": "spearman"}
"""By which the best model is chosen."""


@dataclass(frozen=True)
class Labelled:
    """A text with its label."""

    id: str  # what is written with its prediction
    text: str  # or the first of a pair
    second: str | None
    label: Any  # as it stands in the file; None where it is to be predicted
    where: str  # its file and place


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
            yield Labelled(id_of(record, number + 1), texts[0], texts[1], None if label is None else record[label], where)


@dataclass(frozen=True)
class Labels:
    """What the labels of a data set are."""

    kind: LabelKind
    names: tuple[str, ...] = ()  # none for numbers
    mean: float = 0.0  # of numbers; the head learns numbers with mean 0 and deviation 1
    deviation: float = 1.0

    @classmethod
    def of_model(cls, config: LineartimeConfig) -> "Labels":
        """The labels of a fine-tuned model. The heads of earlier versions give numbers as they are in the data."""
        kind = next(kind for kind, problem in _PROBLEMS.items() if problem == config.problem_type)
        if kind == "numbers":
            return cls(kind, (), getattr(config, "label_mean", 0.0), getattr(config, "label_deviation", 1.0))
        return cls(kind, tuple(config.id2label[place] for place in range(config.num_labels)))

    def target(self, value: Any, where: str) -> list[float]:
        """What the head learns for a label: [1] or [K]. Raises LineartimeError for one that no text to train with has."""
        if self.kind == "numbers":
            return [(_number(value, where) - self.mean) / self.deviation]
        given = _names(value, where, self.kind)
        for name in given:
            if name not in self.names:
                raise LineartimeError(f"{where} has the label {shown(name)}, which no text to train with has: leave it out.")
        return [float(self.names.index(given[0]))] if self.kind == "single" else [float(name in given) for name in self.names]

    def predicted(self, logits: NDArray[np.float64]) -> dict[str, Any]:
        """What a model says about a text, from logits [K]."""
        if self.kind == "numbers":
            return {"value": float(logits[0]) * self.deviation + self.mean}
        scores = np.exp(logits - np.logaddexp(0, logits) if self.kind == "multiple" else logits - np.logaddexp.reduce(logits))
        by_name = dict(zip(self.names, map(float, scores), strict=True))
        if self.kind == "single":
            return {"label": self.names[int(logits.argmax())], "scores": by_name}
        return {"labels": [name for name, score in by_name.items() if score > 0.5], "scores": by_name}


def find_labels(texts: Iterable[Labelled], kind: LabelKind | None) -> Labels:
    """The labels of texts to train with. If no kind is given, lists are several labels, and fractions are numbers."""
    given = [(each.label, each.where) for each in texts]
    if not given:
        raise LineartimeError("There is no text with a label to train with: give other data.")
    if kind is None:
        types = {type(_as_list(*each)) for each in given}
        kind = "multiple" if list in types else "numbers" if float in types else "single"
    if kind == "numbers":
        numbers = np.array([_number(*each) for each in given])
        return Labels(kind, (), float(numbers.mean()), float(numbers.std()) or 1.0)
    found = Counter(name for each in given for name in {*_names(*each, kind)})
    names = sorted(found, key=int if all(name.lstrip("-").isdecimal() for name in found) else str)
    if set(found.values()) == {len(given)}:
        raise LineartimeError(f"{given[0][1]} and all others have the labels {shown(names)}: give texts of at least two.")
    return Labels(kind, tuple(names))


def find_texts(data: Path, advanced: Advanced) -> tuple[Records[Labelled], Records[Labelled]]:
    """The texts to train with and to validate with. Of a folder, the names of files say which.

    Of a file, a fifth of each label, and of each tenth of the numbers by size, is held out, by a hash of the text.
    Raises ArgumentError for another path.
    """
    train, validation = split_files(data, RECORDS, "train.csv and validation.csv")
    columns = (advanced.text_column, advanced.pair_column, advanced.label_column)
    whole = Records(read_labelled, train, columns)
    if validation is not None:
        return whole, Records(read_labelled, validation, columns)
    kind, given = find_labels(whole, advanced.labels).kind, [(each.label, each.where) for each in whole]
    if kind == "numbers":
        ranks, parts = np.argsort(np.argsort([_number(*each) for each in given])), max(1, min(10, len(given) // 5))
        classes = [[str(rank * parts // len(given))] for rank in ranks]
    else:
        classes = [_names(*each, kind) for each in given]
    chosen = held_out((f"{each.text}\0{each.second}" for each in whole), classes)
    rest = frozenset(range(len(given))) - chosen
    return Records(read_labelled, train, columns, rest), Records(read_labelled, train, columns, chosen)


def _names(value: Any, where: str, kind: LabelKind) -> list[str]:
    """The label of a text, or several: a list, or, as in CSV, a text with commas between them."""
    found: Any = [value]
    if kind == "multiple":
        value = _as_list(value, where)
        found = [each.strip() for each in value.split(",") if each.strip()] if isinstance(value, str) else value
        if not isinstance(found, list):
            raise LineartimeError(f"{where} has {shown(value)} instead of a list of labels: correct it, or leave it out.")
        if len(found) > len(bits := {*map(str, found)}) and bits <= {"0", "1", "0.0", "1.0", "False", "True"}:
            raise LineartimeError(f"{where} has the vector {shown(value)}: give the names of the labels that are 1.")
    for each in found:
        if not isinstance(each, str | int) or each == "":
            raise LineartimeError(f"{where} has {shown(each)} instead of a label: correct it, or leave it out.")
    return [str(each) for each in found]


def _as_list(value: Any, where: str) -> Any:
    """The list that pandas wrote to CSV as a text, or the value. Raises LineartimeError for one of NumPy, without commas."""
    if not isinstance(value, str) or not re.fullmatch(r"\[.*\]", value, re.DOTALL):
        return value
    with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        if not re.search(r"""['"]\s+['"]""", value):  # which Python joins to one text
            return ast.literal_eval(value)
    raise LineartimeError(f"{where} has {shown(value)} instead of a list like ['a', 'b']: correct it, or leave it out.")


def _number(value: Any, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if number and not 1e-100 <= abs(number) <= 1e100:  # so that squares are finite, and not 0
        raise LineartimeError(f"{where} has {shown(value)} instead of 0 or a number from 1e-100 to 1e100 in size: correct it.")
    return number


class Labelling:
    """Texts to train with and to label, for one model and tokenizer.

    Raises LineartimeError if a file cannot be read, or there is nothing to train with.
    """

    peft_task = "SEQ_CLS"
    max_answer_tokens = None

    def __init__(self, config: FinetuneConfig, windows: Windows) -> None:
        train, validation = find_texts(config.data, config.advanced)
        self.labels = find_labels(train, config.advanced.labels)
        self.batch_size, self.metric = config.batch_size, _METRICS[self.labels.kind]
        self.keys = names_of(each.id for each in validation)
        if not self.keys:
            raise LineartimeError(f"{config.data} holds no text to validate with: give two of each label.")
        self.right = np.array([self.labels.target(each.label, each.where) for each in validation])
        options = {"windows": windows, "labels": self.labels}
        self.train, self.held_out = (
            on_disk(label_windows, {"texts": texts, **options}, ("first", "text"), {"labels": "float32"}, config.out)
            for texts in (train, validation)
        )
        self.predictions: dict[str, Any] = {}

    def head(self, config: LineartimeConfig) -> LineartimeForSequenceClassification:
        """A model with a new head for these labels."""
        labels = self.labels
        config.problem_type = _PROBLEMS[labels.kind]
        config.label_mean, config.label_deviation = labels.mean, labels.deviation  # in fp32, weights would lose their digits
        config.id2label = dict(enumerate(labels.names or ("value",)))
        config.label2id = {name: place for place, name in config.id2label.items()}
        return LineartimeForSequenceClassification(config)

    def describe(self) -> str:
        """What is trained with and labelled."""
        names = self.labels.names
        kind = f"{len(names):,} labels, {shown(names)}" if names else "numbers"
        return f"{len(self.train):,} windows to train with, {len(self.keys):,} texts to validate with; {kind}"

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """A batch of padded windows with their labels."""
        labels = torch.tensor([each["labels"] for each in rows])
        return {**padded(rows), "labels": labels[:, 0].long() if self.labels.kind == "single" else labels}

    def evaluate(self, model: LineartimeForSequenceClassification, bf16: bool = False) -> dict[str, float]:
        """Label the texts to validate with, and compare."""
        logits = mean_logits(model, self.held_out, len(self.keys), self.batch_size, bf16)
        found, right = (each * self.labels.deviation + self.labels.mean for each in (logits, self.right))
        self.predictions = {key: self.labels.predicted(each) for key, each in zip(self.keys, logits, strict=True)}
        return label_scores(found, right, self.labels.kind)


def label_windows(texts: Iterable[Labelled], windows: Windows, labels: Labels | None = None) -> Iterator[dict[str, Any]]:
    """All windows of texts, with the number of their text and, for texts to learn from, their targets."""
    for number, each in enumerate(texts):
        target = {} if labels is None else {"labels": labels.target(each.label, each.where)}
        for window in windows.of(each.text, each.second, each.where):
            first = window.type_ids.index(1) if 1 in window.type_ids else len(window.ids)
            yield {"input_ids": window.ids, "first": first, "text": number, **target}


def mean_logits(
    model: LineartimeForSequenceClassification, windows: Any, count: int, batch_size: int, bf16: bool = False
) -> NDArray[np.float64]:
    """The mean of the logits of all windows of each of `count` texts: [count, K]."""
    sums, read = np.zeros((count, model.config.num_labels)), np.zeros((count, 1))
    for rows, outputs in read_windows(model, windows, batch_size, bf16):
        texts = [row["text"] for row in rows]
        np.add.at(sums, texts, outputs.logits.float().cpu().numpy())
        np.add.at(read, texts, 1)
    mean: NDArray[np.float64] = sums / read
    return mean


def label_scores(logits: NDArray[np.float64], right: NDArray[np.float64], kind: LabelKind) -> dict[str, float]:
    """The metrics of predictions [texts, K] against targets, in percent but for the squared error.

    F1 of single labels is the mean over labels; that of several counts all decisions together, and `f1_macro` is their mean. A
    correlation that is not defined, because all predictions are equal, counts as 0.
    """
    if kind == "numbers":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of equal predictions
            spearman, pearson = (float(np.nan_to_num(of(logits[:, 0], right[:, 0])[0])) for of in (spearmanr, pearsonr))
        return {
            "spearman": 100 * spearman,
            "pearson": 100 * pearson,
            "squared_error": float(np.mean((logits - right) ** 2)),
        }
    f1 = partial(metrics.f1_score, zero_division=0.0)
    if kind == "multiple":
        found = logits > 0
        return {
            "f1": 100 * f1(right, found, average="micro"),
            "f1_macro": 100 * f1(right, found, average="macro"),
            "exact_match": 100 * metrics.accuracy_score(right, found),
        }
    found, right = logits.argmax(1), right[:, 0]
    return {
        "accuracy": 100 * metrics.accuracy_score(right, found),
        "f1": 100 * f1(right, found, average="macro"),
        "matthews": 100 * metrics.matthews_corrcoef(right, found),
    }
