"""The tokens of a split: documents in parts and their ends, counts and limits, the files that hold them, and progress."""

import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from lineartime.choices import Split
from lineartime.data import ByteTokenizer, Corpus, JsonTokenizer, LocalCorpus, TokenStream, load_corpus, progress, token_stream
from lineartime.data import tokens as tokens_module
from lineartime.data.progress import Progress
from lineartime.data.tokenizers import _train_bpe, _train_unigram
from lineartime.data.tokens import encoded, write_tokens
from lineartime.errors import LineartimeError
from lineartime.generation import PromptState
from lineartime.text_generation import _masked_ids, prompt_ids

BYTES = ByteTokenizer()


class Blocks(Corpus):
    """A corpus of documents in the given blocks."""

    def __init__(self, *documents: list[str]) -> None:
        super().__init__(())
        object.__setattr__(self, "content", documents)
        self.content: tuple[list[str], ...]

    def identity(self, split: Split) -> str:
        return repr(self.content)

    def documents(self, split: Split) -> Iterator[Iterator[str]]:
        return (iter(blocks) for blocks in self.content)


def encode(corpus: Corpus, cache: Path, max_tokens: int | None = None) -> TokenStream:
    return token_stream(corpus, "all", BYTES, cache, max_tokens)


def test_every_document_is_followed_by_its_end(tmp_path: Path) -> None:
    stream = encode(Blocks([], ["a"], [""], [], ["", "é"]), tmp_path)
    assert stream.tokens.tolist() == [97, 256, 0xC3, 0xA9, 256]
    assert isinstance(stream.tokens, np.memmap)
    assert len(encode(Blocks(), tmp_path)) == 0


@settings(deadline=None, max_examples=50)  # other work on the machine must not make it fail
@given(st.lists(st.lists(st.text(alphabet="ab \n\u3000é", max_size=6), max_size=5), max_size=4))
def test_bytes_and_words_are_those_of_the_text_however_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[str]]
) -> None:
    stream = encode(Blocks(*documents), tmp_path_factory.mktemp("cache"))
    texts = ["".join(blocks) for blocks in documents]
    assert stream.n_bytes == sum(len(text.encode()) for text in texts)
    assert stream.n_words == sum(len(text.split()) for text in texts)
    assert BYTES.decode(stream.tokens.tolist()) == "".join(texts)
    assert (stream.tokens == 256).sum() == sum(1 for text in texts if text)


@pytest.mark.parametrize("most", [1, 6, 100])
def test_max_tokens_encodes_only_the_beginning(tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless() -> Iterator[Iterator[str]]:
        yield iter(["ab ", "cd"])
        yield iter(["efg\n"])
        if most < 10:
            raise AssertionError("nobody asked for this")

    monkeypatch.setattr(Blocks, "documents", lambda *_: endless())
    monkeypatch.setattr(tokens_module, "PART", 4)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    stream = encode(Blocks(), tmp_path, most)
    whole = [*b"ab cd", 256, *b"efg\n", 256]
    assert stream.tokens.tolist() == whole[:most]
    assert stream.n_bytes == sum(token < 256 for token in whole[:most])
    assert stream.n_words == len(BYTES.decode([32 if token == 256 else token for token in whole[:most]]).split())


def test_a_limit_counts_the_bytes_and_words_of_the_text_and_not_those_of_its_decoding(tmp_path: Path) -> None:
    vocabulary = {piece: token for token, piece in enumerate(["[UNK]", "[SEP]", "[MASK]", *"naive日本"])}
    lossy = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    lossy.normalizer = normalizers.BertNormalizer()  # lower case, no accents, spaces around characters of Chinese
    lossy.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    lossy.decoder = decoders.WordPiece()
    tokenizer = JsonTokenizer(lossy.to_str(), "lossy")
    text = "É 日本日本 N  Quelque\n" * 3  # an unknown word, 4 characters, a letter, an unknown word
    for most, beginning in {1: "É", 3: "É 日本", 5: "É 日本日本", 7: text[:17], 13: text[:26], 22: text, None: text}.items():
        stream = token_stream(Blocks([text]), "train", tokenizer, tmp_path, max_tokens=most)
        assert (len(stream), stream.n_bytes) == (most or 3 * 7 + 1, len(beginning.encode()))
        assert stream.n_words == len(beginning.split())


def test_documents_are_counted(tmp_path: Path) -> None:
    corpus = Blocks(["ab", "cd"], [], ["ef"], ["gh"])
    counts = {most: encode(corpus, tmp_path, most) for most in (None, 3, 5, 6, 9, 20)}
    assert {most: stream.n_documents for most, stream in counts.items()} == {None: 3, 3: 1, 5: 1, 6: 2, 9: 3, 20: 3}
    assert [most for most, stream in counts.items() if stream.is_cut] == [3, 5, 6, 9]


def test_text_is_encoded_once_and_again_only_after_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cache = tmp_path / "a", tmp_path / "cache"
    plain = BYTES.encode
    calls: list[str] = []
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: calls.append(text) or plain(text))
    for text, later in (("first", 0), ("first", 0), ("other", 5)):
        if later or not file.exists():
            file.write_text(text)
            os.utime(file, (time.time() + later, time.time() + later))
        assert BYTES.decode(encode(load_corpus(file), cache).tokens.tolist()) == text
    assert calls == ["first", "other"]


