import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as arrow
import pytest
import torch
from pyarrow import csv, parquet
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from lineartime.errors import LineartimeError
from lineartime.finetuning import labelling
from lineartime.finetuning.config import Advanced, FinetuneConfig
from lineartime.finetuning.labelling import Labelled, Labels, find_labels, find_texts, label_scores, mean_logits
from lineartime.finetuning.predict import predict
from lineartime.finetuning.tune import finetune

Written = Callable[[list[dict[str, Any]], str], Path]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Writes records in the format that the name says."""

    def write(records: list[dict[str, Any]], name: str) -> Path:
        file = tmp_path / name
        if file.suffix == ".parquet":
            parquet.write_table(arrow.Table.from_pylist(records), file)
        elif file.suffix == ".csv":
            csv.write_csv(arrow.Table.from_pylist(records), file)
        else:
            file.write_text("".join(json.dumps(each) + "\n" for each in records))
        return file

    return write


def texts_of(count: int, label: Callable[[bool, bool], Any]) -> list[dict[str, Any]]:
    """Texts with or without x and y, half of which are longer than a window."""
    found = []
    for place in range(count):
        x, y = bool(place % 2), bool(place // 2 % 2)
        text = ("x" * 5 if x else "") + ("y" * 5 if y else "") + "abc" * (3 + place % 7)
        found.append({"text": text, "label": label(x, y)})
    return found


def fine_tuning(pretrained: Path, data: Path, **advanced: Any) -> FinetuneConfig:
    options = replace(Advanced(stride=4, dropout=0.0, precision="fp32"), **advanced)  # the same on every processor
    base = FinetuneConfig(pretrained, data, data.parent / "out", "classify", context_length=24)
    return replace(base, learning_rates=(2e-2,), epochs=8, batch_size=8, advanced=options)


@pytest.mark.parametrize(
    ("name", "label", "advanced", "metric", "said"),
    [
        ("a.csv", lambda x, y: "yes" if x else "no", {}, "accuracy", "label"),
        pytest.param("a.jsonl", lambda x, y: ["x"] * x + ["y"] * y, {}, "f1", "labels", marks=pytest.mark.nightly),
        pytest.param(
            *("a.parquet", lambda x, y: 1.7e9 + 10 * x + y, {"mixer": "flash-first-to-all"}, "spearman", "value"),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["single", "multiple", "numbers"],
)
def test_labels_are_learnt_and_predicted(
    pretrained: Path, written: Written, name: str, label: Any, advanced: dict[str, Any], metric: str, said: str
) -> None:
    records = texts_of(160, label)
    data = written(records, name)
    given = fine_tuning(pretrained, data, **advanced)
    result = finetune(given, lambda line: None)
    assert result.trials[0].metrics[metric] > 85
    out = data.with_suffix(".out.jsonl")
    assert predict(given.out, data, out, precision="fp32") == 160
    found = [json.loads(line) for line in out.read_text().splitlines()]
    held_out = json.loads((given.out / "predictions.json").read_text())
    for each in (each for each in found if each["id"] in held_out):
        mine = held_out[each["id"]]
        assert each[said] == (pytest.approx(mine[said], abs=1e-2) if said == "value" else mine[said])
    if said == "value":
        assert np.mean([abs(each["value"] - record["label"]) for each, record in zip(found, records, strict=True)]) < 10
        return
    model, tokenizer = (
        kind.from_pretrained(given.out / "model") for kind in (AutoModelForSequenceClassification, AutoTokenizer)
    )
    assert set(model.config.id2label.values()) == ({"yes", "no"} if said == "label" else {"x", "y"})
    if said == "label":  # another program reads the folder, too
        text = records[1]["text"][:20]
        assert pipeline("text-classification", model, tokenizer=tokenizer)(text)[0]["label"] == "yes"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
def test_pairs_are_read_together_and_predictions_do_not_depend_on_the_batch(pretrained: Path, written: Written) -> None:
    records = [
        {"a": "xy"[place % 2], "b": "xy"[place // 2 % 2] + "-" * (place % 40), "same": place % 4 in (0, 3)}
        for place in range(60)
    ]
    data = written(records, "a.jsonl")
    given = fine_tuning(pretrained, data, text_column="a", pair_column="b", label_column="same", lora_rank=2)
    finetune(replace(given, epochs=1), lambda line: None)
    outs = [data.with_name(f"{size}.jsonl") for size in (1, 7)]
    for size, out in zip((1, 7), outs, strict=True):
        predict(given.out, data, out, batch_size=size)
    for mine, other in zip(*([json.loads(line) for line in out.read_text().splitlines()] for out in outs), strict=True):
        assert mine["scores"] == pytest.approx(other["scores"], abs=1e-5)


@pytest.mark.parametrize("label", [lambda place: place % 12, lambda place: [str(place % 12), "all"], lambda place: place / 8])
def test_a_fifth_of_each_label_is_held_out_in_any_order(written: Written, tmp_path: Path, label: Callable[[int], Any]) -> None:
    records = [{"id": place, "text": str(place), "label": label(place)} for place in range(60)]
    parts: list[list[set[int]]] = []
    for order in (records, records[::-1]):
        parts.append([{int(each.id) for each in part} for part in find_texts(written(order, "a.jsonl"), Advanced())])
    held = parts[0][1]
    assert parts[0] == parts[1] == [set(range(60)) - held, held]
    assert isinstance(label(0), float) or {place % 12 for place in held} == set(range(12))
    assert 10 <= len(held) <= 16
    (tmp_path / "train.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "eval.jsonl").write_text("no record, and for neither training nor validation")
    assert {int(each.id) for each in find_texts(tmp_path, Advanced())[1]} == held


def labels_of(*given: Any) -> Labels:
    return find_labels([Labelled("", "", None, each, f"line {place}") for place, each in enumerate(given)], None)


def test_labels_are_read_as_they_were_written() -> None:
    """Lists that pandas wrote to CSV are lists; those of NumPy, vectors, and numbers that have no finite square are refused."""
    for given in (["['a', 'b, c']", "['a']", "[]"], [["a", "b, c"], ["a"], []], ["a", "a", "b, c"]):
        assert labels_of(*given).names == ("a", "b, c")
    for wrong, message in (
        ("['a' 'b']", r"^line 1 has .* instead of a list like \['a', 'b'\]"),
        ("[0, 1, 0]", r"^line 1 has the vector .*: give the names of the labels that are 1"),
        ([1.0, 0.0, 0.0], r"^line 1 has the vector"),
        ([1, 0], r"^line 0 and all others have the labels \['0', '1'\]"),
    ):
        with pytest.raises(LineartimeError, match=message):
            labels_of("[0, 1]", wrong)
    for number in (1e200, 1e-200, 10**400, "nan"):
        with pytest.raises(LineartimeError, match=r"^line 1 has .* instead of 0 or a number from 1e-100 to 1e100 in size"):
            labels_of(1.5, number)


def test_text_has_the_mean_of_its_windows_in_the_scale_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    read = [{"text": 0}, {"text": 1}, {"text": 0}], SimpleNamespace(logits=torch.tensor([[1.0], [5.0], [2.0]]))
    monkeypatch.setattr(labelling, "read_windows", lambda *_: [read])
    model: Any = SimpleNamespace(config=SimpleNamespace(num_labels=1))
    found = [Labels("numbers", (), 10.0, 2.0).predicted(each) for each in mean_logits(model, None, 2, 8)]
    assert found == [{"value": 13.0}, {"value": 20.0}]


def test_metrics_by_hand() -> None:
    one = label_scores(np.array([[1.0, 0], [1, 0], [0, 1], [0, 1]]), np.array([[0.0], [1], [1], [1]]), "single")
    assert one == pytest.approx({"accuracy": 75, "f1": 100 * (2 / 3 + 4 / 5) / 2, "matthews": 100 * 2 / 12**0.5})
    some = label_scores(np.array([[1.0, -1], [1, 1]]), np.array([[1.0, 0], [0, 1]]), "multiple")
    assert some == pytest.approx({"f1": 80, "f1_macro": 100 * (2 / 3 + 1) / 2, "exact_match": 50})
    assert label_scores(np.ones((3, 1)), np.array([[1.0], [2], [3]]), "numbers")["spearman"] == 0
    ranks = label_scores(np.array([[1.0], [2], [9]]), np.array([[1.0], [2], [3]]), "numbers")
    assert (ranks["spearman"], ranks["squared_error"]) == (pytest.approx(100), 12)


TWO = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}] * 4


@pytest.mark.parametrize(
    ("name", "records", "advanced", "message"),
    [
        ("a.csv", TWO, {"label_column": "lable"}, r"^label_column is lable, but .*a.csv, line 2, has the columns text, label"),
        ("a.jsonl", [*TWO, {"text": 3, "label": "x"}], {}, r"a.jsonl, line 9, has 3 instead of a text: correct it"),
        ("a.jsonl", [*TWO, {"text": "c", "label": None}], {}, r"a.jsonl, line 9, has None instead of a label"),
        ("a.csv", TWO, {"labels": "numbers"}, r"a.csv, line 2, has 'x' instead of 0 or a number"),
        ("a.jsonl", TWO[:1] * 8, {}, r"a.jsonl, line 1, and all others have the labels \['x'\]"),
        ("a.txt", TWO, {}, r"^data is .*a.txt, but must be a file of records: .jsonl, .ndjson, .json, .parquet"),
    ],
)
def test_wrong_data_is_named_and_leaves_nothing(
    pretrained: Path, written: Written, name: str, records: list[dict[str, Any]], advanced: dict[str, Any], message: str
) -> None:
    given = fine_tuning(pretrained, written(records, name), **advanced)
    with pytest.raises(LineartimeError, match=message):
        finetune(given, lambda line: None)
    assert not given.out.exists() or not any(given.out.iterdir())
