"""Labels of texts: one or several of a set, or a number; the windows to learn from, the prediction of each text, its metrics.

A text longer than a window is read in several. Each of them is trained with the text's label, and the prediction is the mean of
their logits.

Shapes: K labels.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lineartime.errors import LineartimeError
from lineartime.fields import shown
from lineartime.finetuning.config import FinetuneConfig, LabelKind
from lineartime.finetuning.data import Labelled, find_texts
from lineartime.finetuning.windows import WINDOWS, WindowEncoder, dataset_of, padded, read_windows
from lineartime.hf.config import LineartimeConfig
from lineartime.hf.tasks import LineartimeForSequenceClassification

_PROBLEMS: dict[LabelKind, str] = {
    "single": "single_label_classification",
    "multiple": "multi_label_classification",
    "numbers": "regression",
}
_METRICS = {"single": "accuracy", "multiple": "f1", "numbers": "spearman"}
"""By which the best model is chosen."""
_NUMBER, _NUMBERS = datasets.Value("int32"), datasets.Sequence(datasets.Value("int32"))
_LABELLED = datasets.Features(
    {"input_ids": _NUMBERS, "first": _NUMBER, "text": _NUMBER, "labels": datasets.Sequence(datasets.Value("float32"))}
)


@dataclass(frozen=True)
class Labels:
    """What the labels of a data set are.

    Attributes:
        kind: one for each text, several, or a number.
        names: the labels; none for numbers.
        mean, deviation: of numbers; the head learns numbers with mean 0 and deviation 1.
    """

    kind: LabelKind
    names: tuple[str, ...] = ()
    mean: float = 0.0
    deviation: float = 1.0

    @classmethod
    def of_model(cls, config: LineartimeConfig) -> "Labels":
        """The labels of a fine-tuned model, whose numbers are as in the data."""
        kind = next(kind for kind, problem in _PROBLEMS.items() if problem == config.problem_type)
        return cls(kind, () if kind == "numbers" else tuple(config.id2label[place] for place in range(config.num_labels)))

    def target(self, value: Any, where: str) -> list[float]:
        """What the head learns for a label: [1] or [K]. Raises LineartimeError for one that is none of the names."""
        if self.kind == "numbers":
            return [(_number(value, where) - self.mean) / self.deviation]
        given = _several(value, where) if self.kind == "multiple" else [_single(value, where)]
        for name in given:
            if name not in self.names:
                raise LineartimeError(f"{where} has the label {shown(name)}, which no text to train with has: leave it out.")
        places = [self.names.index(name) for name in given]
        return [float(places[0])] if self.kind == "single" else [float(each in places) for each in range(len(self.names))]

    def predicted(self, logits: NDArray[np.float64]) -> dict[str, Any]:
        """What a model says about a text, from logits [K]."""
        if self.kind == "numbers":
            return {"value": float(logits[0])}
        scores = np.exp(logits - np.logaddexp(0, logits) if self.kind == "multiple" else logits - np.logaddexp.reduce(logits))
        by_name = dict(zip(self.names, map(float, scores), strict=True))
        if self.kind == "single":
            return {"label": self.names[int(logits.argmax())], "scores": by_name}
        return {"labels": [name for name, score in by_name.items() if score > 0.5], "scores": by_name}


def find_labels(texts: Iterable[Labelled], kind: LabelKind | None) -> Labels:
    """The labels of texts to train with. If no kind is given, lists are several labels, and fractions are numbers."""
    given = [(each.label, each.where) for each in texts]
    if kind is None:
        types = {type(label) for label, _ in given}
        kind = "multiple" if list in types else "numbers" if float in types else "single"
    if kind == "numbers":
        numbers = np.array([_number(*each) for each in given])
        return Labels(kind, (), float(numbers.mean()), float(numbers.std()) or 1.0)
    several = [_several(*each) if kind == "multiple" else [_single(*each)] for each in given]
    names = {name for each in several for name in each}
    numeric = all(name.lstrip("-").isdecimal() for name in names)
    return Labels(kind, tuple(sorted(names, key=int if numeric else str)))


def _single(value: Any, where: str) -> str:
    if not isinstance(value, str | int) or value == "":
        raise LineartimeError(f"{where} has {shown(value)} instead of a label: correct it, or leave it out.")
    return str(value)


def _several(value: Any, where: str) -> list[str]:
    """The labels of a text: a list, or, as in CSV, a text with commas between them."""
    found = [each.strip() for each in value.split(",") if each.strip()] if isinstance(value, str) else value
    if not isinstance(found, list):
        raise LineartimeError(f"{where} has {shown(value)} instead of a list of labels: correct it, or leave it out.")
    return [_single(each, where) for each in found]


def _number(value: Any, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not np.isfinite(number):
        raise LineartimeError(f"{where} has {shown(value)} instead of a number: correct it, or leave it out.")
    return number


class Labelling:
    """Texts to train with and to label, for one model and tokenizer.

    Raises LineartimeError if a file cannot be read, or there is nothing to train with.
    """

    peft_task = "SEQ_CLS"

    def __init__(self, config: FinetuneConfig, encoder: WindowEncoder) -> None:
        files = find_texts(config.data, config.advanced)
        self.labels = find_labels(files["train"], config.advanced.labels)
        if self.labels.kind != "numbers" and len(self.labels.names) < 2:
            raise LineartimeError(f"{files['train'].file} holds texts of one label alone: give texts of at least two.")
        self.batch_size, self.metric = config.batch_size, _METRICS[self.labels.kind]
        self.keys = [each.key for each in files["validation"]]
        self.right = np.array([self.labels.target(each.label, each.where) for each in files["validation"]])
        options, cache = {"encoder": encoder, "labels": self.labels}, config.out / WINDOWS
        self.train, self.held_out = (
            dataset_of(label_windows, {"texts": files[split], **options}, _LABELLED, cache) for split in ("train", "validation")
        )
        self.predictions: dict[str, Any] = {}

    def head(self, config: LineartimeConfig) -> LineartimeForSequenceClassification:
        """A model with a new head for these labels."""
        labels = self.labels
        config.problem_type = _PROBLEMS[labels.kind]
        config.id2label = dict(enumerate(labels.names or ("value",)))
        config.label2id = {name: place for place, name in config.id2label.items()}
        return LineartimeForSequenceClassification(config)

    def describe(self) -> str:
        """What is trained with and labelled."""
        names = ", ".join(self.labels.names[:5]) + (", ..." if len(self.labels.names) > 5 else "")
        kind = "numbers" if self.labels.kind == "numbers" else f"{len(self.labels.names):,} labels ({names})"
        return f"{len(self.train):,} windows to train with, {len(self.keys):,} texts to validate with; {kind}"

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """A batch of padded windows with their labels."""
        labels = torch.tensor([each["labels"] for each in rows])
        return {**padded(rows), "labels": labels[:, 0].long() if self.labels.kind == "single" else labels}

    def evaluate(self, model: LineartimeForSequenceClassification, bf16: bool = False) -> dict[str, float]:
        """Label the texts to validate with, and compare."""
        logits = mean_logits(model, self.held_out, len(self.keys), self.batch_size, bf16)
        labels = self.labels
        found, right = (each * labels.deviation + labels.mean for each in (logits, self.right))
        self.predictions = {key: labels.predicted(each) for key, each in zip(self.keys, found, strict=True)}
        return label_scores(found, right, labels.kind)

    def unscale(self, model: LineartimeForSequenceClassification) -> None:
        """Let the head give numbers as they are in the data."""
        with torch.no_grad():
            model.score.weight *= self.labels.deviation
            model.score.bias *= self.labels.deviation
            model.score.bias += self.labels.mean


def label_windows(texts: Iterable[Labelled], encoder: WindowEncoder, labels: Labels | None = None) -> Iterator[dict[str, Any]]:
    """All windows of texts, with the number of their text and, for texts to learn from, their targets."""
    for number, each in enumerate(texts):
        target = {} if labels is None else {"labels": labels.target(each.label, each.where)}
        for window in encoder.encodings(each.text, each.second, each.where):
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
    from scipy.stats import pearsonr, spearmanr
    from sklearn import metrics

    if kind == "numbers":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of equal predictions
            both = [np.nan_to_num(of(logits[:, 0], right[:, 0])[0]) for of in (spearmanr, pearsonr)]
        error = float(np.mean((logits - right) ** 2))
        return {"spearman": 100 * float(both[0]), "pearson": 100 * float(both[1]), "squared_error": error}
    if kind == "multiple":
        found = logits > 0
        micro, macro = (metrics.f1_score(right, found, average=each, zero_division=0.0) for each in ("micro", "macro"))
        return {"f1": 100 * micro, "f1_macro": 100 * macro, "exact_match": 100 * metrics.accuracy_score(right, found)}
    found, right = logits.argmax(1), right[:, 0]
    return {
        "accuracy": 100 * metrics.accuracy_score(right, found),
        "f1": 100 * metrics.f1_score(right, found, average="macro", zero_division=0.0),
        "matthews": 100 * metrics.matthews_corrcoef(right, found),
    }
