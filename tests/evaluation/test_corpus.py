"""`evaluate`: a run, a saved model or a model in memory, on a text."""

from pathlib import Path
from typing import Any

import pytest
import torch

import lineartime
from lineartime.checkpoint import last_checkpoint, read_training_state
from lineartime.data import ByteTokenizer, load_corpus, token_stream
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.evaluation import evaluate, evaluate_carried, evaluate_windowed
from lineartime.inspection import inspect
from lineartime.models import CausalLM
from lineartime.training.config import TrainConfig

TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on `text.txt` beside it, with a cache."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "text.txt").write_text("".join(f"the square of {i} is {i * i}, and so on.\n" for i in range(300)))
    options: dict[str, Any] = {"data": folder / "text.txt", "cache": folder / "cache", "out": folder / "run"}
    size = {"d_model": 16, "n_blocks": 1, "d_qk": 8, "chunk_size": 8}
    lineartime.train(
        TrainConfig(override=size, context_length=24, batch_size=2, steps=2, eval_windows=2, precision="fp32", **options)  # type: ignore[arg-type]
    )
    return folder / "run"


def test_run_is_measured_on_its_own_text_as_by_hand(run: Path) -> None:
    model = lineartime.load(run)
    assert isinstance(model, CausalLM)
    cache = run.parent / "cache"
    stream = token_stream(load_corpus(run.parent / "text.txt"), "test", TOKENIZER, cache)
    by_windows = evaluate_windowed(model, stream, TOKENIZER, context_length=24, stride=24, batch_size=8, bf16=False)
    assert evaluate(str(run), cache=str(cache), precision="fp32") == by_windows
    assert evaluate(run, checkpoint="last", cache=cache).checkpoint == last_checkpoint(run)
    assert by_windows.text == stream.name
    in_one = evaluate_carried(model, stream, TOKENIZER, segment=24, bf16=False, max_tokens=100)
    assert evaluate(run, context="carried", max_tokens=100, cache=cache, precision="fp32").loss == pytest.approx(in_one.loss)
    each = evaluate(run, context="documents", max_tokens=100, cache=cache, precision="fp32")  # there is only one
    assert each.loss == pytest.approx(in_one.loss)
    assert each.context == "documents, each from its first token to the last, 24 tokens read at a time"


def test_text_that_has_changed_since_training_is_told(run: Path, tmp_path: Path) -> None:
    def told() -> list[str]:
        said: list[str] = []
        evaluate(run, say=said.append, cache=tmp_path / "cache")
        return [line for line in said if line.startswith("The held-out text has changed since the model was trained.")]

    assert told() == []
    file = Path(read_training_state(last_checkpoint(run)).config["data"])
    before = file.read_text()
    file.write_text("another beginning\n" * 50 + before)
    assert len(told()) == 1
    file.write_text(before)
    assert told() == []


def test_part_of_a_split_is_measured_without_encoding_another(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []

    def recording(corpus: Any, split: Any, *arguments: Any) -> Any:
        encoded.append(split)
        return token_stream(corpus, split, *arguments)

    monkeypatch.setattr("lineartime.evaluation.corpus.token_stream", recording)
    evaluate(run, max_tokens=50, say=lambda _: None, cache=tmp_path)
    assert encoded == ["test"]


def test_logits_that_are_not_finite_are_no_loss(run: Path) -> None:
    model = lineartime.load(run)
    with torch.no_grad():
        model.backbone.embedding.weight.fill_(1e30)
    given: dict[str, Any] = {"tokenizer": TOKENIZER, "context_length": 24, "cache": run.parent / "cache", "precision": "fp32"}
    for context in ("windowed", "carried", "documents"):
        with pytest.raises(LineartimeError, match="The logits of the model are not finite"):
            evaluate(model, run.parent / "text.txt", context=context, **given)
    with pytest.raises(LineartimeError, match="The logits of the model are not finite"):
        inspect(model, TOKENIZER, "the square")


def test_model_that_was_changed_and_saved_is_measured_as_it_was_in_memory(run: Path, tmp_path: Path) -> None:
    model = lineartime.load(run)
    with torch.no_grad():
        model.backbone.embedding.weight.mul_(0.5)
    given: dict[str, Any] = {"context_length": 24, "cache": run.parent / "cache", "precision": "fp32", "split": "validation"}
    in_memory = evaluate(model, run.parent / "text.txt", tokenizer=TOKENIZER, **given)
    saved = lineartime.save(model, TOKENIZER, tmp_path / "changed")
    assert evaluate(saved, run.parent / "text.txt", **given) == in_memory != evaluate(run, **given)
    with pytest.raises(ArgumentError, match=r"data is missing, but .* has no training.json, which records what the model"):
        evaluate(saved)
    with pytest.raises(ArgumentError, match=r"context_length is missing, but .*changed has no training.json"):
        evaluate(saved, run.parent / "text.txt")


def test_model_or_option_that_cannot_be_measured_is_named(run: Path) -> None:
    model, text = lineartime.load(run), run.parent / "text.txt"
    size = {"d_model": 16, "n_blocks": 1, "d_qk": 8}
    masked = lineartime.build("flash-tiny", "mlm", **size)
    prefix = lineartime.build("flash-tiny", "prefix-lm", **size).eval()
    by_hand: dict[str, Any] = {"data": text, "tokenizer": TOKENIZER, "context_length": 24}
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (
            model,
            {},
            "data is missing, but a model in memory does not record .*: give `data` and `context_length` and `tokenizer`",
        ),
        (model, {**by_hand, "device": "cpu"}, "device is cpu, but a model in memory is measured"),
        (model, {**by_hand, "checkpoint": "last"}, "checkpoint is last, but a model in memory has none: leave it out"),
        (lineartime.build("flash-tiny", dropout=0.5, **size), by_hand, "model is in training mode, in which dropout"),
        (masked, {**by_hand, "context": "carried"}, "context is carried, which needs a causal"),
        (prefix, {**by_hand, "context": "carried"}, "context is carried, but this model was trained to read a prefix"),
        (run, {"context": "carried", "stride": 2}, "stride is for windows, but carried context has none"),
        (run, {"split": "testing"}, "split is 'testing', but must be one of 'train'"),
        (run, {"batch_size": 0}, "batch_size is 0, but must be at least 1"),
        (run, {"data": ""}, "data is empty: give a text, or leave it out"),
        (run, {"data": [3]}, r"data\[0\] is 3, but must be a text or a path"),
        (3, {}, "model is of type int, but must be a language model"),
    ]
    for found, options, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            evaluate(found, cache=run.parent / "cache", **options)
    with pytest.raises(LineartimeError, match="does not exist: give the folder of a run"):
        evaluate("x" * 300)


def test_documents_are_kept_apart_only_if_asked_for_or_trained_so(run: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "the square of {i} is {i * i}."}}\n' for i in range(40)))
    given: dict[str, Any] = {"data": tmp_path / "text.jsonl", "cache": tmp_path / "cache", "precision": "fp32", "split": "all"}
    together, apart = (evaluate(run, packed=packed, **given).loss for packed in (None, True))
    assert together == evaluate(run, packed=False, **given).loss
    assert together != apart
    with pytest.raises(ArgumentError, match="packed is for windows, but carried context reads all documents as one sequence"):
        evaluate(run, packed=True, context="carried", **given)
