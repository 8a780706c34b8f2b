"""Evaluation: losses in windows and carried, their errors, and `evaluate` of runs, saved models and models in memory."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F

import lineartime
from lineartime.checkpoint import last_checkpoint
from lineartime.data import ByteTokenizer, JsonTokenizer, TokenStream, load_corpus, token_stream
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.evaluation import (
    Evaluation,
    PositionSums,
    difference,
    evaluate,
    evaluate_carried,
    evaluate_windowed,
    mean_over_rows,
)
from lineartime.inspection import inspect
from lineartime.models import CausalLM
from lineartime.ops.cross_entropy import IGNORED
from lineartime.training.config import TrainConfig

TOKENIZER = ByteTokenizer()
Tiny = Callable[..., Any]


def stream(length: int) -> TokenStream:
    tokens = np.random.default_rng(0).integers(0, 256, length).astype(np.uint16)
    return TokenStream("the test split of noise", tokens, length - 1)


@pytest.fixture
def model(tiny: Tiny) -> CausalLM:
    found: CausalLM = tiny(noise=0.1).eval()
    return found


def losses_by_hand(model: CausalLM, tokens: list[int]) -> list[float]:
    """The loss of each token after an end of document and all tokens before it."""
    ids = torch.tensor([[TOKENIZER.end_of_document, *tokens]])
    return F.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:], reduction="none").tolist()


def measure(model: CausalLM, source: TokenStream, length: int, stride: int, **options: int) -> Evaluation:
    return evaluate_windowed(
        model, source, TOKENIZER, context_length=length, stride=stride, bf16=False, **{"batch_size": 3, **options}
    )


def test_carried_context_is_one_forward_pass_over_everything(model: CausalLM) -> None:
    source = stream(50)
    expected = losses_by_hand(model, source.tokens.tolist())
    assert dataclasses.replace(measure(model, source, 8, 8), loss=1e4).perplexity == math.inf
    for segment in (1, 7, 50, 99):
        result = evaluate_carried(model, source, TOKENIZER, segment=segment, bf16=False)
        assert result.loss == pytest.approx(sum(expected) / 50, rel=1e-5)
        assert result.tokens == 50
        assert result.perplexity == pytest.approx(math.exp(result.loss))
        assert result.bits_per_byte == pytest.approx(sum(expected) / 49 / math.log(2), rel=1e-5)


def test_each_document_is_one_forward_pass_and_one_sample(model: CausalLM) -> None:
    tokens = stream(50).tokens[0:50].copy()
    ends = [9, 10, 40]  # documents of 10, 1, 30 and 9 tokens, of which the last one has no end
    tokens[ends] = TOKENIZER.end_of_document
    documents = [part.tolist() for part in np.split(tokens, [end + 1 for end in ends])]
    expected = [losses_by_hand(model, document) for document in documents]
    for segment in (1, 7, 99):
        source = TokenStream("the test split of noise", tokens, 47)
        result = evaluate_carried(model, source, TOKENIZER, segment=segment, bf16=False, documents=True)
        assert result.loss == pytest.approx(sum(map(sum, expected)) / 50, rel=1e-5)
        assert result.samples[:, 1].tolist() == [10, 1, 30, 9]
        assert result.by_position[0].loss == pytest.approx(sum(losses[0] for losses in expected) / 4, rel=1e-5)
        assert [(part.first, part.count) for part in result.by_position] == [(1, 4), (2, 6), (4, 12), (8, 13), (16, 15)]


@pytest.mark.parametrize(("length", "stride", "batch_size"), [(8, 8, 3), (8, 3, 1), (8, 1, 100), (200, 10, 3)])
def test_windows_predict_every_token_once(model: CausalLM, length: int, stride: int, batch_size: int) -> None:
    source = stream(50)
    tokens = [TOKENIZER.end_of_document, *source.tokens.tolist()]
    expected, contexts, start = {}, {}, 0
    while len(expected) < 50:
        ids = torch.tensor([tokens[start : start + min(length, 50 - start) + 1]])
        losses = F.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:], reduction="none").tolist()
        for offset, loss in enumerate(losses):
            if start + offset not in expected:
                expected[start + offset] = loss
                contexts[start + offset] = offset
        start += stride
    result = measure(model, source, length, stride, batch_size=batch_size)
    assert result.tokens == 50
    assert result.loss == pytest.approx(sum(expected.values()) / 50, rel=1e-5)
    edges = [(position.first, position.last) for position in result.by_position]
    assert [first for first, _ in edges] == [1 << place for place in range(len(edges))]
    assert edges[-1][1] == min(length, 50)  # also of 8 and 16 tokens: the last place alone would be noise
    for position in result.by_position:
        inside = [expected[i] for i, context in contexts.items() if position.first <= context + 1 <= position.last]
        assert position.count == len(inside)
        assert position.loss == pytest.approx(sum(inside) / len(inside), rel=1e-5)


def test_logits_of_all_tokens_are_never_held_at_once(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def results() -> list[Evaluation]:
        return [measure(model, stream(50), 8, 8), evaluate_carried(model, stream(50), TOKENIZER, segment=20, bf16=False)]

    whole, at_once, logits = results(), [], type(model).logits
    monkeypatch.setattr("lineartime.evaluation._LOGITS", 5 * TOKENIZER.vocab_size)
    monkeypatch.setattr(type(model), "logits", lambda self, hidden: at_once.append(len(hidden)) or logits(self, hidden))
    for result, expected in zip(results(), whole, strict=True):
        assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    assert max(at_once) == 5


def test_max_tokens_is_the_beginning_of_the_split(model: CausalLM) -> None:
    expected = losses_by_hand(model, stream(50).tokens[:20].tolist())
    result = evaluate_carried(model, stream(50), TOKENIZER, segment=8, bf16=False, max_tokens=20)
    assert result.tokens == 20
    assert result.loss == pytest.approx(sum(expected) / 20, rel=1e-5)
    assert measure(model, stream(50), 20, 20, max_tokens=20).loss == pytest.approx(result.loss, rel=1e-5)


def test_model_that_knows_nothing_has_a_perplexity_per_word_and_eight_bits_per_byte(model: CausalLM) -> None:
    with torch.no_grad():
        model.backbone.embedding.weight.zero_()  # every token costs log(258)
    words = TokenStream("the test split of noise", stream(60).tokens, 59, n_words=20)
    result = measure(model, words, 16, 16)
    assert result.loss == pytest.approx(math.log(258))
    assert result.bits_per_byte == pytest.approx(60 / 59 * math.log2(258))
    carried = evaluate_carried(model, words, TOKENIZER, segment=8, bf16=False)
    for each in (result, carried, measure(model, words, 16, 16, max_tokens=30)):
        assert each.word_perplexity == pytest.approx(258**3, rel=1e-4)
    few = TokenStream("the test split of noise", stream(400).tokens, 400, n_words=1)
    for source in (stream(60), few):  # without words, and with a number that no float holds
        assert measure(model, source, 16, 16).word_perplexity is None


def test_masked_model_is_measured_on_masked_tokens_alone(tiny: Tiny) -> None:
    model = tiny("flash", "mlm").eval()
    source = TokenStream("the test split of noise", stream(2000).tokens, 1999, n_words=100)
    results = [
        evaluate_windowed(model, source, TOKENIZER, context_length=50, stride=50, batch_size=batch_size, bf16=False)
        for batch_size in (8, 3)
    ]
    assert results[0].masked
    assert results[0].bits_per_byte is None
    assert results[0].word_perplexity is None
    assert 230 < results[0].tokens < 370  # 15% of 2000
    assert results[1].tokens == results[0].tokens  # what is masked does not depend on the batch size
    assert results[1].loss == pytest.approx(results[0].loss, rel=1e-5)
    with pytest.raises(LineartimeError, match="The model predicts no token of the test split of noise, so there is no loss"):
        evaluate_windowed(model, source, TOKENIZER, context_length=50, stride=50, batch_size=3, bf16=False, max_tokens=1)


@pytest.mark.parametrize("stride", [20, 48, 50])
def test_every_token_of_a_framed_text_may_be_masked(tiny: Tiny, stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 50 tokens hold 48 of the text. With all of them masked, each counts once."""
    words = {**{f"w{place}": place for place in range(256)}, "[MASK]": 256, "</s>": 257, "[CLS]": 258, "[SEP]": 259}
    framed = JsonTokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).to_str(), "words")
    model = tiny("flash", "mlm", vocab_size=260).eval()
    whole = lineartime.evaluation.evaluation_batch

    def all_masked(task: Any, windows: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        batch = whole(task, windows, *arguments, **options)
        assert batch.inputs.shape[1] == windows.shape[1] + 1 <= 50
        return batch._replace(targets=torch.where(batch.inputs < 258, 1, IGNORED))

    monkeypatch.setattr("lineartime.evaluation.evaluation_batch", all_masked)
    source = stream(2000)
    found = evaluate_windowed(model, source, framed, context_length=50, stride=stride, batch_size=4, bf16=False)
    assert found.tokens == 2000


def test_prefix_model_is_measured_on_what_follows_the_first_half_of_each_window(model: CausalLM) -> None:
    prefix = lineartime.build(model.config, "prefix-lm").eval()
    prefix.load_state_dict(model.state_dict())
    assert isinstance(prefix, CausalLM)
    source = stream(50)
    tokens = torch.tensor([TOKENIZER.end_of_document, *source.tokens.tolist()])
    expected = []
    for start in range(0, 50, 16):
        window = tokens[start : start + 17]
        half = (len(window) - 1) // 2
        logits = prefix(window[None, :-1], prefix_lengths=torch.tensor([half]))[0]
        expected += F.cross_entropy(logits, window[1:], reduction="none").tolist()[half - 1 :]
    result = measure(prefix, source, 16, 16)
    assert result.tokens == len(expected) == 3 * 9 + 2
    assert result.loss == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert result.bits_per_byte == pytest.approx(sum(expected) / round(49 * len(expected) / 50) / math.log(2), rel=1e-5)
    assert "the first half of each window is its prefix, read in both directions, and not counted" in result.context
    assert measure(prefix, source, 16, 4).tokens == 50 - 7  # every token behind the first half window


def test_wrong_arguments_are_named(tiny: Tiny, model: CausalLM) -> None:
    with pytest.raises(LineartimeError, match=r"^stride is 9, but must be from 1 to `context_length=8`"):
        measure(model, stream(20), 8, 9)
    with pytest.raises(LineartimeError, match="There is no text in the test split of noise"):
        measure(model, TokenStream("the test split of noise", np.zeros(0, np.uint16), 0), 8, 8)
    limited = tiny("flash-quad", max_length=10).eval()
    with pytest.raises(LineartimeError, match=r"There are 20 tokens in .*, but this model reads at most 10 in one sequence"):
        evaluate_carried(limited, stream(20), TOKENIZER, segment=8, bf16=False)
    with pytest.raises(LineartimeError, match=r"^context_length is 11, but this model reads at most 10 tokens"):
        measure(limited, stream(20), 11, 11)
    assert evaluate_carried(limited, stream(20), TOKENIZER, segment=8, bf16=False, max_tokens=10).tokens == 10


def add(sums: PositionSums, losses: torch.Tensor, counted: torch.Tensor | None = None, first: int = 1) -> None:
    before = torch.arange(first, first + losses.shape[1]).expand_as(losses)
    sums.add(losses, torch.ones_like(losses, dtype=torch.bool) if counted is None else counted, before)


def error_by_hand(losses: list[list[float]]) -> float:
    """Cochran's formula, row by row."""
    mean = sum(map(sum, losses)) / sum(map(len, losses))
    squares = sum((sum(row) - mean * len(row)) ** 2 for row in losses)
    return math.sqrt(squares * len(losses) / (len(losses) - 1)) / sum(map(len, losses))


def test_means_and_errors_are_those_of_the_counted_tokens() -> None:
    losses = torch.rand(5, 6, generator=torch.Generator().manual_seed(0))
    counted = torch.ones(5, 6, dtype=torch.bool)
    counted[0, 1:4] = counted[3] = False
    sums = PositionSums()
    add(sums, losses[:2], counted[:2])
    add(sums, losses[2:], counted[2:])
    mean = mean_over_rows(sums.samples())
    assert mean is not None
    rows = [losses[i][counted[i]].tolist() for i in (0, 1, 2, 4)]
    assert mean.tokens == sum(map(len, rows)) == 21
    assert mean.loss == pytest.approx(sum(map(sum, rows)) / 21, rel=1e-6)
    assert mean.error == pytest.approx(error_by_hand(rows), rel=1e-6)
    found = {(each.first, each.last): each for each in sums.by_position()}
    assert set(found) == {(1, 1), (2, 3), (4, 6)}
    middle = [losses[i, 1:3].tolist() for i in (1, 2, 4)]
    assert found[2, 3].count == 6
    assert found[2, 3].loss == pytest.approx(sum(map(sum, middle)) / 6, rel=1e-6)
    assert found[2, 3].error == pytest.approx(error_by_hand(middle), rel=1e-6)


def test_longest_row_of_a_power_of_two_joins_its_last_place_whatever_the_window() -> None:
    losses = torch.rand(3, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sums = PositionSums()
    add(sums, losses)
    last = list(sums.by_position())[-1]
    rows = losses[:, 7:].tolist()
    assert (last.first, last.last, last.count) == (8, 16, 27)
    assert last.error == pytest.approx(error_by_hand(rows), rel=1e-9)
    add(sums, losses[:, :1], first=17)  # a longer one: the place belongs to the next part again
    assert [(each.first, each.last) for each in sums.by_position()][-2:] == [(8, 15), (16, 17)]


def test_one_row_has_no_error_and_nothing_counted_has_no_mean() -> None:
    sums = PositionSums()
    add(sums, torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    assert mean_over_rows(sums.samples()) is None
    assert list(sums.by_position()) == []
    add(sums, torch.full((1, 300), 1.1, dtype=torch.float64))
    assert mean_over_rows(sums.samples()) == (pytest.approx(1.1), None, 300)
    add(sums, torch.full((1, 3), 1.1, dtype=torch.float64))  # beside the first row, nothing
    assert mean_over_rows(sums.samples()) == (pytest.approx(1.1), None, 303)


TOKENS = torch.tensor([8.0, 8.0, 8.0, 3.0], dtype=torch.float64)


def evaluation(losses: list[float]) -> Evaluation:
    """An evaluation of four windows with such mean losses; a token has two bytes."""
    sums = torch.tensor(losses, dtype=torch.float64) * TOKENS
    loss = float(sums.sum() / 27)
    bits = loss / 2 / math.log(2)
    return Evaluation("the text", "windows", loss, 27, False, bits, None, True, [], samples=torch.stack([sums, TOKENS], 1))


def test_error_is_that_of_the_differences_window_by_window() -> None:
    first, second = evaluation([1.0, 5.0, 3.0, 9.0]), evaluation([1.2, 5.1, 3.3, 9.2])
    found = difference(first, second)
    mean = (8 * 0.2 + 8 * 0.1 + 8 * 0.3 + 3 * 0.2) / 27
    squares = sum((n * (d - mean)) ** 2 for n, d in zip(TOKENS.tolist(), (0.2, 0.1, 0.3, 0.2), strict=True))
    error = math.sqrt(squares * 4 / 3) / 27
    assert found.loss == pytest.approx(mean)
    assert found.loss == pytest.approx(second.loss - first.loss)
    assert found.error == pytest.approx(error)
    assert difference(second, first).loss == pytest.approx(-mean)


def test_evaluations_of_other_tokens_are_not_compared() -> None:
    first = replace(evaluation([1.0, 2.0, 3.0, 4.0]), digest="abc")
    assert difference(first, replace(first, text="the same text by another path")).loss == 0
    wrong = {
        "is an evaluation with another text or tokenizer: ": replace(first, digest="def"),
        "is an evaluation with another task: ": replace(first, masked=True),
        "is an evaluation with another context: ": replace(first, context="carried"),
        "predicts other tokens than the first: ": replace(first, samples=torch.ones(2, 2, dtype=torch.float64)),
    }
    for message, second in wrong.items():
        with pytest.raises(ArgumentError, match=f"^second {message}"):
            difference(first, second)


def test_run_is_measured_on_its_own_text_as_by_hand(whole: Path) -> None:
    model = lineartime.load(whole)
    assert isinstance(model, CausalLM)
    cache = whole.parent / "cache"
    stream = token_stream(load_corpus(whole.parent / "text.txt"), "test", TOKENIZER, cache)
    by_windows = evaluate_windowed(model, stream, TOKENIZER, context_length=24, stride=24, batch_size=8, bf16=False)
    assert evaluate(str(whole), cache=str(cache), precision="fp32") == by_windows
    assert evaluate(whole, checkpoint="last", cache=cache).checkpoint == last_checkpoint(whole)
    assert by_windows.text == stream.name
    in_one = evaluate_carried(model, stream, TOKENIZER, segment=24, bf16=False, max_tokens=100)
    assert evaluate(whole, context="carried", max_tokens=100, cache=cache, precision="fp32").loss == pytest.approx(in_one.loss)
    each = evaluate(whole, context="documents", max_tokens=100, cache=cache, precision="fp32")  # there is only one
    assert each.loss == pytest.approx(in_one.loss)
    assert each.context == "documents, each from its first token to the last, 24 tokens read at a time"


def test_text_that_has_changed_since_training_is_told(config: Callable[..., TrainConfig], text: Path) -> None:
    run = lineartime.train(config(steps=1)).run

    def told() -> list[str]:
        said: list[str] = []
        evaluate(run, say=said.append, cache=run.parent / "cache")
        return [line for line in said if line.startswith("The held-out text has changed since the model was trained.")]

    assert told() == []
    before = text.read_text()
    text.write_text("another beginning\n" * 50 + before)
    assert len(told()) == 1
    text.write_text(before)
    assert told() == []


def test_part_of_a_split_is_measured_without_encoding_another(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []

    def recording(corpus: Any, split: Any, *arguments: Any) -> Any:
        encoded.append(split)
        return token_stream(corpus, split, *arguments)

    monkeypatch.setattr("lineartime.evaluation.token_stream", recording)
    evaluate(whole, max_tokens=50, say=lambda _: None, cache=tmp_path)
    assert encoded == ["test"]


def test_logits_that_are_not_finite_are_no_loss(whole: Path) -> None:
    model = lineartime.load(whole)
    with torch.no_grad():
        model.backbone.embedding.weight.fill_(1e30)
    given: dict[str, Any] = {"tokenizer": TOKENIZER, "context_length": 24, "cache": whole.parent / "cache", "precision": "fp32"}
    for context in ("windowed", "carried", "documents"):
        with pytest.raises(LineartimeError, match="The logits of the model are not finite"):
            evaluate(model, whole.parent / "text.txt", context=context, **given)
    with pytest.raises(LineartimeError, match="The logits of the model are not finite"):
        inspect(model, TOKENIZER, "the square")


def test_model_that_was_changed_and_saved_is_measured_as_it_was_in_memory(whole: Path, tmp_path: Path) -> None:
    model = lineartime.load(whole)
    with torch.no_grad():
        model.backbone.embedding.weight.mul_(0.5)
    given: dict[str, Any] = {"context_length": 24, "cache": whole.parent / "cache", "precision": "fp32", "split": "validation"}
    in_memory = evaluate(model, whole.parent / "text.txt", tokenizer=TOKENIZER, **given)
    saved = lineartime.save(model, TOKENIZER, tmp_path / "changed")
    assert evaluate(saved, whole.parent / "text.txt", **given) == in_memory != evaluate(whole, **given)
    missing = "is missing, but .*changed has no training.json, which records what the model was trained on: give "
    with pytest.raises(ArgumentError, match=f"data {missing}`data` and `context_length`"):
        evaluate(saved)
    with pytest.raises(ArgumentError, match=f"context_length {missing}`context_length`"):
        evaluate(saved, whole.parent / "text.txt")


def test_model_or_option_that_cannot_be_measured_is_named(whole: Path) -> None:
    model, text = lineartime.load(whole), whole.parent / "text.txt"
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
        (whole, {"context": "carried", "stride": 2}, "stride is for windows, but carried context has none"),
        (whole, {"split": "testing"}, "split is 'testing', but must be one of 'train'"),
        (whole, {"batch_size": 0}, "batch_size is 0, but must be at least 1"),
        (whole, {"data": ""}, "data is empty: give a text, or leave it out"),
        (whole, {"data": [3]}, r"data\[0\] is 3, but must be a text or a path"),
        (3, {}, "model is of type int, but must be a language model"),
    ]
    for found, options, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            evaluate(found, cache=whole.parent / "cache", **options)
    with pytest.raises(LineartimeError, match="does not exist: give the folder of a run"):
        evaluate("x" * 300)


def test_documents_are_kept_apart_only_if_asked_for_or_trained_so(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "the square of {i} is {i * i}."}}\n' for i in range(40)))
    given: dict[str, Any] = {"data": tmp_path / "text.jsonl", "cache": tmp_path / "cache", "precision": "fp32", "split": "all"}
    together, apart = (evaluate(whole, packed=packed, **given).loss for packed in (None, True))
    assert together == evaluate(whole, packed=False, **given).loss
    assert together != apart
    with pytest.raises(ArgumentError, match="packed is for windows, but carried context reads all documents as one sequence"):
        evaluate(whole, packed=True, context="carried", **given)
