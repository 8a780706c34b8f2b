"""Answers or labels for a file of questions or texts, with a fine-tuned model."""

import json
from collections.abc import Iterator
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from lineartime.choices import Device, Precision
from lineartime.errors import ArgumentError, LineartimeError, first_line, reporting_file_errors
from lineartime.files import TOKENIZER_FILE, DamagedFileError, is_there, read_file, read_plain, remove, write_file
from lineartime.finetuning.answering import best_answers, read_questions, windows_to_answer
from lineartime.finetuning.data import Windows, names_of
from lineartime.finetuning.labelling import Labels, label_windows, mean_logits, read_labelled
from lineartime.finetuning.tune import MODEL, RESULT, FinetuneResult, check_outputs, check_same, digest
from lineartime.hf.convert import WEIGHTS, quietly, read_config
from lineartime.hf.heads import LineartimeForQuestionAnswering, LineartimeForSequenceClassification
from lineartime.machine import choose_device, choose_precision, is_out_of_memory
from lineartime.runs.record import locked

BLOCK = 64
"""The questions that are answered, or the texts that are labelled, and then written, at once."""
BEGUN = "inputs.json"
"""What predictions are made from, in a folder beside their file that exists until all are made."""
_SAID = ("answer", "label", "labels", "value")


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
    """Answer the questions, as `read_questions` reads them, or label the texts of a file with the folder of a fine-tuning.

    JSON lines with id, answer and score, or with id, label and scores, are written into `out`, a new file, while the file is
    read. If its name ends in .json, they become a single object by id, as the official scripts of SQuAD and TriviaQA read it.
    With `resume`, a call goes on after the lines that a stopped one has written. Returns the number of answers or labels, which
    do not depend on the windows that are read at once, `batch_size`.

    Raises:
        ArgumentError: for an `out` that exists, or a folder that holds no fine-tuned model.
        LineartimeError: if the file cannot be read.
    """
    begun = out.with_name(f"{out.name}.partial")
    lines = begun / "lines.jsonl" if out.suffix == ".json" else out
    resume = resume and (begun / BEGUN).is_file()
    if is_there(out) and not (resume and lines == out):
        raise ArgumentError("out", f"is {out}, which exists already: delete it, or choose another file.")
    if not is_there(inputs):
        raise ArgumentError("file", f"is {inputs}, which does not exist: give a file of questions or texts.")
    result = read_file(model / RESULT, FinetuneResult) if (model / RESULT).is_file() else None
    if result is None or result.best is None:
        what = f"is {model}, which holds no fine-tuned model: give the folder that `lineartime finetune` wrote to its end."
        raise ArgumentError("run", what)
    place = choose_device(device)
    used = choose_precision(precision, place)
    with locked(begun):
        given = {"file": digest(inputs), "run": digest(model / MODEL), "precision": used}
        if resume:
            check_same(given, read_plain(begun / BEGUN), {"file": inputs, "run": model, "precision": used}, out)
        kept = lines.read_bytes() if resume and lines.exists() else b""
        kept = kept[: kept.rfind(b"\n") + 1]  # without a line that was not written to its end
        count = kept.count(b"\n")
        predicted = _predictions(model / MODEL, result, inputs, count, batch_size, place, used == "bf16")
        first = next(predicted, [])  # before anything is written
        write_file(begun / BEGUN, json.dumps(given) + "\n")
        with reporting_file_errors("write", lines), lines.open("ab") as file:
            file.truncate(len(kept))
            for block in chain([first], predicted):
                file.writelines(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in block)
                file.flush()
                count += len(block)
        if lines != out:
            records = [json.loads(line) for line in lines.read_bytes().splitlines()]
            said = [next(each[name] for name in _SAID if name in each) for each in records]
            shown = dict(zip(names_of(each["id"] for each in records), said, strict=True))
            write_file(out, json.dumps(shown, ensure_ascii=False, indent=1) + "\n")
        remove(begun)
    return count


def _predictions(
    folder: Path, result: FinetuneResult, file: Path, done: int, batch_size: int, device: torch.device, bf16: bool
) -> Iterator[list[dict[str, Any]]]:
    """The answers to the questions, or the labels of the texts, of a file after the first `done`, in blocks."""
    config, longest = result.config, result.max_answer_tokens
    assert result.best is not None
    threshold = result.trials[result.best].metrics.get("null_threshold")
    kind = LineartimeForSequenceClassification if longest is None else LineartimeForQuestionAnswering
    model, windows = _load(folder, kind, config, device)
    records: Any
    if longest is None:
        labels = Labels.of_model(model.config)
        records = ([each] for each in read_labelled(file, (config["text_column"], config["pair_column"], None)))
    else:  # all documents of a question have its key, and are in one block
        records = (list(group) for _, group in groupby(read_questions(file), lambda each: each.key))
    rest = islice(records, done, None)
    while block := [each for group in islice(rest, BLOCK) for each in group]:
        if longest is None:
            logits = mean_logits(model, list(label_windows(block, windows)), len(block), batch_size, bf16)
            yield [{"id": text.id, **labels.predicted(each)} for text, each in zip(block, logits, strict=True)]
        else:
            found = best_answers(model, list(windows_to_answer(block, windows)), block, longest, batch_size, bf16)
            ids = {question.key: question.id for question in block}
            said = ((key, each.above(threshold), each.score if each.text else None) for key, each in found.items())
            yield [{"id": ids[key], "answer": answer, "score": score} for key, answer, score in said]


def _load(folder: Path, kind: Any, config: dict[str, Any], device: torch.device) -> tuple[Any, Windows]:
    """The model and the windows that it reads. Raises LineartimeError, naming the file, for one that is missing or damaged."""
    read_config(folder)
    file = folder / TOKENIZER_FILE
    try:
        with quietly():
            windows = Windows(AutoTokenizer.from_pretrained(folder), config["context_length"], config["stride"])
            file = folder / WEIGHTS
            model, lacking = kind.from_pretrained(folder, output_loading_info=True)
            if names := sorted(map(str, chain(lacking["missing_keys"], lacking["mismatched_keys"]))):
                raise ValueError(f"{names[0]} is missing or has another shape")
    except Exception as error:
        if isinstance(error, LineartimeError) or is_out_of_memory(error):
            raise
        raise DamagedFileError(file, first_line(error)) from None
    model.register_forward_hook(check_outputs)
    return model.to(device), windows
