"""Answers or labels for a file of questions or texts, with a fine-tuned model."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoTokenizer

from lineartime.choices import Device, Precision
from lineartime.errors import LineartimeError, first_line, reporting_file_errors
from lineartime.files import TOKENIZER_FILE, DamagedFileError, parse, read_plain, remove, write_file
from lineartime.finetuning.answering import best_answers
from lineartime.finetuning.data import LabelledFile, names_of, read_questions
from lineartime.finetuning.folder import BEGUN, MODEL, FinetuneResult, begun_folder, check_prediction, check_same, digest
from lineartime.finetuning.labelling import Labels, label_windows, mean_logits
from lineartime.finetuning.tune import check_outputs
from lineartime.finetuning.windows import WindowEncoder
from lineartime.hf.convert import CONFIG, WEIGHTS, quietly, read_config
from lineartime.hf.tasks import LineartimeForQuestionAnswering, LineartimeForSequenceClassification
from lineartime.machine import choose_device, choose_precision, is_out_of_memory
from lineartime.runs.record import locked

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
    result = check_prediction(model, inputs, out, resume)
    place = choose_device(device)
    bf16 = choose_precision(precision, place) == "bf16"
    begun = begun_folder(out)
    lines = begun / "lines.jsonl" if out.suffix == ".json" else out
    with locked(begun):
        given = {"file": digest(inputs), "run": digest(model / MODEL), "precision": "bf16" if bf16 else "fp32"}
        resume = resume and (begun / BEGUN).is_file()
        count = _kept(lines) if resume else 0
        if resume:
            paths = {"file": inputs, "run": model, "precision": given["precision"]}
            check_same(given, read_plain(begun / BEGUN), paths, out)
        kind = LineartimeForSequenceClassification if result.max_answer_tokens is None else LineartimeForQuestionAnswering
        loaded, encoder = _load(kind, model / MODEL, result, place)
        predicted = (_labels if result.max_answer_tokens is None else _answers)(
            loaded, encoder, result, inputs, count, batch_size, bf16
        )
        first = next(predicted, [])  # before anything is written
        write_file(begun / BEGUN, json.dumps(given) + "\n")
        with reporting_file_errors("write", lines):
            file = lines.open("a" if resume else "w", encoding="utf-8")
        with file:
            for block in chain([first], predicted):
                with reporting_file_errors("write", lines):
                    file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in block)
                    file.flush()
                count += len(block)
        if lines != out:
            records = [json.loads(line) for line in lines.read_bytes().splitlines()]
            said = [next(each[name] for name in _SAID if name in each) for each in records]
            shown = dict(zip(names_of(each["id"] for each in records), said, strict=True))
            write_file(out, json.dumps(shown, ensure_ascii=False, indent=1) + "\n")
        remove(begun)
    return count


def _answers(
    model: Any, encoder: WindowEncoder, result: FinetuneResult, file: Path, done: int, batch_size: int, bf16: bool
) -> Iterator[list[dict[str, Any]]]:
    """The answers to the questions of a file after the first `done`, in blocks."""
    assert result.max_answer_tokens is not None
    longest, threshold = result.max_answer_tokens, result.best_trial().metrics.get("null_threshold")
    # All documents of a question have its key, and are in one block.
    by_key = (list(group) for _, group in groupby(read_questions(file), lambda each: each.key))
    for groups in _blocks(by_key, done):
        block = [question for group in groups for question in group]
        found = best_answers(model, list(encoder.for_answering(block)), block, longest, batch_size, bf16)
        ids = {question.key: question.id for question in block}
        said = ((key, each.above(threshold), each.score if each.text else None) for key, each in found.items())
        yield [{"id": ids[key], "answer": answer, "score": score} for key, answer, score in said]


def _labels(
    model: Any, encoder: WindowEncoder, result: FinetuneResult, file: Path, done: int, batch_size: int, bf16: bool
) -> Iterator[list[dict[str, Any]]]:
    """The labels of the texts of a file after the first `done`, in blocks."""
    labels = Labels.of_model(model.config)
    columns = (result.config["text_column"], result.config["pair_column"], None)
    for block in _blocks(LabelledFile(file, columns), done):
        logits = mean_logits(model, list(label_windows(block, encoder)), len(block), batch_size, bf16)
        yield [{"id": text.id, **labels.predicted(each)} for text, each in zip(block, logits, strict=True)]


def _load(kind: Any, model: Path, result: FinetuneResult, device: torch.device) -> tuple[Any, WindowEncoder]:
    """The model and the windows that it reads. Raises LineartimeError, naming the file, for one that is missing or damaged."""
    read_config(model)
    with _naming(model / TOKENIZER_FILE):
        tokenizer = AutoTokenizer.from_pretrained(model)
        encoder = WindowEncoder.of(tokenizer, result.config["context_length"], result.config["stride"])
    with _naming(model / WEIGHTS):
        loaded, lacking = kind.from_pretrained(model, output_loading_info=True)
        if names := sorted(map(str, chain(lacking["missing_keys"], lacking["mismatched_keys"]))):
            raise ValueError(f"{names[0]} is missing or has another shape")
    if kind is LineartimeForSequenceClassification:
        with _naming(model / CONFIG):
            Labels.of_model(loaded.config)
    loaded.register_forward_hook(check_outputs)
    return loaded.to(device), encoder


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Turn what other libraries raise for a damaged file into an error that names it."""
    try:
        with quietly():
            yield
    except Exception as error:
        if isinstance(error, LineartimeError) or is_out_of_memory(error):
            raise
        raise DamagedFileError(file, first_line(error)) from None


def _blocks(inputs: Iterable[Item], done: int) -> Iterator[list[Item]]:
    """The inputs in blocks, without those that are done."""
    rest = islice(inputs, done, None)
    while block := list(islice(rest, BLOCK)):
        yield block


def _kept(file: Path) -> int:
    """The number of predictions in a file, from which a last line that was not written to its end is removed.

    Raises LineartimeError for a line that is no prediction.
    """
    if not file.exists():
        return 0
    content = file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            parse(line)["id"]
        except (ValueError, TypeError, KeyError):
            raise DamagedFileError(file, f"line {number:,} is no prediction", "delete it, and begin anew") from None
    if len(whole) < len(content):
        file.write_bytes(whole)
    return whole.count(b"\n")
