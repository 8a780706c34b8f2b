"""Answers or labels for a file of questions or texts, with a fine-tuned model."""

import json
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoTokenizer

from lineartime.choices import Device, Precision
from lineartime.errors import ArgumentError, reporting_file_errors
from lineartime.files import read_file, write_file
from lineartime.finetuning.answering import best_answers
from lineartime.finetuning.data import LabelledFile, names_of, read_questions
from lineartime.finetuning.labelling import Labels, label_windows, mean_logits
from lineartime.finetuning.tune import MODEL, RESULT, FinetuneResult
from lineartime.finetuning.windows import WindowEncoder
from lineartime.hf.convert import quietly
from lineartime.hf.tasks import LineartimeForQuestionAnswering, LineartimeForSequenceClassification
from lineartime.machine import choose_device, choose_precision

BLOCK = 64
"""The questions that are answered, or the texts that are labelled, and then written, at once."""
_SAID = ("answer", "label", "labels", "value")
Item = TypeVar("Item")


def predict(
    model: Path,
    inputs: Path,
    out: Path,
    *,
    resume: bool = False,
    batch_size: int = 16,
    device: Device = "auto",
    precision: Precision = "auto",
) -> int:
    """Answer the questions or label the texts of a file with the model of `finetune`.

    Args:
        model: the folder of the fine-tuning.
        inputs: questions, as `read_questions` reads them; or texts, in the columns that the model was trained with.
        out: a new file. JSON lines with id, answer and score, or with id, label and scores, are written while the file is read;
            if the name ends in .json, they become a single object by id, as the official scripts of SQuAD and TriviaQA read it.
        resume: whether to go on after the lines that a stopped call has written.
        batch_size: the number of windows that are read at once; answers do not depend on it.
        device: the device to compute on.
        precision: the precision of matrix products.

    Returns:
        The number of answers or labels.

    Raises:
        ArgumentError: for an `out` that exists, or a folder that holds no fine-tuned model.
        LineartimeError: if the file cannot be read.
    """
    lines = out.with_name(f"{out.name}l.partial") if out.suffix == ".json" else out
    if out.exists() and (not resume or lines != out):
        raise ArgumentError("out", f"is {out}, which exists already: delete it, or choose another file.")
    result = read_file(model / RESULT, FinetuneResult) if (model / RESULT).is_file() else None
    if result is None or result.best is None:
        what = f"is {model}, which holds no fine-tuned model: give the folder that `finetune()` wrote to its end."
        raise ArgumentError("run", what)
    predicted = _labels if result.max_answer_tokens is None else _answers
    place = choose_device(device)
    bf16 = choose_precision(precision, place) == "bf16"
    with reporting_file_errors("write", lines):
        count = _kept(lines) if resume else 0
        with lines.open("a" if resume else "w", encoding="utf-8") as file:
            for block in predicted(model / MODEL, result, inputs, count, batch_size, place, bf16):
                file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in block)
                file.flush()
                count += len(block)
    if lines != out:
        records = [json.loads(line) for line in lines.read_text("utf-8").splitlines()]
        said = [next(each[name] for name in _SAID if name in each) for each in records]
        shown = dict(zip(names_of(each["id"] for each in records), said, strict=True))
        write_file(out, json.dumps(shown, ensure_ascii=False, indent=1) + "\n")
        lines.unlink()
    return count


def _answers(
    model: Path, result: FinetuneResult, file: Path, done: int, batch_size: int, device: torch.device, bf16: bool
) -> Iterator[list[dict[str, Any]]]:
    """The answers to the questions of a file after the first `done`, in blocks."""
    loaded, encoder = _load(LineartimeForQuestionAnswering, model, result, device)
    assert result.max_answer_tokens is not None
    threshold = result.best_trial().metrics.get("null_threshold")
    # All documents of a question have its key, and are in one block.
    by_key = (list(group) for _, group in groupby(read_questions(file), lambda each: each.key))
    for groups in _blocks(by_key, done):
        block = [question for group in groups for question in group]
        found = best_answers(loaded, list(encoder.for_answering(block)), block, result.max_answer_tokens, batch_size, bf16)
        ids = {question.key: question.id for question in block}
        said = ((key, each.above(threshold), each.score if each.text else None) for key, each in found.items())
        yield [{"id": ids[key], "answer": answer, "score": score} for key, answer, score in said]


def _labels(
    model: Path, result: FinetuneResult, file: Path, done: int, batch_size: int, device: torch.device, bf16: bool
) -> Iterator[list[dict[str, Any]]]:
    """The labels of the texts of a file after the first `done`, in blocks."""
    loaded, encoder = _load(LineartimeForSequenceClassification, model, result, device)
    labels = Labels.of_model(loaded.config)
    columns = (result.config["text_column"], result.config["pair_column"], None)
    for block in _blocks(LabelledFile(file, columns), done):
        logits = mean_logits(loaded, list(label_windows(block, encoder)), len(block), batch_size, bf16)
        yield [{"id": text.id, **labels.predicted(each)} for text, each in zip(block, logits, strict=True)]


def _load(kind: Any, model: Path, result: FinetuneResult, device: torch.device) -> tuple[Any, WindowEncoder]:
    with quietly():
        loaded = kind.from_pretrained(model).to(device)
        tokenizer = AutoTokenizer.from_pretrained(model)
    return loaded, WindowEncoder.of(tokenizer, result.config["context_length"], result.config["stride"])


def _blocks(inputs: Iterable[Item], done: int) -> Iterator[list[Item]]:
    """The inputs in blocks, without those that are done."""
    rest = islice(inputs, done, None)
    while block := list(islice(rest, BLOCK)):
        yield block


def _kept(file: Path) -> int:
    """The number of answers in a file, from which a last line that was not written to its end is removed."""
    if not file.exists():
        return 0
    content = file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        file.write_bytes(whole)
    return whole.count(b"\n")
