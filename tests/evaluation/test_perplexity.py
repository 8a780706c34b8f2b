import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F

import lineartime
from lineartime.data import ByteTokenizer, JsonTokenizer, TokenStream
from lineartime.errors import LineartimeError
from lineartime.evaluation import Evaluation, evaluate_carried, evaluate_windowed, perplexity
from lineartime.models import CausalLM
from lineartime.ops.cross_entropy import IGNORED

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
    monkeypatch.setattr("lineartime.evaluation.perplexity._LOGITS", 5 * TOKENIZER.vocab_size)
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
    whole = perplexity.evaluation_batch

    def all_masked(task: Any, windows: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        batch = whole(task, windows, *arguments, **options)
        assert batch.inputs.shape[1] == windows.shape[1] + 1 <= 50
        return batch._replace(targets=torch.where(batch.inputs < 258, 1, IGNORED))

    monkeypatch.setattr(perplexity, "evaluation_batch", all_masked)
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
