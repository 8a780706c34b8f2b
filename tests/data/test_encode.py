"""Documents that are encoded in parts, with tokenizers of all families."""

import io
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers

from lineartime.data import JsonTokenizer
from lineartime.data import tokens as encode_module
from lineartime.data.tokenizers import _train_bpe, encoded
from lineartime.data.tokens import write_tokens
from lineartime.generation import PromptState
from lineartime.text_generation import _masked_ids, prompt_ids

WORDS = "It's the first  line of 12 words, naïve.\nA second\n\n\n  one\tsays: 3.14159265 and (maybe) don't! " * 4
MIXED = (
    f"{WORDS}日本語の文章は空白がない。次の行\n這是第二句話👨‍👩‍👧‍👦🏽 ﬁne e\u0301t\u0323e\u0301 ㌔ ﷺ end. {'word ' * 30}"
    f"{'ACGTTGCA' * 20} {'9876543210' * 9} then{' ' * 90}more \ufffd☃☃ text, {'<br>' * 40}{'=-' * 50}\r\n\r\n{WORDS}"
)
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def trained(model: Any, trainer: Any, pre_tokenizer: Any, normalizer: Any = None) -> Any:
    made = tokenizers.Tokenizer(model)
    made.normalizer, made.pre_tokenizer = normalizer, pre_tokenizer
    made.train_from_iterator([WORDS * 3 + MIXED], trainer)
    return made


def bpe(pre_tokenizer: Any, normalizer: Any = None, **model: Any) -> Any:
    specials, letters = [f"<0x{byte:02X}>" for byte in range(256)], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=specials, initial_alphabet=letters, max_token_length=16)
    return trained(models.BPE(**model), trainer, pre_tokenizer, normalizer)


def llama2() -> Any:
    """SentencePiece learns words, and encodes a text as if it were one."""
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fallback = {"unk_token": "<0x00>", "byte_fallback": True, "fuse_unk": True}
    learned = json.loads(bpe(pre_tokenizers.Split("▁", "merged_with_next"), spaces, **fallback).to_str())
    return tokenizers.Tokenizer.from_str(json.dumps({**learned, "pre_tokenizer": None}))


def unigram() -> Any:
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=["<unk>"], unk_token="<unk>")
    normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " ")])
    return trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(prepend_scheme="always"), normalizer)


def word_piece() -> Any:
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"])
    bert = pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()
    return trained(models.WordPiece(unk_token="[UNK]"), trainer, *bert)


KINDS: dict[str, Callable[[], Any]] = {
    "GPT-2": lambda: bpe(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "ByteLevel with a space before": lambda: bpe(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "Llama 3": lambda: bpe(
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTE_LEVEL]), ignore_merges=True
    ),
    "Llama 2": llama2,
    "T5": unigram,
    "WordPiece": word_piece,
    "own BPE": lambda: tokenizers.Tokenizer.from_str(_train_bpe(iter([WORDS, MIXED]), 500)),
}


@cache
def tokenizer_of(kind: str) -> JsonTokenizer:
    return JsonTokenizer(KINDS[kind]().to_str(), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_has_the_tokens_of_its_whole_text(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    for start in range(0, len(MIXED), 7):
        text = (MIXED * 2)[start:]
        blocks = iter([text[place : place + 70] for place in range(0, len(text), 70)])
        parts, ids = zip(*encoded(tokenizer, [blocks], 400), strict=True)
        assert np.concatenate(ids).tolist() == tokenizer.encode(text).tolist()
        assert "".join(part.text for part in parts) == text
        assert len(parts) > 2


def test_a_text_without_words_is_cut_at_lines_or_anywhere() -> None:
    for text, lengths in (("天地。\n" * 100, [152, 248]), ("acgt" * 100, [300, 100])):
        parts = [part for part, _ in encoded(tokenizer_of("own BPE"), [iter([text])], 150)]
        assert [len(part.text) for part in parts] == lengths
        assert "".join(part.text for part in parts) == text


@pytest.mark.parametrize("kind", ["T5", "own BPE"])
def test_a_limit_in_a_document_counts_the_beginning_of_its_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_module, "PART", 100)
    tokenizer, text = tokenizer_of(kind), MIXED[:300] + WORDS
    for most in range(1, len(tokenizer.encode(text)), 23):
        counts = write_tokens(io.BytesIO(), np.dtype(np.uint16), [iter([text])], tokenizer, most, lambda _: None)
        beginning = tokenizer.beginning(text, most)
        assert (counts["n_bytes"], counts["n_words"]) == (len(beginning.encode()), len(beginning.split()))


@pytest.mark.parametrize("kind", ["T5", "Llama 2", "ByteLevel with a space before"])
def test_what_stands_inside_a_text_gets_nothing_put_before_it(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    alone, inside = (tokenizer.encode("line", inside=inside).tolist() for inside in (False, True))
    shown, shown_inside = ("".join(map(tokenizer.show, ids)) for ids in (alone, inside))
    assert shown != shown_inside == shown.lstrip("▁Ġ") == "line"
    assert _masked_ids(tokenizer, "line[MASK]line") == [*alone, tokenizer.mask, *inside]
    for last, ids in (((alone[-1],), inside), ((tokenizer.end_of_document,), alone)):
        assert prompt_ids(tokenizer, "line", PromptState((), torch.zeros(()), last)) == tuple(ids)
