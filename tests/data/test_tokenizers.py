"""Tokenizers: text to tokens and back, whole, token by token and in parts, those that are trained, and their names."""

import json
import re
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from lineartime.cli import main
from lineartime.data import ByteTokenizer, JsonTokenizer, load_corpus, read_tokenizer, tokenizer_for, train_tokenizer
from lineartime.data import tokens as tokens_module
from lineartime.data.tokenizers import Tokenizer, _train_bpe, encoded, named_tokenizer
from lineartime.data.tokens import _beginning
from lineartime.errors import LineartimeError
from lineartime.generation import PromptState
from lineartime.text_generation import _masked_ids, prompt_ids

from .conftest import write

TEXT = "naïve 日本 text\nwith two lines and 🚀\n"


@pytest.fixture(params=["bytes", "json"])
def tokenizer(request: pytest.FixtureRequest, bpe: JsonTokenizer) -> Tokenizer:
    return ByteTokenizer() if request.param == "bytes" else bpe


def stream_decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = tokenizer.stream_decoder()
    return "".join(decoder.push(token) for token in ids) + decoder.flush()


def across() -> JsonTokenizer:
    """A byte-level BPE tokenizer with a token that ends one character and begins the next, as large ones have."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    begin, _, end = split.pre_tokenize_str("日")[0][0]
    vocabulary = {letter: index for index, letter in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), end + begin])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [(end, begin)]))
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.ByteLevel()
    return JsonTokenizer(tokenizer.to_str(), "across.json")


def fallback() -> JsonTokenizer:
    """A tokenizer that knows no character but has a token for each byte."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return JsonTokenizer(tokenizer.to_str(), "fallback.json")


def test_text_survives_encoding_and_decoding(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT).tolist()
    assert tokenizer.decode(ids) == TEXT
    specials = [tokenizer.end_of_document, tokenizer.mask]
    assert len({*ids, *specials}) == len(set(ids)) + 2
    assert max(*ids, *specials) < tokenizer.vocab_size
    assert tokenizer.decode([specials[0], *ids, *specials]) == TEXT
    decoder = tokenizer.stream_decoder()
    pieces = [decoder.push(token) for token in [*ids, tokenizer.end_of_document]]
    assert "".join(pieces) + decoder.flush() == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


def test_streamed_text_is_the_decoded_text_even_where_it_breaks(tokenizer: Tokenizer) -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        ids = generator.integers(0, tokenizer.vocab_size - 2, 60).tolist() + [200] * generator.integers(0, 100)
        assert stream_decoded(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["日" * 100, "日本日本\ufffd日", "x\ufffd😀y", "\ufffd" * 20 + "日😀", "😀" * 50 + "é"])
def test_a_token_may_end_one_character_and_begin_the_next(text: str) -> None:
    for tokenizer in (across(), fallback()):
        ids = tokenizer.encode(text).tolist()
        assert tokenizer.decode(ids) == text
        decoder = tokenizer.stream_decoder()
        pieces = [decoder.push(token) for token in ids]
        assert "".join(pieces) + decoder.flush() == text
        assert "".join(pieces) == text.rstrip("\ufffd")  # as soon as it is known


def test_a_space_is_kept_behind_a_token_without_text() -> None:
    words = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "cats": 2, "house": 3}, unk_token="[UNK]"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    words.add_special_tokens(["[UNK]"])
    tokenizer = JsonTokenizer(words.to_str(), "words.json")
    for text in ("the cats ☃ house ☃ ☃ the", "☃ the", "the " + "☃ " * 100 + "house"):
        ids = tokenizer.encode(text).tolist()
        assert stream_decoded(tokenizer, ids) == tokenizer.decode(ids)


def test_the_beginning_of_a_text_is_what_its_first_tokens_encode(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT).tolist()
    for count in range(len(ids) + 2):
        whole, beginning = tokenizer.decode(ids[:count]), tokenizer.beginning(TEXT, count)
        assert TEXT.startswith(beginning)
        assert (beginning == whole) if "\ufffd" not in whole else (len(beginning) == len(whole.rstrip("\ufffd")) + 1)


