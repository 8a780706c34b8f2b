"""The tokens of a split: their ends of documents, counts and limits, and the files that hold them."""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from lineartime.choices import Split
from lineartime.data import ByteTokenizer, Corpus, JsonTokenizer, LocalCorpus, TokenStream, load_corpus, token_stream
from lineartime.data import tokens as tokens_module
from lineartime.errors import LineartimeError

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
    assert isinstance(stream.tokens, np.ndarray)
    assert not stream.tokens.flags.owndata
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
    lossy = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
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
