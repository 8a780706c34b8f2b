"""What a masked model expects at the gaps of a text."""

from typing import Any

import pytest
import tokenizers
import torch

import lineartime
from lineartime.data import ByteTokenizer, JsonTokenizer
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.filling import fill_mask
from lineartime.models import MaskedLM

TOKENIZER = ByteTokenizer()


def build(preset: str = "flash-tiny", vocab_size: int = 258, **options: Any) -> MaskedLM:
    options = {"d_qk": 8, "chunk_size": 8} if preset == "flash-tiny" else options
    model = lineartime.build(preset, "mlm", d_model=16, n_blocks=1, vocab_size=vocab_size, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def tokenizer_with(*special: str) -> str:
    """The definition of a tokenizer of the words a and b, an end of document, a mask and more special tokens."""
    names = ["a", "b", "</s>", "[MASK]", *special]
    words = {name: place for place, name in enumerate(names)}
    return str(tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a")).to_str())


def test_candidates_have_the_probabilities_of_the_model_at_each_mask() -> None:
    model = build()
    ids = [*b"the c", 257, *b"t ", 257, 257]
    expected = model(torch.tensor([ids]))[0].softmax(-1).detach()
    masks = fill_mask(model, TOKENIZER, "the c[MASK]t [MASK][MASK]", top=258)
    assert len(masks) == 3
    for place, candidates in zip((5, 8, 9), masks, strict=True):
        probabilities = [candidate.probability for candidate in candidates]
        assert probabilities == sorted(probabilities, reverse=True)
        assert sum(probabilities) == pytest.approx(1, rel=1e-5)
        for candidate in candidates:
            assert candidate.probability == pytest.approx(float(expected[place, candidate.token]), rel=1e-5)
    framed = JsonTokenizer(tokenizer_with("[CLS]", "[SEP]"), "words")
    wide = build(vocab_size=framed.vocab_size)
    assert framed.frame is not None
    logits = wide(torch.tensor([[framed.frame[0], 1, framed.mask, framed.frame[1]]]))[0, 2]
    assert fill_mask(wide, framed, "b[MASK]", top=1)[0][0].token == int(logits.argmax())
    assert [len(candidates) for candidates in fill_mask(model, TOKENIZER, "[MASK] and [MASK]", top=3)] == [3, 3]


def test_bytes_that_are_no_character_can_be_read() -> None:
    shown = {candidate.token: candidate.text for candidate in fill_mask(build(), TOKENIZER, "[MASK]", top=258)[0]}
    assert (shown[ord("a")], shown[10], shown[0xC3], shown[0xA9]) == ("a", "\n", "\\xc3", "\\xa9")
    assert (shown[TOKENIZER.mask], shown[TOKENIZER.end_of_document]) == ("[MASK]", "[END]")
    assert len(set(shown.values())) == 258


def test_pieces_of_other_tokenizers_can_be_read_too(bpe: JsonTokenizer) -> None:
    from tokenizers import Tokenizer, decoders, models

    pieces = [("<unk>", 0.0), ("the", -1.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    fallback = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    fallback.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    for tokenizer in (bpe, JsonTokenizer(fallback.to_str(), "byte fallback")):
        texts = [tokenizer.show(token) for token in range(tokenizer.vocab_size)]
        assert {"the", "\\xc3", "[MASK]", "[END]"} <= set(texts)
        assert not any("\ufffd" in text or not text for text in texts)
        masks = fill_mask(build(vocab_size=tokenizer.vocab_size), tokenizer, "the [MASK]\u00e9[MASK]", top=2)
        assert all(candidate.text == texts[candidate.token] for candidates in masks for candidate in candidates)


def test_what_cannot_be_filled_is_named() -> None:
    model = build()
    wrong: list[tuple[Any, Any, Any, dict[str, int], str]] = [
        (model, TOKENIZER, "the cat", {}, r"text is 'the cat', which holds no \[MASK\]: write \[MASK\] at each gap"),
        (model, TOKENIZER, 3, {}, "text is of type int, but must be a text"),
        (model, TOKENIZER, "[MASK]", {"top": 0}, "top is 0, but must be at least 1"),
        (build(vocab_size=300), TOKENIZER, "[MASK]", {}, "tokenizer has 258 tokens, but the model's vocabulary has 300"),
        (lineartime.build("flash-tiny", n_blocks=1), TOKENIZER, "[MASK]", {}, "model is a causal language model, which cannot"),
    ]
    for found, tokenizer, text, options, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            fill_mask(found, tokenizer, text, **options)
    short = build("transformer-tiny", n_heads=2, max_positions=10)
    with pytest.raises(ArgumentError, match="text has 11 tokens, but this model reads at most 10: shorten it"):
        fill_mask(short, TOKENIZER, "1234567890[MASK]")
    assert fill_mask(short, TOKENIZER, "123456789[MASK]")


def test_logits_that_are_not_finite_are_named() -> None:
    model = build()
    torch.nn.init.constant_(model.backbone.embedding.weight, float("nan"))
    with pytest.raises(LineartimeError, match="logits of the model are not finite: its weights are damaged"):
        fill_mask(model, TOKENIZER, "[MASK]")


def test_changed_weights_are_read_anew_in_an_autocast_of_the_caller() -> None:
    model = build()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = fill_mask(model, TOKENIZER, "a[MASK]")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-2)
        after = fill_mask(model, TOKENIZER, "a[MASK]")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert after == fill_mask(model, TOKENIZER, "a[MASK]") != before