def test_a_vocabulary_with_gaps_is_as_large_as_its_highest_id() -> None:
    tokenizer = JsonTokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="?")).to_str(), "gaps.json")
    assert (tokenizer.end_of_document, tokenizer.mask, tokenizer.vocab_size) == (8, 9, 10)
    with pytest.raises(LineartimeError, match=r"The tokenizer gaps.json cannot encode the text \(.*Missing"):
        tokenizer.encode("c")


def test_a_tokenizer_of_the_hub_that_was_seen_needs_no_network_and_another_is_named(
    tmp_path: Path, bpe: JsonTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"refs/main": "a1" * 20, f"snapshots/{'a1' * 20}/tokenizer.json": bpe.to_json()}
    write(tmp_path / "models--org--name", files)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert named_tokenizer("hub:org/name").encode(TEXT).tolist() == bpe.encode(TEXT).tolist()
    for name in ("hub:gpt3", "hub:a/b/c"):
        with pytest.raises(LineartimeError, match=rf"^tokenizer is {name}, which cannot be read .* \(.+\): check the name"):
            named_tokenizer(name)


# Trained ones ----------------------------------------

LINES = "naïve 日本 text.\n\tindented\n" * 20 + Path(textwrap.__file__).read_text()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(LINES)
    return file


@settings(deadline=None, max_examples=50)  # other work on the machine must not make it fail
@given(st.text())
@example("<unk> <0x41> <|endoftext|> and [MASK] are text")
@example("  two\n\n\tspaces \u00a0\u3000 \r\n and trailing ")
@example("▁")
@example("e\u0301 \x00 \U0010ffff 猫")
def test_every_text_is_given_back(bpe: JsonTokenizer, text: str) -> None:
    ids = bpe.encode(text).tolist()
    assert bpe.decode(ids) == stream_decoded(bpe, ids) == text
    assert not {bpe.end_of_document, bpe.mask} & set(ids)


