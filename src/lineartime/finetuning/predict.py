"""Answering a file of questions with a fine-tuned model."""

import json
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from pathlib import Path

from transformers import AutoTokenizer

from lineartime.choices import Device, Precision
from lineartime.errors import ArgumentError, reporting_file_errors
from lineartime.files import write_file
from lineartime.finetuning.answering import best_answers
from lineartime.finetuning.questions import Question, read_questions
from lineartime.finetuning.tune import MODEL, RESULT, FinetuneResult
from lineartime.finetuning.windows import WindowEncoder
from lineartime.hf.convert import quietly
from lineartime.hf.tasks import LineartimeForQuestionAnswering
from lineartime.json_files import read_file
from lineartime.machine import choose_device, choose_precision

BLOCK = 64
"""The questions that are answered, and then written, at once."""


def predict(
    model: Path,
    questions: Path,
    out: Path,
    *,
    resume: bool = False,
    batch_size: int = 16,
    device: Device = "auto",
    precision: Precision = "auto",
    beams: int = 1,
) -> int:
    """Answer a file of questions with the model of a fine-tuning, or write the targets of sources with that of `seq2seq`.

    Args:
        model: the folder of the fine-tuning.
        questions: the file, as `read_questions` reads it; for targets, JSON lines with source and perhaps id.
        out: a new file. JSON lines with id, answer and score are written while questions are answered; if the name ends in
            .json, they become a single object of answers by id, as the official scripts of SQuAD and TriviaQA read it.
        resume: whether to go on after the answers that a stopped call has written.
        batch_size: the number of windows that are read at once; answers do not depend on it.
        device: the device to compute on.
        precision: the precision of matrix products.
        beams: the number of beams with which targets are written.

    Returns:
        The number of answers.

    Raises:
        ArgumentError: for a file of answers that exists, or a folder that holds no fine-tuned model.
        LineartimeError: if the questions cannot be read.
    """
    lines = out.with_name(f"{out.name}l.partial") if out.suffix == ".json" else out
    if out.exists() and (not resume or lines != out):
        raise ArgumentError("out", f"is {out}, which exists already: delete it, or choose another file.")
    if (model / "seq2seq.json").is_file():
        from lineartime.finetuning.seq2seq import predict_targets

        return predict_targets(model, questions, out, resume, batch_size, beams, device, precision)
    if not (model / MODEL).is_dir():
        raise ArgumentError("run", f"is {model}, which holds no fine-tuned model: give the folder that `finetune()` wrote.")
    result = read_file(model / RESULT, FinetuneResult)
    place = choose_device(device)
    with quietly():
        loaded = LineartimeForQuestionAnswering.from_pretrained(model / MODEL).to(place)
        tokenizer = AutoTokenizer.from_pretrained(model / MODEL)
    definition, names = tokenizer.backend_tokenizer.to_str(), (tokenizer.cls_token, tokenizer.sep_token)
    encoder = WindowEncoder(definition, *names, result.config["context_length"], result.config["stride"])
    bf16 = choose_precision(precision, place) == "bf16"
    threshold = result.config["null_threshold"] if result.metric == "squad_v2" else float("-inf")
    with reporting_file_errors("write", lines):
        count = kept(lines) if resume else 0
        with lines.open("a" if resume else "w", encoding="utf-8") as file:
            for block in _blocks(read_questions(questions), count):
                windows = list(encoder.for_answering(block))
                answers = best_answers(loaded, windows, block, result.max_answer_tokens, batch_size, bf16)
                for key, answer in answers.items():
                    text = answer.text if answer.score >= threshold else ""
                    file.write(json.dumps({"id": key, "answer": text, "score": answer.score}, ensure_ascii=False) + "\n")
                file.flush()
                count += len(answers)
    if lines != out:
        records = [json.loads(line) for line in lines.read_text("utf-8").splitlines()]
        write_file(out, json.dumps({each["id"]: each["answer"] for each in records}, ensure_ascii=False, indent=1) + "\n")
        lines.unlink()
    return count


def _blocks(questions: Iterable[Question], answered: int) -> Iterator[list[Question]]:
    """The questions in blocks, without the first keys; all documents of a question are in one block."""
    by_key = islice((list(group) for _, group in groupby(questions, lambda each: each.key)), answered, None)
    while groups := list(islice(by_key, BLOCK)):
        yield [question for group in groups for question in group]


def kept(file: Path) -> int:
    """The number of answers in a file, from which a last line that was not written to its end is removed."""
    if not file.exists():
        return 0
    content = file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        file.write_bytes(whole)
    return whole.count(b"\n")
