"""Text from models: pieces, stop texts that no token border hides, several samples, and what is likely in a gap."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tokenizers
import torch

import lineartime
from lineartime import text_generation
from lineartime.data import ByteTokenizer, JsonTokenizer, Tokenizer
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.generation import Sampling, read_prompt
from lineartime.text_generation import Continuation, fill_mask, generate_samples, generate_text

Tiny = Callable[..., Any]
TEXT = "the café of 日本 is naïve, the café of 日本 is open"
BYTES = ByteTokenizer()
SEED = Sampling(temperature=1.0, seed=3)


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest, bpe: JsonTokenizer) -> Tokenizer:
    return BYTES if request.param == "bytes" else bpe


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[int]], None]:
    """`writes(ids)`: whatever the model, it draws these tokens."""

    def set_up(ids: Sequence[int]) -> None:
        def drawn_together(model: object, prompts: Sequence[object], max_tokens: int, *rest: Any) -> None:
            for text in range(len(prompts)):
                all(not rest[2](text, token) for token in ids[:max_tokens])

        monkeypatch.setattr(text_generation, "generate", lambda model, prompt, max_tokens, *_: iter(ids[:max_tokens]))
        monkeypatch.setattr(text_generation, "generate_batch", drawn_together)

    return set_up


@pytest.mark.parametrize("stop", ["fé o", "本 is", TEXT[:1], TEXT + "!"])
def test_stop_text_cuts_the_text_exactly_wherever_tokens_end(tokenizer: Any, writes: Any, stop: str, tiny: Tiny) -> None:
    ids = tokenizer.encode(TEXT).tolist()
    writes(ids)
    model = tiny(noise=0.3, vocab_size=tokenizer.vocab_size).eval()
    pieces = list(generate_text(model, tokenizer, "", 1000, stop=stop))
    assert "".join(pieces) == TEXT.split(stop)[0]
    assert all(pieces)
    (sample,) = generate_samples(model, tokenizer, "", 1, 1000, stop=[stop])
    assert sample.text == TEXT.split(stop)[0]
    assert sample.ended_by == ("stop" if stop in TEXT else "end_of_document")
    assert sample.tokens <= len(ids)


def test_of_several_stop_texts_the_first_to_be_complete_counts(tokenizer: Tokenizer, writes: Any, tiny: Tiny) -> None:
    writes(tokenizer.encode("xabcdx").tolist())
    model = tiny(noise=0.3, vocab_size=tokenizer.vocab_size).eval()
    for stop, expected in ((("abcd", "bc"), "xa"), (("bc", "abc"), "x"), (("abcd", "d"), "x"), (("zz", "bcx"), "xabcdx")):
        assert "".join(generate_text(model, tokenizer, "", 1000, stop=stop)) == expected, stop


def test_pieces_hold_no_part_of_a_stop_text(writes: Any, tiny: Tiny) -> None:
    for text, prompt, stop, pieces in (
        ("one\n\ntwo\n", "", "\n\n\n", ["o", "n", "e", "\n\nt", "w", "o", "\n"]),  # what may become a stop text waits
        ("\nand", "a line\n", "\n\n", ["\na", "n", "d"]),  # the prompt is not searched
    ):
        writes(list(text.encode()))
        assert list(generate_text(tiny().eval(), BYTES, prompt, 1000, stop=stop)) == pieces


@pytest.mark.parametrize("system", ["flash", "transformer++"])
def test_samples_repeat_with_their_seed_and_stop_each_by_itself(system: str, tokenizer: Tokenizer, tiny: Tiny) -> None:
    model = tiny(system, noise=0.3, vocab_size=tokenizer.vocab_size).eval()
    first, again = (generate_samples(model, tokenizer, "the ", 6, 20, SEED) for _ in range(2))
    assert first == again
    assert len({sample.text for sample in first}) > 1
    assert {(sample.tokens, sample.ended_by) for sample in first if sample.tokens == 20} == {(20, "max_tokens")}
    (alone,) = generate_samples(model, tokenizer, "the ", 1, 20, SEED)
    assert alone.text == "".join(generate_text(model, tokenizer, "the ", 20, SEED))
    stop = next(letter for letter in first[0].text[2:] if letter.isprintable())
    cut = generate_samples(model, tokenizer, "the ", 6, 20, SEED, stop=stop)
    assert cut[0] == Continuation(first[0].text.split(stop)[0], cut[0].tokens, "stop")
    assert all(stop not in sample.text for sample in cut)
    assert cut[0].tokens < first[0].tokens


def test_empty_prompt_begins_a_document(tokenizer: Tokenizer, tiny: Tiny) -> None:
    model = tiny(noise=0.3, vocab_size=tokenizer.vocab_size).eval()
    expected = lineartime.generate(model, [tokenizer.end_of_document], 9, SEED, tokenizer.end_of_document)
    assert "".join(generate_text(model, tokenizer, "", 9, SEED)) == tokenizer.decode(list(expected))


def test_what_cannot_be_continued_is_named_before_the_first_piece(bpe: JsonTokenizer, tiny: Tiny) -> None:
    model, tokenizer = tiny().eval(), BYTES
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


def test_candidates_have_the_probabilities_of_the_model_at_each_mask(tiny: Tiny) -> None:
    model = tiny(task="mlm", noise=0.3).eval()
    ids = [*b"the c", 257, *b"t ", 257, 257]
    expected = model(torch.tensor([ids]))[0].softmax(-1).detach()
    masks = fill_mask(model, BYTES, "the c[MASK]t [MASK][MASK]", top=258)
    assert len(masks) == 3
    for place, candidates in zip((5, 8, 9), masks, strict=True):
        probabilities = [candidate.probability for candidate in candidates]
        assert probabilities == sorted(probabilities, reverse=True)
        assert sum(probabilities) == pytest.approx(1, rel=1e-5)
        for candidate in candidates:
            assert candidate.probability == pytest.approx(float(expected[place, candidate.token]), rel=1e-5)
    words = {name: place for place, name in enumerate(["a", "b", "</s>", "[MASK]", "[CLS]", "[SEP]"])}
    definition = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a")).to_str()
    framed = JsonTokenizer(definition, "words")
    wide = tiny(task="mlm", noise=0.3, vocab_size=framed.vocab_size).eval()
    assert framed.frame is not None
    logits = wide(torch.tensor([[framed.frame[0], 1, framed.mask, framed.frame[1]]]))[0, 2]
    assert fill_mask(wide, framed, "b[MASK]", top=1)[0][0].token == int(logits.argmax())
    assert [len(candidates) for candidates in fill_mask(model, BYTES, "[MASK] and [MASK]", top=3)] == [3, 3]


def test_candidates_can_be_read_although_they_are_no_characters(bpe: JsonTokenizer, tiny: Tiny) -> None:
    (candidates,) = fill_mask(tiny(task="mlm", noise=0.3).eval(), BYTES, "[MASK]", top=258)
    shown = {candidate.token: candidate.text for candidate in candidates}
    assert (shown[ord("a")], shown[10], shown[0xC3], shown[0xA9]) == ("a", "\n", "\\xc3", "\\xa9")
    assert (shown[BYTES.mask], shown[BYTES.end_of_document]) == ("[MASK]", "[END]")
    assert len(set(shown.values())) == 258
    pieces = [("<unk>", 0.0), ("the", -1.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    fallback = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0, byte_fallback=True))
    fallback.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    for tokenizer in (bpe, JsonTokenizer(fallback.to_str(), "byte fallback")):
        texts = [tokenizer.show(token) for token in range(tokenizer.vocab_size)]
        assert {"the", "\\xc3", "[MASK]", "[END]"} <= set(texts)
        assert not any("\ufffd" in text or not text for text in texts)
        model = tiny(task="mlm", noise=0.3, vocab_size=tokenizer.vocab_size).eval()
        masks = fill_mask(model, tokenizer, "the [MASK]\u00e9[MASK]", top=2)
        assert all(candidate.text == texts[candidate.token] for candidates in masks for candidate in candidates)


def test_what_cannot_be_filled_is_named(tiny: Tiny) -> None:
    model = tiny(task="mlm", noise=0.3).eval()
    other = tiny(task="mlm", vocab_size=300).eval()
    wrong: list[tuple[Any, Any, Any, dict[str, int], str]] = [
        (model, BYTES, "the cat", {}, r"text is 'the cat', which holds no \[MASK\]: write \[MASK\] at each gap"),
        (model, BYTES, 3, {}, "text is of type int, but must be a text"),
        (model, BYTES, "[MASK]", {"top": 0}, "top is 0, but must be at least 1"),
        (other, BYTES, "[MASK]", {}, "tokenizer has 258 tokens, but the model's vocabulary has 300"),
        (tiny().eval(), BYTES, "[MASK]", {}, "model is a causal language model, which cannot"),
    ]
    for found, tokenizer, text, options, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            fill_mask(found, tokenizer, text, **options)
    short = tiny("transformer", "mlm", max_positions=10).eval()
    with pytest.raises(ArgumentError, match="text has 11 tokens, but this model reads at most 10: shorten it"):
        fill_mask(short, BYTES, "1234567890[MASK]")
    assert fill_mask(short, BYTES, "123456789[MASK]")
    torch.nn.init.constant_(model.backbone.embedding.weight, float("nan"))
    with pytest.raises(LineartimeError, match="logits of the model are not finite: its weights are damaged"):
        fill_mask(model, BYTES, "[MASK]")


@pytest.mark.parametrize(
    ("task", "use"),
    [
        ("clm", lambda model: read_prompt(model, [1, 2, 3]).logits.tolist()),
        ("mlm", lambda model: fill_mask(model, BYTES, "a[MASK]")),
    ],
)
def test_changed_weights_are_read_anew_in_an_autocast_of_the_caller(task: Any, use: Callable[..., Any], tiny: Tiny) -> None:
    model = tiny(task=task, noise=0.3).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = use(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-2)
        after = use(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert after == use(model) != before