def test_what_cannot_be_encoded_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"caf\xe9")
    with pytest.raises(LineartimeError, match="is not UTF-8"):
        encode(load_corpus(tmp_path / "a"), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    with pytest.raises(LineartimeError, match=r"Cannot write .*a/.*: File exists"):
        encode(Blocks(["text"]), tmp_path / "a")


def test_what_a_killed_process_left_is_removed_once_it_is_old(tmp_path: Path) -> None:
    names = (f"{'0' * 20}.{'1' * 32}.partial", f"{'0' * 20}.{'2' * 32}.partial", "download.partial")
    old, new, other = (tmp_path / name for name in names)
    for file in (old, new, other):
        file.touch()
    for file in (old, other):
        os.utime(file, (time.time() - 7200, time.time() - 7200))
    encode(Blocks(["text"]), tmp_path)
    assert not old.exists()
    assert new.exists()
    assert other.exists(), "a file of another program is deleted"


def test_a_damaged_token_file_is_named_and_one_that_is_gone_encoded_again(tmp_path: Path) -> None:
    corpus = Blocks(["text " * 5])
    whole = encode(corpus, tmp_path).tokens.tolist()
    for file in list(tmp_path.iterdir()):
        content = file.read_bytes()
        file.write_bytes(content[:-1])
        with pytest.raises(LineartimeError, match=rf"^{file} is damaged.*: delete it to encode the text again"):
            encode(corpus, tmp_path)
        file.unlink()
        assert encode(corpus, tmp_path).tokens.tolist() == whole


def test_writers_of_the_same_tokens_do_no_harm_to_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("text " * 100)
    together, documents = threading.Barrier(3), LocalCorpus.documents

    def documents_of_all_at_once(self: LocalCorpus, split: Split) -> Iterator[Iterator[str]]:
        together.wait(60)  # all have found nothing
        yield from documents(self, split)
        together.wait(60)  # all have read the text

    monkeypatch.setattr(LocalCorpus, "documents", documents_of_all_at_once)
    corpus = load_corpus(tmp_path / "text.txt")
    with ThreadPoolExecutor(3) as pool:
        streams = list(pool.map(lambda _: encode(corpus, tmp_path / "cache"), range(3)))
    assert {BYTES.decode(stream.tokens.tolist()) for stream in streams} == {"text " * 100}
    assert len({stream.digest for stream in streams}) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 2


# Documents in parts -----------------------------------------------------------------------------------------------------------

WORDS = "It's the first  line of 12 words, naïve.\nA second\n\n\n  one\tsays: 3.14159265 and (maybe) don't! " * 4
MIXED = (
    f"{WORDS}日本語の文章は空白がない。次の行\n這是第二句話👨‍👩‍👧‍👦🏽 ﬁne e\u0301t\u0323e\u0301 ㌔ ﷺ end. {'word ' * 30}"
    f"{'ACGTTGCA' * 20} {'9876543210' * 9} then{' ' * 90}more \ufffd☃☃ text, {'<br>' * 40}{'=-' * 50}\r\n\r\n{WORDS}"
)
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WITHOUT_REGEX = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


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
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), WITHOUT_REGEX]), ignore_merges=True
    ),
    "Llama 2": llama2,
    "T5": unigram,
    "WordPiece": word_piece,
    "own Unigram": lambda: tokenizers.Tokenizer.from_str(_train_unigram(tokenizers, iter([WORDS, MIXED]), 700)),
    "own BPE": lambda: tokenizers.Tokenizer.from_str(_train_bpe(tokenizers, iter([WORDS, MIXED]), 500)),
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


# Progress ---------------------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_now_and_then_tell_what_is_done(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Progress("thinking") as shown:
        shown.advance(3)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "_PAUSE", 0)
    with Progress("reading") as shown:
        shown.advance(3)
        shown.advance(2000)
    with Progress("measuring", 4) as shown:
        shown.advance(3)
    assert capsys.readouterr().err.splitlines() == ["reading ... 3 bytes", "reading ... 2.0 kB", "measuring ... 75%"]


def test_a_terminal_shows_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    with Progress("encoding") as shown:
        shown.advance(2000)
    assert "encoding 2.0 kB" in terminal.getvalue()
