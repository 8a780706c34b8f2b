from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from lineartime.data import ByteTokenizer, JsonTokenizer
from lineartime.data.tokenizers import Tokenizer, named_tokenizer
from lineartime.errors import LineartimeError

TEXT = "naïve 日本 text\nwith two lines and 🚀\n"


@pytest.fixture(params=["bytes", "json"])
def tokenizer(request: pytest.FixtureRequest, bpe: JsonTokenizer) -> Tokenizer:
    return ByteTokenizer() if request.param == "bytes" else bpe


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
        decoder = tokenizer.stream_decoder()
        streamed = "".join(decoder.push(token) for token in ids) + decoder.flush()
        assert streamed == tokenizer.decode(ids)


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
        decoder = tokenizer.stream_decoder()
        assert "".join(map(decoder.push, ids)) + decoder.flush() == tokenizer.decode(ids)


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
    folder, commit = tmp_path / "models--org--name", "a1" * 20
    for file, content in (("refs/main", commit), (f"snapshots/{commit}/tokenizer.json", bpe.to_json())):
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_text(content)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert named_tokenizer("hub:org/name").encode(TEXT).tolist() == bpe.encode(TEXT).tolist()
    for name in ("hub:gpt3", "hub:a/b/c"):
        with pytest.raises(LineartimeError, match=rf"^tokenizer is {name}, which cannot be read .* \(.+\): check the name"):
            named_tokenizer(name)
