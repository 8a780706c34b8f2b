"""Text from models: pieces, stop texts that no token border hides, and several samples."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import lineartime
from lineartime import text_generation
from lineartime.data import ByteTokenizer, JsonTokenizer, Tokenizer
from lineartime.errors import ArgumentError
from lineartime.generation import Sampling
from lineartime.models import CausalLM
from lineartime.text_generation import Continuation, generate_samples, generate_text

TEXT = "the café of 日本 is naïve, the café of 日本 is open"
SEED = Sampling(temperature=1.0, seed=3)


def build(preset: str, tokenizer: Tokenizer) -> CausalLM:
    size = {"n_heads": 2} if preset.startswith("transformer") else {"d_qk": 8}
    model = lineartime.build(preset, d_model=16, n_blocks=1, vocab_size=tokenizer.vocab_size, **size).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest, bpe: JsonTokenizer) -> Tokenizer:
    return ByteTokenizer() if request.param == "bytes" else bpe


Writes = Callable[[Sequence[int]], None]


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    """`writes(ids)`: whatever the model, it draws these tokens."""

    def set_up(ids: Sequence[int]) -> None:
        def drawn(model: object, prompt: object, max_tokens: int, *_: object) -> Iterator[int]:
            return iter(list(ids)[:max_tokens])

        def drawn_together(model: object, prompts: Sequence[object], max_tokens: int, *rest: Any) -> None:
            _, _, ended, _ = rest
            for text in range(len(prompts)):
                all(not ended(text, token) for token in drawn(model, None, max_tokens))

        monkeypatch.setattr(text_generation, "generate", drawn)
        monkeypatch.setattr(text_generation, "generate_batch", drawn_together)

    return set_up


@pytest.mark.parametrize("stop", ["fé o", "本 is", TEXT[:1], TEXT + "!"])
def test_stop_text_cuts_the_text_exactly_wherever_tokens_end(tokenizer: Tokenizer, writes: Writes, stop: str) -> None:
    ids = tokenizer.encode(TEXT).tolist()
    writes(ids)
    model = build("flash-tiny", tokenizer)
    pieces = list(generate_text(model, tokenizer, "", 1000, stop=stop))
    assert "".join(pieces) == TEXT.split(stop)[0]
    assert all(pieces)
    (sample,) = generate_samples(model, tokenizer, "", 1, 1000, stop=[stop])
    assert sample.text == TEXT.split(stop)[0]
    assert sample.ended_by == ("stop" if stop in TEXT else "end_of_document")
    assert sample.tokens <= len(ids)


def test_of_several_stop_texts_the_first_to_be_complete_counts(tokenizer: Tokenizer, writes: Writes) -> None:
    writes(tokenizer.encode("xabcdx").tolist())
    model = build("flash-tiny", tokenizer)
    for stop, expected in ((("abcd", "bc"), "xa"), (("bc", "abc"), "x"), (("abcd", "d"), "x"), (("zz", "bcx"), "xabcdx")):
        assert "".join(generate_text(model, tokenizer, "", 1000, stop=stop)) == expected, stop


def test_no_piece_shows_what_may_become_a_stop_text(writes: Writes) -> None:
    tokenizer = ByteTokenizer()
    writes(list(b"one\n\ntwo\n"))
    pieces = list(generate_text(build("flash-tiny", tokenizer), tokenizer, "", 1000, stop="\n\n\n"))
    assert pieces == ["o", "n", "e", "\n\nt", "w", "o", "\n"]


def test_prompt_is_not_searched_for_stop_texts(writes: Writes) -> None:
    tokenizer = ByteTokenizer()
    writes(list(b"\nand on"))
    pieces = generate_text(build("flash-tiny", tokenizer), tokenizer, "a line\n", 1000, stop="\n\n")
    assert "".join(pieces) == "\nand on"


@pytest.mark.parametrize("preset", ["flash-tiny", "transformer++-tiny"])
def test_samples_are_as_many_as_asked_for_and_repeat_with_their_seed(preset: str, tokenizer: Tokenizer) -> None:
    model = build(preset, tokenizer)
    assert model.constant_state == (preset == "flash-tiny")
    first, again = (list(generate_samples(model, tokenizer, "the ", 4, 12, SEED)) for _ in range(2))
    assert first == again
    assert len({sample.text for sample in first}) > 1
    assert {(sample.tokens, sample.ended_by) for sample in first if sample.tokens == 12} == {(12, "max_tokens")}
    (alone,) = generate_samples(model, tokenizer, "the ", 1, 12, SEED)
    assert alone.text == "".join(generate_text(model, tokenizer, "the ", 12, SEED))


def test_samples_drawn_together_stop_each_by_itself(tokenizer: Tokenizer) -> None:
    model = build("flash-tiny", tokenizer)
    whole = list(generate_samples(model, tokenizer, "the ", 6, 20, SEED))
    stop = next(letter for letter in whole[0].text[2:] if letter.isprintable())
    cut = list(generate_samples(model, tokenizer, "the ", 6, 20, SEED, stop=stop))
    assert isinstance(cut[0], Continuation)
    assert cut[0].text == whole[0].text.split(stop)[0]
    assert all(stop not in sample.text for sample in cut)
    assert cut[0].ended_by == "stop"
    assert cut[0].tokens < whole[0].tokens


def test_empty_prompt_begins_a_document(tokenizer: Tokenizer) -> None:
    model = build("flash-tiny", tokenizer)
    expected = lineartime.generate(model, [tokenizer.end_of_document], 9, SEED, tokenizer.end_of_document)
    assert "".join(generate_text(model, tokenizer, "", 9, SEED)) == tokenizer.decode(list(expected))


def test_what_cannot_be_continued_is_named_before_the_first_piece(bpe: JsonTokenizer) -> None:
    tokenizer = ByteTokenizer()
    model = build("flash-tiny", tokenizer)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((model, bpe, "a", 1), {}, "tokenizer has [0-9]+ tokens, but the model's vocabulary has 258"),
        ((model, "bytes", "a", 1), {}, "tokenizer is of type str, but must be the tokenizer of the model"),
        ((model, tokenizer, [1, 2], 1), {}, "prompt is of type list, but must be a text"),
        ((model, tokenizer, "\udcff", 1), {}, "prompt is not UTF-8 text"),
        ((model, tokenizer, "a", 0), {}, "max_tokens is 0"),
        ((model, tokenizer, "a", 1), {"stop": ["b", 3]}, "stop holds 3, but must hold texts of at least one character"),
    ]
    for arguments, options, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            generate_text(*arguments, **options)
        with pytest.raises(ArgumentError, match=message):
            generate_samples(*arguments[:3], 2, *arguments[3:], **options)
    with pytest.raises(ArgumentError, match="samples is 0, but must be at least 1"):
        generate_samples(model, tokenizer, "a", 0, 1)