def test_a_saved_tokenizer_encodes_the_same(text: Path, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(load_corpus(text), 600)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    ids = tokenizer.encode(LINES).tolist()
    assert read_tokenizer(tmp_path).encode_batch(["", LINES])[1].tolist() == ids
    assert len(ids) < len(LINES.encode()) / 1.8
    assert max(tokenizer.end_of_document, tokenizer.mask) < 3
    assert max(ids) < tokenizer.vocab_size <= 600


def test_only_the_beginning_is_learned_from(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("aaaa bbbb\n" * 500 + "zzzz\n" * 500)
    few = train_tokenizer(load_corpus(tmp_path / "train.txt"), 300, max_bytes=1000)
    assert len(few.encode("aaaa")) == 1
    assert len(few.encode("zzzz")) == 4
    (tmp_path / "zh.txt").write_text("天地玄黄\n" * 200)  # a limit within the first character includes that one
    assert train_tokenizer(load_corpus(tmp_path / "zh.txt"), 300, max_bytes=1).decode([]) == ""


def test_overlong_words_do_not_slow_down_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[str] = []
    module = sys.modules[train_tokenizer.__module__]
    monkeypatch.setattr(module, "_train_bpe", lambda texts, size: learned.extend(texts))
    monkeypatch.setattr(module, "JsonTokenizer", lambda *_: None)
    words = ["ACGT" * 500, "天地玄黄" * 200, "3141" * 200, "=" * 700, "_" * 700, "b" * 499, " " * 800, "a 1-" * 2000]
    (tmp_path / "train.txt").write_text(" ".join(words))
    train_tokenizer(load_corpus(tmp_path / "train.txt"), 300)
    assert " ".join(words).startswith("".join(learned))  # the rest is held out
    assert max(len(run) for text in learned for run in re.findall(r"\w+|\s+|=+", text)) == 500
    assert any("b" * 499 in text for text in learned)


def test_an_option_names_a_tokenizer(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = load_corpus(text)
    for choice in (None, "bytes"):
        assert isinstance(tokenizer_for(choice, corpus, tmp_path), ByteTokenizer)
    trained = tokenizer_for("bpe-300", corpus, tmp_path)
    (tmp_path / "other.txt").write_text("bbbbb\n" * 1000)
    assert tokenizer_for("bpe-300", load_corpus(tmp_path / "other.txt"), tmp_path).to_json() != trained.to_json()
    assert trained.vocab_size == 300
    (tmp_path / "own.json").write_text(trained.to_json())
    for choice in (str(tmp_path / "own.json"), tmp_path / "own.json"):
        assert tokenizer_for(choice, corpus, tmp_path).to_json() == trained.to_json()
    monkeypatch.setattr(sys.modules[train_tokenizer.__module__], "train_tokenizer", None)  # nothing is trained from here on
    assert tokenizer_for("bpe-300", corpus, tmp_path).to_json() == trained.to_json()


def test_a_tokenizer_that_cannot_be_trained_or_found_is_an_error(text: Path, tmp_path: Path) -> None:
    corpus = load_corpus(text)
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    empty = load_corpus(tmp_path / "empty.jsonl")
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: train_tokenizer(corpus, 100), "^vocab_size is 100, but must be at least 260"),
        (lambda: train_tokenizer(corpus, 300, max_bytes=0), "^max_bytes is 0, but must be at least 1"),
        (lambda: train_tokenizer(empty, 300), "There is no text in the train split of"),
        (lambda: tokenizer_for("", corpus, tmp_path), "^tokenizer is empty: "),
        (lambda: tokenizer_for("bpe-9", corpus, tmp_path), "^tokenizer is bpe-9, but bpe tokenizers have from 260 to"),
        (lambda: tokenizer_for("unigram-600", corpus, tmp_path), "^tokenizer is unigram-600, .* use bpe-600, or train another"),
        (lambda: tokenizer_for("bpe-many", corpus, tmp_path), "^tokenizer is bpe-many, which is neither a file nor a name:"),
    ]
    for action, message in cases:
        with pytest.raises(LineartimeError, match=message):
            action()


def test_the_command_writes_a_tokenizer_and_never_over_another(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "tokenizer.json"
    arguments = ["tokenize", "--data", str(text), "--vocab-size", "550", "--out", str(out)]
    assert main(arguments) == 0
    assert f"{out}: BPE of 5" in capsys.readouterr().out
    assert read_tokenizer(out).decode(read_tokenizer(out).encode("naïve").tolist()) == "naïve"
    assert main(arguments) == 1
    assert "exists already: delete it, or choose another name" in capsys.readouterr().err


def test_the_command_says_when_there_was_too_little_text(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "t.json")
    assert main(["tokenize", "--data", str(text), "--out", out, "--vocab-size", "31000"]) == 0
    said = capsys.readouterr().err
    assert re.search(r"has [\d,]+ tokens instead of 31,000, because the text is too short for more: use .*\.", said)
    assert main(["tokenize", "--data", str(tmp_path / "missing"), "--out", f"{out}.new", "--vocab-size", "9"]) == 1
    assert "--vocab-size is 9, but must be at least 260" in capsys.readouterr().err  # before it looks for the text


# Documents in parts ----------------------------------------

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
    monkeypatch.setattr(tokens_module, "PART", 100)
    tokenizer, text = tokenizer_of(kind), MIXED[:300] + WORDS
    for most in range(1, len(tokenizer.encode(text)), 23):
        parts, ids = zip(*_beginning(tokenizer, [iter([text])], most), strict=True)
        assert sum(map(len, ids)) == most
        assert "".join(part.text for part in parts) == tokenizer.beginning(text, most)


@pytest.mark.parametrize("kind", ["T5", "Llama 2", "ByteLevel with a space before"])
def test_what_stands_inside_a_text_gets_nothing_put_before_it(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    alone, inside = (tokenizer.encode("line", inside=inside).tolist() for inside in (False, True))
    shown, shown_inside = ("".join(map(tokenizer.show, ids)) for ids in (alone, inside))
    assert shown != shown_inside == shown.lstrip("▁Ġ") == "line"
    assert _masked_ids(tokenizer, "line[MASK]line") == [*alone, tokenizer.mask, *inside]
    for last, ids in (((alone[-1],), inside), ((tokenizer.end_of_document,), alone)):
        assert prompt_ids(tokenizer, "line", PromptState((), torch.zeros(()), last)) == tuple(ids)
